"""Files of the CIFAR-10 batches, in a folder or in their archive."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from ...errors import DataError
from ...io.files import convert_file_errors
from ...io.regular_file import open_regular, read_bytes

RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane
_RECORDS_PER_CHUNK = 1000
BATCH_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_BATCH_FILE_NAMES = [name for names in BATCH_FILES.values() for name in names]
_MAX_BATCH_BYTES = 10_000 * RECORD_BYTES  # size of an official batch; nothing larger is read from an archive
_MAX_ARCHIVE_BYTES = 30 * _MAX_BATCH_BYTES
_READ_PROBLEM = "cannot be read", "check its permissions", DataError


@dataclass(frozen=True)
class CIFAR10Files:
    """A folder of batches (possibly in its subfolder cifar-10-batches-bin), or a .tar.gz archive."""

    folder_or_archive: Path

    def file_sizes(self) -> dict[str, int]:
        """Return the size of every batch in bytes; DataError if one is missing."""
        if os.path.isdir(self.folder_or_archive):  # Path.is_dir would raise without permission
            with convert_file_errors(self.folder_or_archive, *_READ_PROBLEM):
                return {file.name: file.stat().st_size for file in self.files()}
        with self._open_archive() as archive:
            return {name: member.size for name, member in self._members(archive).items()}

    def files(self) -> list[Path]:
        """Return the files of the batches, or the archive."""
        if not os.path.isdir(self.folder_or_archive):
            return [self.folder_or_archive]
        subfolder = self.folder_or_archive / "cifar-10-batches-bin"
        folder = subfolder if os.path.isdir(subfolder) else self.folder_or_archive
        for name in _BATCH_FILE_NAMES:
            if not os.path.isfile(folder / name):
                raise DataError(f"CIFAR10 path: {folder} has no {name}; unpack the binary version of CIFAR-10 there")
        return [folder / name for name in _BATCH_FILE_NAMES]

    def read_batches(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the content of the named batches."""
        if os.path.isdir(self.folder_or_archive):
            files = {file.name: file for file in self.files()}
            for name in names:
                with convert_file_errors(files[name], *_READ_PROBLEM):
                    batch = read_bytes(files[name], _MAX_BATCH_BYTES)
                yield batch
            return
        with self._open_archive() as archive:
            members = self._members(archive)
            for name in names:
                if members[name].size > _MAX_BATCH_BYTES:
                    size = members[name].size
                    raise DataError(
                        f"{self.folder_or_archive}: {name} has {size:,} bytes, more than a batch; download it again"
                    )
                file = archive.extractfile(members[name])
                yield file.read() if file is not None else b""

    def _members(self, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        members, total_bytes = dict[str, tarfile.TarInfo](), 0
        for member in archive:
            total_bytes += member.size + tarfile.BLOCKSIZE
            if total_bytes > _MAX_ARCHIVE_BYTES:
                raise DataError(
                    f"{self.folder_or_archive}: decompresses to more than {_MAX_ARCHIVE_BYTES:,} bytes, five times the"
                    " size of CIFAR-10; download it again"
                )
            if member.isfile():
                members[PurePosixPath(member.name).name] = member
        missing = [name for name in _BATCH_FILE_NAMES if name not in members]
        if missing:
            raise DataError(f"{self.folder_or_archive}: has no {missing[0]}; give the binary version of CIFAR-10")
        return {name: members[name] for name in _BATCH_FILE_NAMES}

    @contextmanager
    def _open_archive(self) -> Iterator[tarfile.TarFile]:
        if not os.path.exists(self.folder_or_archive):
            raise DataError(f"CIFAR10 path: no folder or file {self.folder_or_archive}; correct the path")
        try:
            with open_regular(self.folder_or_archive) as file, tarfile.open(fileobj=file) as archive:
                yield archive
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            # tarfile's message has a line per compression that it tried
            reason = (str(error).splitlines() or ["truncated"])[0].rstrip(":")
            raise DataError(
                f"{self.folder_or_archive}: is not a valid .tar.gz ({reason}); download it again"
            ) from error


def decode_batch(batch: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a batch's images (n, 32, 32, 3) uint8 and classes (n,) int64, a few at a time."""
    rows = np.frombuffer(batch, np.uint8).reshape(-1, RECORD_BYTES)
    for start in range(0, len(rows), _RECORDS_PER_CHUNK):
        block = rows[start : start + _RECORDS_PER_CHUNK]
        yield block[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), block[:, 0].astype(np.int64)
