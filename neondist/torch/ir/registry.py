"""Registry of the rules that distribute operators; a rule is a small function, and users may add their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...errors import ConfigError


class Rule(NamedTuple):
    """Rule for distributing an operator.

    Attributes
    ----------
    function : callable
        `function(lowering, **arguments) -> Value`; the arguments are the operator's, by their names in its schema, with
        `self` and `input` renamed to `x`.
    applies_if_replicated, whole : as for `rule`
    """

    function: Callable[..., Any]
    applies_if_replicated: bool
    whole: tuple[str, ...] = ()


TRACING_LOCK = threading.Lock()
"""Lock held while PyTorch traces: tracing patches PyTorch's functions, so virtual ranks must take turns."""
RULES: dict[str, Rule] = {}
POINTWISE_OPS: set[str] = set()
"""Operators whose results each depend on one index of each argument."""
CAPTURE_REPLACEMENTS: dict[Any, Callable[..., Any]] = {}
"""PyTorch functions that cannot be captured, or need a check, and the functions captured instead."""


def rule(
    *names: str, applies_if_replicated: bool = False, whole: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the rule of operators.

    Parameters
    ----------
    names : str
        Operator names as printed by torch.export, such as 'aten.conv2d.default'.
    applies_if_replicated : bool
        Whether the rule also applies if all arguments are replicated on every rank.
    whole : sequence of str
        Names of arguments that every rank needs whole, such as weights that a module computes from cells.

    Raises
    ------
    ConfigError
        If a name is not of the form NAMESPACE.NAME.OVERLOAD.
    """

    for name in names:
        if not isinstance(name, str) or len(list(filter(None, name.split(".")))) < 3:
            raise ConfigError(
                f"rule: {name!r} is not an operator name; expected NAMESPACE.NAME.OVERLOAD, as in 'mine.energy.default'"
            )

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, Rule(function, applies_if_replicated, tuple(whole))))
        return function

    return register


def rule_table() -> list[tuple[str, str, list[str]]]:
    """Return (kind, description, operators) for all operators that have a rule; kinds are modules of `rules`."""
    names_by_heading: dict[tuple[str, str], list[str]] = {}
    for name, (function, *_) in RULES.items():
        heading = function.__module__.rpartition(".")[2], (function.__doc__ or "").strip().split("\n")[0]
        names_by_heading.setdefault(heading, []).append(name)
    heading = "pointwise", "Compute each result locally from one index of each argument."
    names_by_heading[heading] = sorted(POINTWISE_OPS - RULES.keys())
    return sorted((*heading, names) for heading, names in names_by_heading.items())
