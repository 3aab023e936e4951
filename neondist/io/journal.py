"""Journal of the completed parts of a long job: a few bytes for each, valid whenever the job is killed."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .files import append, file_errors, write_text
from .regular_file import read_bytes

_TITLE = "neondist journal 1"


class Journal:
    """A text file: what the job is, and a line for each part that is done.

    A line is complete or nothing, whoever else writes: it ends with its own checksum.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    job : dict or None
        What is said there of the job; None: nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job: dict[str, Any] | None = None
        self._done: set[int] = set()
        with file_errors(path, "cannot be read"):
            text = read_bytes(path).decode(errors="replace") if path.exists() else ""
            lines = text.split("\n") if text else []
        try:
            found = json.loads(lines[0]) if lines else None
        except ValueError:
            found = None
        if isinstance(found, dict) and found.pop("title", None) == _TITLE:
            self.job, self._key = found, zlib.crc32(lines[0].encode())
            words = (line.split(" ") for line in lines[1:-1])  # what follows the last line break is not complete
            self._done = {int(word[0]) for word in words if word == [word[0], self._crc(word[0])]}

    def done(self, job: dict[str, Any], overwrite: bool) -> set[int]:
        """Return the numbers of the parts that are done.

        Parameters
        ----------
        job : dict
            By what it is called, what all parts follow from; plain JSON.
        overwrite : bool
            Nothing is done if the journal is of another job.

        Raises
        ------
        OutputError
            It is of another job; what differs is named.
        """
        wanted = json.loads(json.dumps(job))
        differ = [] if self.job is None else [name for name in wanted if wanted[name] != self.job.get(name)]
        if differ and not overwrite:
            raise OutputError(
                f"{self.path}: belongs to a job with another {' and another '.join(differ)}; give the same to"
                " resume it, or --overwrite to start over"
            )
        return set() if differ else set(self._done)

    @property
    def empty(self) -> bool:
        """Whether no part was done when the journal was read."""
        return not self._done

    def begin(self, job: dict[str, Any]) -> None:
        """Write that nothing is done of a job."""
        text = json.dumps({"title": _TITLE, **job})
        write_text(self.path, text + "\n")
        self.job, self._key, self._done = job, zlib.crc32(text.encode()), set()

    def add(self, number: int) -> None:
        """Note that a part is done, whose data is on the disk."""
        append(self.path, f"{number} {self._crc(str(number))}\n")

    def remove(self) -> None:
        """The job is done."""
        with file_errors(self.path, "cannot be removed"):
            os.unlink(self.path)

    def _crc(self, number: str) -> str:
        return f"{zlib.crc32(number.encode(), self._key):08x}"
