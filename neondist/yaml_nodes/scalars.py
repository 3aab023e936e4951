"""Conversion of YAML scalars to Python values."""

from __future__ import annotations

import re

from yaml.constructor import SafeConstructor

from .tree import PlainValue

# YAML 1.1 reads numbers such as 1e-3 (no dot) and 1.0e3 (no sign) as text
_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def parse_scalar(text: str, kind: str, quoted: bool) -> PlainValue:
    """Return the value of a scalar of a YAML core `kind` ('int', 'str', ...); ValueError for invalid text."""
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in SafeConstructor.bool_values:
            raise ValueError(text)
        return SafeConstructor.bool_values[text.lower()]
    if kind in ("int", "float") or (not quoted and _EXPONENT_NUMBER.fullmatch(text)):
        return _parse_number(text)
    return text


def is_exponent_number(text: str) -> bool:
    """Return whether a text is a number with an exponent, which only quotes keep from being read as a number."""
    return bool(_EXPONENT_NUMBER.fullmatch(text))


def _parse_number(text: str) -> PlainValue:
    number_text = text.replace("_", "").lower()
    if number_text.lstrip("+-") in (".inf", ".nan"):
        return float(number_text.replace(".", ""))
    if ":" in number_text:
        return text  # YAML 1.1 would read 1:30 as the number 90
    for convert in (int, lambda word: int(word, 0), float):
        try:
            return convert(number_text)
        except ValueError:
            continue
    raise ValueError(text)
