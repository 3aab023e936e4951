"""Names of classes for reports, in checkpoints and run folders."""

from __future__ import annotations

import json
from pathlib import Path

from ..data import Dataset
from ..errors import DataError
from ..io.checkpoint import read_checkpoint_texts
from ..io.checkpoint.texts import parse_json, require_json_type
from ..io.output import CLASS_NAMES
from ..io.regular_file import read_bytes

CLASSES_TEXT_NAME = "classes"


def format_class_names(dataset: Dataset) -> str:
    """Return the names of the classes of a data set as a JSON list; '' if it has none."""
    return json.dumps([str(name) for name in dataset.class_names]) if dataset.class_names else ""


def class_name_texts(dataset: Dataset) -> dict[str, str]:
    """Return the names of the classes as {name of the text in a checkpoint: JSON}; {} if the data set has none."""
    text = format_class_names(dataset)
    return {CLASSES_TEXT_NAME: text} if text else {}


def read_checkpoint_class_names(path: Path) -> list[str]:
    """Return the names of the classes in a verified checkpoint, [] if it has none; raise DataError if invalid."""
    text = read_checkpoint_texts(path).get(CLASSES_TEXT_NAME, "[]")
    try:
        return _parse_class_names(text)
    except ValueError as problem:
        raise DataError(f"{path}: its class names are invalid ({problem}); specify another file") from None


def read_run_class_names(folder: Path) -> list[str]:
    """Return the names of the classes of a run; [] if it has none; raise DataError if they cannot be read."""
    path = folder / CLASS_NAMES
    if not path.is_file():
        return []
    try:
        return _parse_class_names(read_bytes(path, root=folder).decode())
    except (OSError, ValueError):
        raise DataError(f"{path}: is not a JSON list of class names; remove the file") from None


def _parse_class_names(text: str) -> list[str]:
    return [require_json_type("a class name", name, str) for name in parse_json(text, list)]
