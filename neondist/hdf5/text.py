"""What may be read of a file that may be damaged: plain numbers, and text of fixed length."""

from __future__ import annotations

from typing import Any

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def put_text(attributes: Any, name: str, text: str) -> None:
    """Write an attribute as text of fixed length, at most 60 kB; longer text belongs into an array of bytes."""
    import numpy as np

    attributes[name] = np.bytes_(text.encode())


def get_text(attributes: Any, name: str) -> str:
    """Return what `put_text` wrote; KeyError or ValueError if it is missing or something else."""
    found = attributes.get_id(name)
    if found.dtype.kind != "S" or found.shape != ():
        raise ValueError(f"attribute {name} is not text of fixed length")
    return bytes(attributes[name]).decode()


def plain(array: Any) -> bool:
    """Tell whether the cells of a dataset (or of an attribute's id) are numbers: no text, references or records."""
    return array.dtype.kind in "biuf"
