"""Policies as text: 'tower', or 'quantised(bits=8)'."""

from __future__ import annotations

import ast
import inspect
import re

from ...errors import ConfigError
from ...registry import registered, suggest
from .base import ExchangePolicy


def scheme_names() -> dict[str, type[ExchangePolicy]]:
    """Return all schemes by their name in text: the class, in small letters with underscores."""
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): cls for name, cls in registered(ExchangePolicy).items()
    }


def scheme_text(scheme: ExchangePolicy) -> str:
    """Return the scheme as text that `as_scheme` reads; arguments at their defaults are left out."""
    name = next((name for name, cls in scheme_names().items() if cls is type(scheme)), type(scheme).__name__)
    defaults = inspect.signature(type(scheme)).parameters
    given = {key: value for key, value in scheme.arguments().items() if value != defaults[key].default}
    return name + (f"({', '.join(f'{key}={value}' for key, value in given.items())})" if given else "")


def as_scheme(scheme: ExchangePolicy | str) -> ExchangePolicy:
    """Return the scheme of a text; a scheme is returned as it is.

    Raises
    ------
    ConfigError
        If there is none of this name, or it has no such argument.
    """
    if isinstance(scheme, ExchangePolicy):
        return scheme
    matched = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", str(scheme))
    name, arguments = matched.groups() if matched else (str(scheme), None)
    choices = scheme_names()
    if name not in choices:
        raise ConfigError(f"scheme '{scheme}' is unknown{suggest(name, choices)}")
    pairs = [pair.partition("=") for pair in (arguments or "").split(",") if pair.strip()]
    given = {key.strip(): _value(text.strip()) for key, _, text in pairs}
    known = inspect.signature(choices[name]).parameters
    for key in given:
        if key not in known:
            raise ConfigError(
                f"scheme '{scheme}': {name} has no argument '{key}'{suggest(key, known) or '; it has none'}"
            )
    return choices[name](**given)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text
