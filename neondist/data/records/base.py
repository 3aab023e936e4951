"""The reader of records that all sources have in common."""

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
    """Records by number: each is one array.

    Attributes
    ----------
    name : str
        The source as the user has named it.
    columns : list of str
        Names of a record's entries, where the source has them.
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
        """Read everything, and return the numbers of the records that cannot be read, with the reason for each."""
        found: list[tuple[int, str]] = []
        for number in range(len(self)):
            try:
                self.read([number])
            except BadRecord as error:
                found.append((number, str(error)))
        return found

    def close(self) -> None:  # noqa: B027 - most have none
        """Let go of open files."""


class Sequential(RecordReader):
    """The records of several sources, one after the other."""

    def __init__(self, name: str, parts: Sequence[RecordReader]) -> None:
        super().__init__(name)
        self.parts, self.columns = list(parts), parts[0].columns
        self._ends = np.array(list(accumulate(map(len, parts))))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers over all parts."""
        found = []
        for number in numbers:
            at = int(np.searchsorted(self._ends, number, side="right"))
            first = int(self._ends[at]) - len(self.parts[at])
            try:
                found += self.parts[at].read([number - first])
            except BadRecord as error:
                raise BadRecord(number, str(error)) from error
        return found

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()


class Users(RecordReader):
    """Return value of a user's function: an object with a length that returns arrays by number."""

    def __init__(self, name: str, records: Any) -> None:
        super().__init__(name)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers."""
        found = []
        for number in numbers:
            try:
                found.append(np.asarray(self._records[number]))
            except Exception as error:
                what = f"custom_data_reader failed for record {number}: {type(error).__name__}: {error}"
                raise BadRecord(number, f"{self.name}: {what}") from error
        return found
