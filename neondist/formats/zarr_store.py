"""The files of a Zarr folder that is read: regular ones inside of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from zarr.storage import LocalStore

from ..io.regular_file import check_regular
from ..memory import require_room


class FolderStore(LocalStore):
    """A folder, whose metadata and chunks are regular files, and not links out of it; else DataError."""

    def get_sync(self, key: str, **options: Any) -> Any:
        """Return the bytes of a file, or None if it is not there."""
        self._check(key, options.get("byte_range"))
        return super().get_sync(key, **options)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of a file, or None if it is not there."""
        self._check(key, byte_range)
        return await super().get(key, prototype, byte_range)

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
        """Return some bytes of files."""
        ranges = list(key_ranges)
        for key, byte_range in ranges:
            self._check(key, byte_range)
        return await super().get_partial_values(prototype, ranges)

    def _check(self, key: str, byte_range: Any) -> None:
        path = self.root / key
        with suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            check_regular(path, self.root)
            if byte_range is None:
                require_room(path.stat().st_size, str(path), "restore it from a good copy, or write smaller chunks")
