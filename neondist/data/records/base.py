"""Base class of record readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import DataError


class BadRecord(DataError):
    """A record that cannot be read; `record` is its number, from 0."""

    record: int

    def __init__(self, record: int, message: str) -> None:
        super().__init__(message)
        self.record = record


class RecordReader(ABC):
    """Reader of records by number, each one array.

    Attributes
    ----------
    name : str
        The source, as given by the user.
    columns : list of str
        Names of a record's entries; empty if the source has none.
    """

    name: str
    columns: list[str]

    def __init__(self, name: str) -> None:
        self.name, self.columns = name, []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers; BadRecord if one cannot be read."""

    def find_bad(self) -> list[tuple[int, str]]:
        """Read all records, and return the numbers of those that cannot be read, each with the error message."""
        errors: list[tuple[int, str]] = []
        for number in range(len(self)):
            try:
                self.read([number])
            except BadRecord as error:
                errors.append((number, str(error)))
        return errors

    def close(self) -> None:  # noqa: B027 - optional
        """Close files, if any."""


class ConcatenatedRecords(RecordReader):
    """Concatenation of the records of several sources."""

    def __init__(self, name: str, parts: Sequence[RecordReader]) -> None:
        super().__init__(name)
        self.parts, self.columns = list(parts), parts[0].columns
        self._ends = np.array(list(accumulate(map(len, parts))))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers over all parts."""
        records = []
        for number in numbers:
            index = int(np.searchsorted(self._ends, number, side="right"))
            first = int(self._ends[index]) - len(self.parts[index])
            try:
                records += self.parts[index].read([number - first])
            except BadRecord as error:
                raise BadRecord(number, str(error)) from error
        return records

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()


class UserRecords(RecordReader):
    """Records returned by a user's function: an object with a length that is indexed by number."""

    def __init__(self, name: str, records: Any) -> None:
        super().__init__(name)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers."""
        records = []
        for number in numbers:
            try:
                records.append(np.asarray(self._records[number]))
            except Exception as error:
                problem = f"custom_data_reader failed for record {number}: {type(error).__name__}: {error}"
                raise BadRecord(number, f"{self.name}: {problem}") from error
        return records
