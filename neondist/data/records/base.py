"""Base class of record readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import DataError


class BadRecordError(DataError):
    """Error of a record that cannot be read; `record_number` is the record's number, from 0."""

    record_number: int

    def __init__(self, record_number: int, message: str) -> None:
        super().__init__(message)
        self.record_number = record_number


class RecordReader(ABC):
    """Reader of records by number; each record is one array.

    Attributes
    ----------
    source : str
        The source, as given by the user.
    column_names : list of str
        Names of a record's entries; empty if the source has none.
    """

    source: str
    column_names: list[str]

    def __init__(self, source: str) -> None:
        self.source, self.column_names = source, []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers; BadRecordError if one cannot be read."""

    def describe_record(self, number: int) -> str:
        """Return the location of a record."""
        return f"{self.source}: record {number}"

    def find_bad_records(self) -> list[tuple[int, str]]:
        """Read all records, and return the numbers of those that cannot be read, each with the error message."""
        errors: list[tuple[int, str]] = []
        for number in range(len(self)):
            try:
                self.read([number])
            except BadRecordError as error:
                errors.append((number, str(error)))
        return errors

    def close(self) -> None:  # noqa: B027 - optional
        """Close files, if any."""


class ConcatenatedRecords(RecordReader):
    """Concatenation of the records of several sources."""

    def __init__(self, source: str, readers: Sequence[RecordReader]) -> None:
        super().__init__(source)
        self.readers, self.column_names = list(readers), readers[0].column_names
        self._cumulative_lengths = np.array(list(accumulate(map(len, readers))))

    def __len__(self) -> int:
        return int(self._cumulative_lengths[-1])

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers over all parts."""
        records = []
        for number in record_numbers:
            reader, number_in_part = self._find_part(number)
            try:
                records += reader.read([number_in_part])
            except BadRecordError as error:
                raise BadRecordError(number, str(error)) from error
        return records

    def describe_record(self, number: int) -> str:
        """Return the location of a record within its part."""
        reader, number_in_part = self._find_part(number)
        return reader.describe_record(number_in_part)

    def _find_part(self, number: int) -> tuple[RecordReader, int]:
        index = int(np.searchsorted(self._cumulative_lengths, number, side="right"))
        first_number = int(self._cumulative_lengths[index]) - len(self.readers[index])
        return self.readers[index], number - first_number

    def close(self) -> None:
        """Close all parts."""
        for part in self.readers:
            part.close()


class UserRecords(RecordReader):
    """Records of an object returned by a user's function; the object has a length and is indexed by number."""

    def __init__(self, source: str, records: Any) -> None:
        super().__init__(source)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers."""
        records = []
        for number in record_numbers:
            try:
                records.append(np.asarray(self._records[number]))
            except Exception as error:
                problem = f"custom_data_reader failed for record {number}: {type(error).__name__}: {error}"
                raise BadRecordError(number, f"{self.source}: {problem}") from error
        return records
