"""One run at a time in a folder, or at a file.

The lock is the kernel's (flock) on a file in the folder, so it goes with the process that holds it, however that ends:
none is ever stale. NFS passes it to the server, so that other machines see it too; mounted with nolock or local_lock it
guards against runs of the same machine only. Where a file system has no such locks (ENOLCK, ENOSYS), what the file says
decides: a process of this machine that is gone holds nothing, one of another machine is believed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .files import file_errors
from .regular_file import read_bytes

try:
    import fcntl
except ImportError:  # no POSIX: what the file says has to do
    fcntl = None  # type: ignore[assignment]

NAME = ".neondist-lock"
PATIENCE = 5.0
"""seconds in which a run that has just been killed may still end"""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Lock:
    """Exclusive lock of this process on what it writes, from construction until `release`.

    Parameters
    ----------
    path : of the lock's file
    what : path
        What is locked, for messages.
    other : str
        What to choose instead, for messages.

    Raises
    ------
    OutputError
        Another run holds it, or the lock's file cannot be written.
    """

    def __init__(self, path: Path, what: Path, other: str) -> None:
        self.path, self.what, self.other = path, what, other
        end = time.monotonic() + PATIENCE
        while not self._taken():
            if time.monotonic() >= end:
                raise OutputError(
                    f"{what}: in use by another run ({_holder(path)}); wait until it ends, or choose another {other}"
                )
            time.sleep(0.1)

    def release(self) -> None:
        """Let others have the folder."""
        with suppress(OSError):
            self.path.unlink()  # before the lock is released, so that no other process's file is removed
        with suppress(OSError):
            os.close(self._descriptor)

    def _taken(self) -> bool:
        with file_errors(self.what, "cannot be written to", f"choose another {self.other}"):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o644)
            taken = False
            try:
                taken = self._lock()
                if taken:
                    self._say()
            except BaseException:
                if taken:
                    self.release()
                else:
                    os.close(self._descriptor)
                raise
        if not taken:
            os.close(self._descriptor)
        return taken

    def _lock(self) -> bool:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return not _alive(_read(self.path))
        try:  # the holder may have removed the file between our open and our lock
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _say(self) -> None:
        """Write who holds the lock."""
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)


class FolderLock(Lock):
    """A folder that this process alone writes a run to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / NAME, folder, "folder with --output")


def _read(path: Path) -> dict[str, Any]:
    """Return what a lock's file says; nothing, if it is empty or no such file."""
    try:
        found = json.loads(read_bytes(path)[:1000])
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _holder(path: Path) -> str:
    said = {"process": "unknown", "host": "unknown", "since": "unknown"} | _read(path)
    return f"process {said['process']} on {said['host']}, since {said['since']}"


def _alive(said: dict[str, Any]) -> bool:
    """Return whether the process that a lock's file names may still be there."""
    if said.get("host") != socket.gethostname() or not isinstance(said.get("process"), int):
        return bool(said)
    if said["process"] == os.getpid():
        return True
    try:
        os.kill(said["process"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
