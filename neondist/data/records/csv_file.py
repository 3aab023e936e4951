"""Records in a CSV file, one per line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...io.files import short_reason
from ...io.regular_file import open_regular
from ...terminal.console import counted
from ..csv_table import is_number, require_commas
from .base import BadRecordError, RecordReader

_BLOCK_BYTES = 1 << 22


class CsvRecords(RecordReader):
    """Rows of a CSV file; only the line offsets are kept in memory.

    A row is an array of float64, or of text if a column of the first row has text. The first line is a header if it
    has text in a column whose next entry is a number, or if it numbers the columns after an empty cell.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        try:
            self._file = open_regular(path)
            self._line_numbers, self._line_offsets = self._index_lines()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({short_reason(error)}); specify a CSV file") from error
        if not len(self._line_offsets):
            raise DataError(f"{path}: is empty; expected one record per line")
        first_rows = [self._read_cells(number) for number in range(min(2, len(self._line_offsets)))]
        require_commas(path, first_rows, "1.5,2,3", numeric=True)
        has_header = len(first_rows) > 1 and len(first_rows[0]) == len(first_rows[1])
        if has_header:
            names = first_rows[0]
            has_header = names == ["", *map(str, range(len(names) - 1))] or any(
                _is_text(name) and is_number(cell) for name, cell in zip(*first_rows, strict=True)
            )
        if has_header:
            self.column_names = first_rows[0]
            self._line_numbers, self._line_offsets = self._line_numbers[1:], self._line_offsets[1:]
        first_record = first_rows[-1] if has_header else first_rows[0]
        self._column_count, self._has_text = len(first_record), any(map(_is_text, first_record))

    def __len__(self) -> int:
        return len(self._line_offsets)

    def describe_row(self) -> str:
        """Return the number and type of the cells of a row as text."""
        return counted(self._column_count, "text cell" if self._has_text else "number")

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return rows by their numbers."""
        return [self._read_row(number) for number in record_numbers]

    def describe_record(self, number: int) -> str:
        """Return the file and line of a row."""
        return f"{self.path}:{self._line_numbers[number]}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_row(self, number: int) -> np.ndarray:
        cells = self._read_cells(number)
        if len(cells) != self._column_count:
            raise self._bad_record(number, f"has {counted(len(cells), 'column')}, expected {self._column_count}")
        if self._has_text:
            return np.array(cells)
        try:
            return np.array(cells, np.float64)
        except ValueError as error:
            index = next(index for index, cell in enumerate(cells) if not is_number(cell))
            column = self.column_names[index] if self.column_names else index + 1
            raise self._bad_record(number, f"column {column}: {cells[index]!r} is not a number") from error

    def _bad_record(self, number: int, problem: str) -> BadRecordError:
        return BadRecordError(
            number, f"{self.describe_record(number)}: {problem}; correct the row, or skip it with --skip-bad-records"
        )

    def _read_cells(self, number: int) -> list[str]:
        self._file.seek(self._line_offsets[number])
        try:
            line = self._file.readline().decode("utf-8-sig").strip("\r\n")
            return [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise self._bad_record(number, f"cannot be read ({error})") from error

    def _index_lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers, from 1, and the offsets of the lines that are not empty."""
        newline_offsets, offset = [np.array([-1])], 0
        while block := self._file.read(_BLOCK_BYTES):
            newline_offsets.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
            offset += len(block)
        line_ends = np.concatenate(newline_offsets)
        starts = line_ends + 1
        lengths = np.diff(np.append(starts, offset + 1)) - 1
        is_not_blank = np.array(
            [length > 2 or self._is_non_blank_line(start) for start, length in zip(starts, lengths, strict=True)]
        )
        return np.flatnonzero(is_not_blank) + 1, starts[is_not_blank]

    def _is_non_blank_line(self, start: int) -> bool:
        self._file.seek(start)
        return bool(self._file.readline().strip(b"\xef\xbb\xbf\r\n \t"))


def _is_text(cell: str) -> bool:
    return bool(cell) and not is_number(cell)
