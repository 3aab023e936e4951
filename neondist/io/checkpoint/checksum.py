"""Checksum of a whole HDF5 file, stored in its user block.

Files are opened with HDF5 only after their checksum is verified, since HDF5 may crash on damaged files.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO

from ...errors import DataError
from ..regular_file import open_regular

BLOCK = 512  # bytes; the smallest block that HDF5 allows
PIECE = 1 << 20
TITLE = "neondist checkpoint"
FORMAT = 3


def add_checksum(file: BinaryIO) -> None:
    """Write the length and the CRC-32 of the rest of an open file into its first block."""
    header = _header(*_measure(file))
    file.seek(0)
    file.write(header)


def check(path: Path) -> None:
    """Verify the checksum of a file, reading it once.

    Raises
    ------
    DataError
        If it is missing, not a checkpoint, or damaged.
    """
    try:
        with open_regular(path) as file:
            header = file.read(BLOCK)
            title = header.split(b"\n", 1)[0].decode("ascii", "replace")
            if not title.startswith(TITLE):
                raise DataError(f"{path}: is not a neondist checkpoint, or its header is damaged; name another file")
            if title != f"{TITLE} {FORMAT}":
                raise DataError(
                    f"{path}: is a '{title[:40]}', but this neondist reads format {FORMAT}; or it is damaged"
                )
            if header != _header(*_measure(file)):
                raise DataError(
                    f"{path}: damaged (its checksum is wrong); restore it from a copy, or name another file"
                )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; name a checkpoint written by a run") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _header(size: int, crc: int) -> bytes:
    return f"{TITLE} {FORMAT}\nbytes {size}\ncrc32 {crc:08x}\n".encode().ljust(BLOCK, b"\0")


def _measure(file: BinaryIO) -> tuple[int, int]:
    """Return the length and the CRC-32 of the file after its first block."""
    size, crc = 0, 0
    file.seek(BLOCK)
    while piece := file.read(PIECE):
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc
