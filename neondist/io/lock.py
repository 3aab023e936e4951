"""Exclusive locks on run folders and output files.

A lock is a kernel lock (flock) on a file; the kernel releases it when its process ends, so it never becomes stale. NFS
forwards locks to the server, so that other machines see them too; with the mount options nolock or local_lock, a lock
excludes only processes of the same machine. On file systems without locks (ENOLCK, ENOSYS), the content of the file
decides: a process of this machine that has ended holds no lock; a process of another machine is assumed to be alive.
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
from .files import convert_file_errors
from .regular_file import read_bytes

try:
    import fcntl
except ImportError:  # not POSIX: the content of the file decides
    fcntl = None  # type: ignore[assignment]

LOCK_FILE_NAME = ".neondist-lock"
LOCK_TIMEOUT_SECONDS = 5.0  # seconds to wait for a run that has just been killed to end
_UNSUPPORTED_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FileLock:
    """Exclusive lock of this process, held from construction until `release`.

    Parameters
    ----------
    path : path of the lock file
    target : path
        The locked folder or file, for messages.
    alternative : str
        Completes 'choose another ...' in messages.

    Raises
    ------
    OutputError
        If another run holds the lock, or the lock file cannot be written.
    """

    def __init__(self, path: Path, target: Path, alternative: str) -> None:
        self.path, self.target, self.alternative = path, target, alternative
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not self._acquire():
            if time.monotonic() >= deadline:
                raise OutputError(
                    f"{target}: in use by another run ({_describe_lock_holder(path)}); wait until it ends, or choose"
                    f" another {alternative}"
                )
            time.sleep(0.1)

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            self.path.unlink()  # before unlocking, so that no other process's file is removed
        with suppress(OSError):
            os.close(self._descriptor)

    def _acquire(self) -> bool:
        with convert_file_errors(self.target, "cannot be written to", f"choose another {self.alternative}"):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o644)
            is_acquired = False
            try:
                is_acquired = self._try_lock()
                if is_acquired:
                    self._write_holder()
            except BaseException:
                if is_acquired:
                    self.release()
                else:
                    os.close(self._descriptor)
                raise
        if not is_acquired:
            os.close(self._descriptor)
        return is_acquired

    def _try_lock(self) -> bool:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED_LOCK_ERRORS:
                raise
            return not _is_alive(_read_holder(self.path))
        try:  # the holder may have removed the file between our open and our lock
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _write_holder(self) -> None:
        start_time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        holder_json = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": start_time})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, holder_json.encode(), 0)


class FolderLock(FileLock):
    """Exclusive lock on a run folder; `holder`: '-supervisor' for the lock of a job that starts processes with it."""

    def __init__(self, folder: Path, holder: str = "") -> None:
        super().__init__(folder / f"{LOCK_FILE_NAME}{holder}", folder, "folder with --output")


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the content of a lock file; {} if it is empty, missing or invalid."""
    try:
        holder = json.loads(read_bytes(path)[:1000])
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe_lock_holder(path: Path) -> str:
    holder = {"process": "unknown", "host": "unknown", "since": "unknown"} | _read_holder(path)
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the process named by a lock file may still be running."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("process"), int):
        return bool(holder)
    if holder["process"] == os.getpid():
        return True
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
