"""Checksum of a whole HDF5 file, stored in its user block.

Files are opened with HDF5 only after their checksum is verified, since HDF5 may crash on damaged files.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO

from ...errors import DataError
from ..regular_file import open_regular

USER_BLOCK_SIZE = 512  # bytes; the smallest block that HDF5 allows
READ_PIECE_BYTES = 1 << 20
HEADER_TITLE = "neondist checkpoint"
FORMAT_VERSION = 3


def add_checksum(file: BinaryIO) -> None:
    """Write the length and the CRC-32 of the rest of an open file into its user block."""
    header = _format_header(*_length_and_crc(file))
    file.seek(0)
    file.write(header)


def verify_checksum(path: Path) -> None:
    """Verify the checksum of a file, reading it once.

    Raises
    ------
    DataError
        If the file is missing, not a checkpoint, or damaged.
    """
    try:
        with open_regular(path) as file:
            header = file.read(USER_BLOCK_SIZE)
            title = header.split(b"\n", 1)[0].decode("ascii", "replace")
            if not title.startswith(HEADER_TITLE):
                raise DataError(f"{path}: is not a neondist checkpoint, or its header is damaged; specify another file")
            if title != f"{HEADER_TITLE} {FORMAT_VERSION}":
                raise DataError(
                    f"{path}: is a '{title[:40]}', or damaged; this version of neondist reads format {FORMAT_VERSION}:"
                    " use the version that wrote the file, or specify another file"
                )
            if header != _format_header(*_length_and_crc(file)):
                raise DataError(
                    f"{path}: is damaged (its checksum is wrong); restore it from a copy, or specify another file"
                )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; specify a checkpoint written by a run") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; specify a checkpoint, such as {path / 'checkpoint.h5'}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _format_header(size: int, crc: int) -> bytes:
    return f"{HEADER_TITLE} {FORMAT_VERSION}\nbytes {size}\ncrc32 {crc:08x}\n".encode().ljust(USER_BLOCK_SIZE, b"\0")


def _length_and_crc(file: BinaryIO) -> tuple[int, int]:
    size, crc = 0, 0
    file.seek(USER_BLOCK_SIZE)
    while piece := file.read(READ_PIECE_BYTES):
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc
