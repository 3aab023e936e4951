"""Records in a CSV file, one a line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...io.files import reason
from ...io.regular_file import open_regular
from .base import BadRecord, RecordReader

_BLOCK = 1 << 22


class CsvRecords(RecordReader):
    """Rows of a CSV file, of which only the places of its lines are kept in memory.

    A row of numbers is an array of float64; where a column of the first row is text, rows are arrays of text. A first
    line of names is recognised by numbers below one of them.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        try:
            self._file = open_regular(path)
            self._lines, self._starts = self._index()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({reason(error)}); name a CSV file") from error
        if not len(self._starts):
            raise DataError(f"{path}: is empty; expected one record per line")
        head = [self._cells(number) for number in range(min(2, len(self._starts)))]
        named = len(head) > 1 and len(head[0]) == len(head[1])
        named = named and any(not _number(name) and _number(value) for name, value in zip(*head, strict=True))
        if named:
            self.columns, self._lines, self._starts = head[0], self._lines[1:], self._starts[1:]
        first = head[-1] if named else head[0]
        self._width, self._text = len(first), not all(map(_number, first))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return rows by their numbers."""
        return [self._row(number) for number in numbers]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _row(self, number: int) -> np.ndarray:
        cells = self._cells(number)
        if len(cells) != self._width:
            raise self._bad(number, f"has {len(cells)} columns, expected {self._width}")
        if self._text:
            return np.array(cells)
        try:
            return np.array(cells, np.float64)
        except ValueError as error:
            at = next(at for at, cell in enumerate(cells) if not _number(cell))
            column = self.columns[at] if self.columns else at + 1
            raise self._bad(number, f"column {column}: {cells[at]!r} is not a number") from error

    def _bad(self, number: int, what: str) -> BadRecord:
        place = f"{self.path}:{self._lines[number]}"
        return BadRecord(number, f"{place}: {what}; correct the row, or skip it with --skip-bad-records")

    def _cells(self, number: int) -> list[str]:
        self._file.seek(self._starts[number])
        try:
            line = self._file.readline().decode("utf-8-sig").strip("\r\n")
            return [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise self._bad(number, f"cannot be read ({error})") from error

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the lines that are not empty, from 1, and where they begin."""
        ends, offset = [np.array([-1])], 0
        while block := self._file.read(_BLOCK):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
            offset += len(block)
        last = np.concatenate(ends)
        starts = last + 1
        lengths = np.diff(np.append(starts, offset + 1)) - 1
        filled = np.array([length > 2 or self._filled(start) for start, length in zip(starts, lengths, strict=True)])
        return np.flatnonzero(filled) + 1, starts[filled]

    def _filled(self, start: int) -> bool:
        self._file.seek(start)
        return bool(self._file.readline().strip(b"\xef\xbb\xbf\r\n \t"))


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
