"""Location of the CIFAR-10 batches: a folder, or their archive."""

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
from ...io.regular_file import open_regular, read_bytes

RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane
_CHUNK = 1000
BATCHES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_NAMES = [name for names in BATCHES.values() for name in names]
_MAX_BATCH = 10_000 * RECORD  # an official batch; nothing larger is read from an archive
_MAX_ARCHIVE = 30 * _MAX_BATCH


@dataclass(frozen=True)
class Source:
    """A folder of batches (possibly in its subfolder cifar-10-batches-bin), or a .tar.gz archive."""

    path: Path

    def sizes(self) -> dict[str, int]:
        """Return the size of every batch in bytes; DataError if one is missing."""
        if os.path.isdir(self.path):  # Path.is_dir would raise without permission
            with _readable(self.path):
                return {file.name: file.stat().st_size for file in self.files()}
        with self._archive() as archive:
            return {name: member.size for name, member in self._members(archive).items()}

    def files(self) -> list[Path]:
        """Return the files of the batches, or the archive."""
        if not os.path.isdir(self.path):
            return [self.path]
        inner = self.path / "cifar-10-batches-bin"
        folder = inner if os.path.isdir(inner) else self.path
        for name in _NAMES:
            if not os.path.isfile(folder / name):
                raise DataError(f"CIFAR10 path: {folder} has no {name}; unpack the binary version of CIFAR-10 there")
        return [folder / name for name in _NAMES]

    def read_batches(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the content of the named batches."""
        if os.path.isdir(self.path):
            files = {file.name: file for file in self.files()}
            for name in names:
                with _readable(files[name]):
                    batch = read_bytes(files[name], _MAX_BATCH)
                yield batch
            return
        with self._archive() as archive:
            members = self._members(archive)
            for name in names:
                yield _read(archive, members[name])

    def _members(self, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        members, size = dict[str, tarfile.TarInfo](), 0
        for member in archive:
            size += member.size + tarfile.BLOCKSIZE
            if size > _MAX_ARCHIVE:
                raise DataError(
                    f"{self.path}: decompresses to more than {_MAX_ARCHIVE:,} bytes, five times the size of CIFAR-10"
                )
            if member.isfile():
                members[PurePosixPath(member.name).name] = member
        missing = [name for name in _NAMES if name not in members]
        if missing:
            raise DataError(f"{self.path}: has no {missing[0]}; it is not the binary version of CIFAR-10")
        return {name: members[name] for name in _NAMES}

    @contextmanager
    def _archive(self) -> Iterator[tarfile.TarFile]:
        if not os.path.exists(self.path):
            raise DataError(f"CIFAR10 path: no folder or file {self.path}; correct the path")
        try:
            with open_regular(self.path) as file, tarfile.open(fileobj=file) as archive:
                yield archive
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            reason = (str(error).splitlines() or ["cut short"])[0].rstrip(":")  # tarfile reports one line per method
            raise DataError(f"{self.path}: is not a valid .tar.gz ({reason}); download it again") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _MAX_BATCH:
        raise DataError(f"{member.name} declares {member.size} bytes, but a batch has at most {_MAX_BATCH}")
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def records(batch: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a batch's images (n, 32, 32, 3) uint8 and classes (n,) int64, a few at a time."""
    rows = np.frombuffer(batch, np.uint8).reshape(-1, RECORD)
    for start in range(0, len(rows), _CHUNK):
        block = rows[start : start + _CHUNK]
        yield block[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), block[:, 0].astype(np.int64)
