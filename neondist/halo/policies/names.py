"""Policies as text: 'tower', or 'quantised(bits=8)'."""

from __future__ import annotations

import ast
import inspect
import re

from ...errors import ConfigError
from ...registry import registered_classes, suggest
from .base import ExchangePolicy


def schemes_by_name() -> dict[str, type[ExchangePolicy]]:
    """Return all schemes by name: the class name in snake_case."""
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): cls
        for name, cls in registered_classes(ExchangePolicy).items()
    }


def scheme_text(scheme: ExchangePolicy) -> str:
    """Return the scheme as text that `as_scheme` parses; arguments with default values are omitted."""
    name = next((name for name, cls in schemes_by_name().items() if cls is type(scheme)), type(scheme).__name__)
    defaults = inspect.signature(type(scheme)).parameters
    arguments = {key: value for key, value in scheme.arguments().items() if value != defaults[key].default}
    return name + (f"({', '.join(f'{key}={value}' for key, value in arguments.items())})" if arguments else "")


def as_scheme(scheme: ExchangePolicy | str) -> ExchangePolicy:
    """Return the scheme that a text describes; a scheme is returned unchanged.

    Raises
    ------
    ConfigError
        If the scheme or an argument is unknown.
    """
    if isinstance(scheme, ExchangePolicy):
        return scheme
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", str(scheme))
    name, arguments = match.groups() if match else (str(scheme), None)
    classes_by_name = schemes_by_name()
    if name not in classes_by_name:
        raise ConfigError(f"scheme '{scheme}' is unknown{suggest(name, classes_by_name)}")
    key_value_pairs = [pair.partition("=") for pair in (arguments or "").split(",") if pair.strip()]
    values = {key.strip(): _parse_value(text.strip()) for key, _, text in key_value_pairs}
    parameters = inspect.signature(classes_by_name[name]).parameters
    for key in values:
        if key not in parameters:
            raise ConfigError(
                f"scheme '{scheme}': {name} has no argument '{key}'{suggest(key, parameters) or '; it takes none'}"
            )
    try:
        return classes_by_name[name](**values)
    except ConfigError as error:
        raise ConfigError(f"scheme '{scheme}': {error}") from None


def _parse_value(value_text: str) -> object:
    try:
        return ast.literal_eval(value_text.capitalize() if value_text in ("true", "false") else value_text)
    except (ValueError, SyntaxError):
        return value_text
