"""Journal of the completed parts of a long job: a few bytes per part, consistent even if the job is killed."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .files import append_text, convert_file_errors, write_text
from .regular_file import read_bytes

_FILE_TITLE = "neondist journal 1"


class ProgressJournal:
    """Text file with a description of the job and one line per completed part.

    Each line ends with its own checksum, so that incomplete lines are ignored.

    Attributes
    ----------
    recorded_job : dict or None
        Description of the job in the file; None if the file has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorded_job: dict[str, Any] | None = None
        self._completed_parts: set[int] = set()
        with convert_file_errors(path, "cannot be read"):
            text = read_bytes(path).decode(errors="replace") if path.exists() else ""
            lines = text.split("\n") if text else []
        try:
            header = json.loads(lines[0]) if lines else None
        except ValueError:
            header = None
        if isinstance(header, dict) and header.pop("title", None) == _FILE_TITLE:
            self.recorded_job, self._header_checksum = header, zlib.crc32(lines[0].encode())
            words = (line.split(" ") for line in lines[1:-1])  # text after the last line break is incomplete
            self._completed_parts = {int(word[0]) for word in words if word == [word[0], self._line_checksum(word[0])]}

    def completed_parts(self, job: dict[str, Any], overwrite: bool) -> set[int]:
        """Return the numbers of the completed parts.

        Parameters
        ----------
        job : dict
            Named values that determine the results, as plain JSON.
        overwrite : bool
            Whether to start over if the journal belongs to another job.

        Raises
        ------
        OutputError
            If the journal belongs to another job and `overwrite` is False; the message names the values that differ.
        """
        expected = json.loads(json.dumps(job))
        recorded = expected if self.recorded_job is None else self.recorded_job
        differing_names = [name for name in expected if expected[name] != recorded.get(name)]
        if differing_names and not overwrite:
            raise OutputError(
                f"{self.path}: belongs to a job with different {' and '.join(differing_names)}; give the same values"
                " to resume it, or start over (--overwrite)"
            )
        return set() if differing_names else set(self._completed_parts)

    @property
    def is_empty(self) -> bool:
        """Whether no part was completed when the journal was read."""
        return not self._completed_parts

    def write_header(self, job: dict[str, Any]) -> None:
        """Start a new journal for a job, with no completed parts."""
        header_line = json.dumps({"title": _FILE_TITLE, **job})
        write_text(self.path, header_line + "\n")
        self.recorded_job, self._header_checksum, self._completed_parts = job, zlib.crc32(header_line.encode()), set()

    def record_part(self, part: int) -> None:
        """Record a completed part, whose data is on disk."""
        append_text(self.path, f"{part} {self._line_checksum(str(part))}\n")

    def delete_file(self) -> None:
        """Remove the journal of a completed job."""
        with convert_file_errors(self.path, "cannot be removed"):
            os.unlink(self.path)

    def _line_checksum(self, part_number: str) -> str:
        return f"{zlib.crc32(part_number.encode(), self._header_checksum):08x}"
