"""Reading a data file that may be gzipped; every fault becomes a DataError that names the file."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import DataError

PIECE = 1 << 20
REMEDY = "replace it by a good copy, for instance with: neondist data mnist --to DIR"


class Unpacked:
    """A file's bytes from front to back, unpacked if its content (not its name) is gzip; a context manager.

    Attributes
    ----------
    packed : bool
    size_on_disk : int

    Raises
    ------
    DataError
        When opened or read: if the file is missing, cannot be read, or is a damaged gzip file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _faults(path):
            self._plain = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
            self.packed = self._plain.read(2) == b"\x1f\x8b"
            self._plain.seek(0)
            self.size_on_disk = os.fstat(self._plain.fileno()).st_size
        self._stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=self._plain) if self.packed else self._plain

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *_: Any) -> None:
        self._plain.close()

    def read(self, count: int) -> bytes:
        """Return the next bytes, `count` at most, none at the end."""
        # faults are named here and not in __exit__, which sees those of other files that are open too
        with _faults(self.path):
            return self._stream.read(count)


def unpacked_md5(path: Path) -> str:
    """Return the md5 of a file's unpacked bytes; DataError if it cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    with Unpacked(path) as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); {REMEDY}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {REMEDY}") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be read ({reason}); check that it is a file and its permissions") from error
