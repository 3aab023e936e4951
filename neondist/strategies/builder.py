"""Base class of strategy builders."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from ..errors import ConfigError
from ..registry import Registered, registered_classes, suggest
from ..registry.arguments import check_value
from ..registry.fields import constructor_fields
from ..registry.names import classes_by_short_name
from ..registry.ranges import Count
from .parameter_spec import ParameterSpec
from .strategy import ParameterStrategy, Strategy


@runtime_checkable
class DeviceCounts(Protocol):
    """Device counts of a job, as given by a resource spec."""

    @property
    def replicas(self) -> int:
        """Number of data-parallel copies of the model."""

    @property
    def servers(self) -> int:
        """Number of devices that can own parameters."""


class StrategyBuilder(Registered, ABC):
    """Base class of builders, which create a strategy for any list of parameters.

    Subclasses implement `assign`.
    """

    def build(self, parameters: Iterable[ParameterSpec], resources_or_ranks: DeviceCounts | int) -> Strategy:
        """Return the strategy for some parameters, as a deterministic function of the arguments, without MPI.

        Parameters
        ----------
        parameters : iterable of ParameterSpec
            Parameters, in the order of the model.
        resources_or_ranks : resource spec, or int
            An int is the number of replicas, each of which may own parameters.

        Raises
        ------
        ConfigError
            If two parameters have the same name, an argument has the wrong type, there are no replicas, or `assign`
            does not fit the parameters.
        """
        if isinstance(resources_or_ranks, DeviceCounts):
            replicas, servers = resources_or_ranks.replicas, resources_or_ranks.servers
        else:
            check_value("replicas", resources_or_ranks, Count)
            replicas = servers = int(resources_or_ranks)
        parameters = list(parameters) if isinstance(parameters, Iterable) else parameters
        check_value("parameters", parameters, list[ParameterSpec])
        specs: dict[str, ParameterSpec] = {}
        for spec in parameters:
            if spec.name in specs:
                raise ConfigError(f"parameter '{spec.name}': given twice; names must be unique within a model")
            specs[spec.name] = spec
        assigned = self.assign(list(specs.values()), replicas, servers)
        check_value(f"{type(self).__name__}.assign", assigned, dict[str, Any])
        ordered = {name: assigned[name] for name in specs if name in assigned}
        return Strategy(format_builder(self), replicas, servers, specs, ordered)

    @property
    def needs_servers(self) -> bool:
        """Whether updates do not wait for all replicas and are therefore applied by parameter servers."""
        return False

    @abstractmethod
    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return how each parameter, by name, is partitioned, owned and synchronised."""


def format_builder(builder: StrategyBuilder) -> str:
    """Return a builder as text that `as_builder` reads; arguments at their defaults are left out."""
    defaults = {name: field.default for name, field in constructor_fields(type(builder)).items()}
    changed_arguments = {name: value for name, value in builder.arguments().items() if value != defaults[name]}
    arguments = ", ".join(f"{name}={value!r}" for name, value in changed_arguments.items())
    return type(builder).__name__ + (f"({arguments})" if changed_arguments else "")


def as_builder(builder: StrategyBuilder | str) -> StrategyBuilder:
    """Return the builder for a text such as 'PSLoadBalancing' or 'PS(staleness=2)'; return a builder unchanged.

    Raises
    ------
    ConfigError
        If the builder is unknown, or its arguments are wrong.
    """
    if isinstance(builder, StrategyBuilder):
        return builder
    match = re.fullmatch(r"\s*(\w+)\s*(\(.*\))?\s*", str(builder), re.DOTALL)
    name, arguments = match.groups() if match else (str(builder), None)
    choices = classes_by_short_name(StrategyBuilder) | registered_classes(StrategyBuilder)
    if name not in choices:
        raise ConfigError(f"strategy: unknown builder '{builder}'{suggest(name, choices)}")
    try:
        call = cast(ast.Call, ast.parse(f"_{arguments or '()'}", mode="eval").body)
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args or "None" in fields:
            raise ValueError(arguments)
    except (ValueError, SyntaxError, AttributeError, MemoryError, RecursionError):
        raise ConfigError(
            f"strategy: '{builder}': invalid arguments; expected names and values, such as PS(staleness=2)"
        ) from None
    arguments_by_name = constructor_fields(choices[name])
    for key in fields:
        if key not in arguments_by_name:
            suggestion = suggest(key, arguments_by_name) or ""
            raise ConfigError(f"strategy: '{builder}': {name} has no argument '{key}'{suggestion}")
    for key, argument in arguments_by_name.items():
        if argument.required and key not in fields:
            raise ConfigError(f"strategy: '{builder}': {name} requires '{key}'; write {name}({key}=...)")
    try:
        return cast(StrategyBuilder, choices[name](**fields))
    except ConfigError as error:
        raise ConfigError(f"strategy: '{builder}': {error}") from None


def as_strategy(strategy: StrategyBuilder | Strategy | str) -> StrategyBuilder | Strategy:
    """Return the named builder, or the strategy in a YAML file; return other values unchanged.

    Raises
    ------
    ConfigError
        If the name is unknown, or the file is invalid.
    """
    if not isinstance(strategy, str):
        return strategy
    if not strategy.endswith((".yaml", ".yml")):
        return as_builder(strategy)
    try:
        return Strategy.load(strategy)
    except ConfigError as error:
        raise ConfigError(f"strategy: {error}") from None
