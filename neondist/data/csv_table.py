"""CSV tables of labels."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from ..errors import DataError
from ..io.files import short_reason
from ..io.regular_file import read_bytes


def read_csv_rows(path: Path, columns: str) -> list[tuple[int, list[str]]]:
    """Return the non-empty rows of a CSV file, each with its line number; `columns` is the format named in errors."""
    try:
        reader = csv.reader(StringIO(read_bytes(path).decode("utf-8-sig"), newline=""))
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({short_reason(error)}); give a CSV file of {columns}") from error
    require_commas(path, [row for _, row in rows], columns)
    return rows


def require_commas(path: Path, rows: Sequence[Sequence[str]], columns: str, numeric: bool = False) -> None:
    """Raise DataError if all rows separate columns by other characters; `numeric`: only if the last row has numbers."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if not rows or not all(len(row) == 1 and separator in row[0] for row in rows):
            continue
        if not numeric or all(map(is_number, rows[-1][0].split(separator))):
            raise DataError(f"{path}: separates columns with {name}; use commas, as in {columns}")


def is_number(text: str) -> bool:
    """Return whether a text is a number, such as '-1.5e3'."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # which float ignores
