"""Text of arguments for comparison across ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ..registry import Registered
from .agreement import checksum_of

_MIN_HASHED_ELEMENTS = 10  # arrays with fewer elements are written out


def format_arguments(arguments: Mapping[str, object]) -> str:
    """Return arguments as text; paths are omitted, since they may differ between machines.

    Objects of registered classes are written with their arguments, other objects as their class.
    """
    kept_arguments = {k: v for k, v in arguments.items() if not (k.endswith("path") or isinstance(v, os.PathLike))}
    return ", ".join(f"{name}: {_format_value(value)}" for name, value in kept_arguments.items())


def describe_object(instance: object, arguments: Mapping[str, object]) -> str:
    """Return the class and arguments of an object as text."""
    return f"{type(instance).__name__} {format_arguments(arguments)}".rstrip()


def _format_value(value: object) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{format_arguments(value)}}}"
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        return (
            _format_value(array.tolist())
            if array.size < _MIN_HASHED_ELEMENTS
            else f"{array.shape} of hash {checksum_of(array):08x}"
        )
    return describe_object(value, value.arguments()) if isinstance(value, Registered) else type(value).__name__
