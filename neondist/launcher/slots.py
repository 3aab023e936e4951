"""Slots of a machine shared by a user's jobs; each job has a minimum and a maximum number of workers.

A per-user folder has a file for each job, with its bounds and the slots it holds. A job keeps a kernel lock (flock) on
its file, so that an ended job holds no slots, even if it was killed. A second lock serialises access to these files.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..io.files import convert_file_errors

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_TIMEOUT = 2.0
_OPEN_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_ENTRY_BYTES = 1 << 16
_MAX_COUNT = 1 << 22


@dataclass(frozen=True)
class WorkerBounds:
    """Bounds on the number of workers of a job, and the number of slots of each worker."""

    min_workers: int
    max_workers: int
    slots_per_worker: int = 1


def fair_shares(slots: int, jobs: Sequence[WorkerBounds]) -> list[int]:
    """Return the number of workers of each job, in order of arrival.

    Jobs get their minimum in this order, up to the first job whose minimum does not fit; it and all later jobs get 0.
    Further workers are assigned one by one to the job with the fewest slots that is below its maximum.
    """
    shares, free_slots = [0] * len(jobs), slots
    admitted: list[int] = []
    for index, bounds in enumerate(jobs):
        if bounds.min_workers * bounds.slots_per_worker > free_slots:
            break
        shares[index] = bounds.min_workers
        free_slots -= bounds.min_workers * bounds.slots_per_worker
        admitted.append(index)
    while admitted:
        admitted = [i for i in admitted if shares[i] < jobs[i].max_workers and jobs[i].slots_per_worker <= free_slots]
        if admitted:
            poorest = min(admitted, key=lambda index: shares[index] * jobs[index].slots_per_worker)
            shares[poorest] += 1
            free_slots -= jobs[poorest].slots_per_worker
    return shares


@dataclass
class _JobEntry:
    """Contents of a job's file: its place in the order of jobs, its bounds, and its workers on each host."""

    order: int
    bounds: WorkerBounds
    workers_by_host: Counter[str] = field(default_factory=Counter)

    @property
    def is_waiting(self) -> bool:
        return self.workers_by_host.total() < self.bounds.min_workers

    def format(self) -> bytes:
        bounds = dict(zip(("low", "high", "width"), astuple(self.bounds), strict=True))
        return json.dumps({"order": self.order, **bounds, "held": dict(self.workers_by_host)}).encode()

    @classmethod
    def parse(cls, text: bytes) -> _JobEntry | None:
        """Return the entry in a file; None if it is invalid."""
        try:
            fields = json.loads(text)
            order, low, high, width = (fields[name] for name in ("order", "low", "high", "width"))
            workers_by_host = Counter({str(host): count for host, count in fields["held"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        counts = [order, low, high, width, *workers_by_host.values()]
        return cls(order, WorkerBounds(low, high, width), workers_by_host) if all(map(_is_count, counts)) else None


class SharedSlotTable:
    """Slots of a job in competition with other jobs; a context manager.

    Parameters
    ----------
    bounds : WorkerBounds
    folder : Path, optional
        Folder of the files of jobs that share slots. Default: `shared_slots_folder()`.

    Raises
    ------
    LaunchError
        The folder cannot be used.
    """

    def __init__(self, bounds: WorkerBounds, folder: Path | None = None) -> None:
        self._folder = shared_slots_folder() if folder is None else folder
        self._own_path = self._folder / f"job-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._own_entry, self._own_descriptor = _JobEntry(0, bounds), -1

    def __enter__(self) -> SharedSlotTable:
        with _convert_errors(self._folder), self._hold_lock() as locked:
            if not locked:
                raise LaunchError(
                    f"{self._folder}: locked by another job for {LOCK_TIMEOUT:g} s; try again, or end that job"
                )
            self._own_entry.order = 1 + max((one.order for one in self._read_other_entries()), default=0)
            self._own_descriptor = os.open(self._own_path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._own_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_entry()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._own_path.unlink()
        os.close(self._own_descriptor)

    @property
    def bounds(self) -> WorkerBounds:
        """The bounds of this job."""
        return self._own_entry.bounds

    @property
    def workers(self) -> int:
        """Number of workers for which this job holds slots."""
        return self._own_entry.workers_by_host.total()

    def take_slots(self, hosts: Mapping[str, int]) -> list[str]:
        """Take slots for as many more workers as the fair share and the hosts allow.

        Parameters
        ----------
        hosts : mapping of str to int
            Slots of each host, including those in use.

        Returns
        -------
        list of str
            The host of each worker; empty if the job would remain below its minimum.
        """
        with self._update_own_entry() as others:
            if others is None:
                return []
            new_hosts = self._hosts_of_new_workers(hosts, others)
            self._own_entry.workers_by_host.update(new_hosts)
            return new_hosts

    def has_free_slots(self, hosts: Mapping[str, int]) -> bool:
        """Whether `take_slots` would return any host."""
        with self._update_own_entry() as others:
            return bool(others is not None and self._hosts_of_new_workers(hosts, others))

    def free_worker_slots(self, host: str, is_job_ending: bool = False) -> None:
        """Free the slots of a worker on a host; `is_job_ending`: the job is about to end and needs no other slots."""
        self._own_entry.workers_by_host[host] -= 1  # first: if the files are locked, the next update records this
        self._own_entry.workers_by_host += Counter()
        if is_job_ending:
            low, high = (min(bound, self.workers) for bound in (self.bounds.min_workers, self.bounds.max_workers))
            self._own_entry.bounds = WorkerBounds(low, high, self.bounds.slots_per_worker)
        with self._update_own_entry():
            pass

    def surplus_workers(self, hosts: Mapping[str, int]) -> int:
        """Return the number of workers above the fair share; the minimum is always kept."""
        with self._update_own_entry() as others:
            if others is None:
                return 0
            return max(0, self.workers - max(self.bounds.min_workers, self._fair_share(hosts, others)))

    def describe_slot_usage(self, hosts: Mapping[str, int]) -> str:
        """Describe the slots and their users."""
        num_slots, num_needed = sum(hosts.values()), self.bounds.min_workers * self.bounds.slots_per_worker
        with self._update_own_entry() as others:
            if others is None:
                return f"the use of the {num_slots} slots cannot be read now; at least {num_needed} must be free"
            num_used = sum(entry.workers_by_host.total() * entry.bounds.slots_per_worker for entry in others)
        jobs_text = "another job" if len(others) == 1 else f"{len(others)} other jobs"
        return f"{num_used} of {num_slots} slots are in use by {jobs_text}, and at least {num_needed} are needed"

    def _hosts_of_new_workers(self, hosts: Mapping[str, int], others: list[_JobEntry]) -> list[str]:
        num_missing = self._fair_share(hosts, others) - self.workers
        new_hosts: list[str] = []
        for host, slots in _count_free_slots(hosts, [self._own_entry, *others]).items():
            new_hosts += [host] * max(0, min(slots // self.bounds.slots_per_worker, num_missing - len(new_hosts)))
        return new_hosts if self.workers + len(new_hosts) >= self.bounds.min_workers else []

    def _fair_share(self, hosts: Mapping[str, int], others: list[_JobEntry]) -> int:
        """Return the fair share of this job, in workers; running jobs precede waiting jobs."""
        entries = sorted([self._own_entry, *others], key=lambda entry: (entry.is_waiting, entry.order))
        shares = fair_shares(sum(hosts.values()), [entry.bounds for entry in entries])
        return next(share for share, entry in zip(shares, entries, strict=True) if entry is self._own_entry)

    @contextmanager
    def _update_own_entry(self) -> Iterator[list[_JobEntry] | None]:
        """Yield the entries of other jobs, and write this job's entry on exit.

        Yields None while the files are locked or if they were removed; a running job then keeps its slots.
        """
        if not self._folder.is_dir():
            yield None
            return
        with _convert_errors(self._folder), self._hold_lock() as locked:
            yield self._read_other_entries() if locked else None
            if locked:
                self._write_entry()

    def _read_other_entries(self) -> list[_JobEntry]:
        """Return the entries of other jobs, and remove the files of ended jobs."""
        entries = []
        for path in sorted(self._folder.glob("job-*.json")):
            if path == self._own_path:
                continue
            try:
                descriptor = os.open(path, _OPEN_FLAGS)
            except FileNotFoundError:  # the job has just ended
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except FileNotFoundError:
                pass
            except BlockingIOError:
                entry = _JobEntry.parse(os.pread(descriptor, _MAX_ENTRY_BYTES, 0))
                entries += [entry] if entry is not None else []
            finally:
                os.close(descriptor)
        return entries

    def _write_entry(self) -> None:
        text = self._own_entry.format()
        os.ftruncate(self._own_descriptor, 0)
        os.pwrite(self._own_descriptor, text, 0)

    @contextmanager
    def _hold_lock(self) -> Iterator[bool]:
        """Lock the files; yield False on timeout, such as when a stopped job holds the lock."""
        descriptor = os.open(self._folder / "lock", _OPEN_FLAGS | os.O_CREAT, 0o600)
        try:
            yield _try_lock(descriptor, LOCK_TIMEOUT)
        finally:
            os.close(descriptor)


def shared_slots_folder() -> Path:
    """Return the folder, created if missing, in which jobs of this user on this machine share slots.

    It is in XDG_RUNTIME_DIR, or else in the folder for temporary files.

    Raises
    ------
    LaunchError
        Other users can access the folder, or it cannot be created.
    """
    if fcntl is None or not hasattr(os, "getuid"):
        raise LaunchError("--num-workers MIN:MAX: needs POSIX file locks; give a fixed number of workers")
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    user_id = os.getuid()
    path = Path(tempfile.gettempdir(), f"neondist-{user_id}") / "slots"
    if runtime_folder and os.path.isdir(runtime_folder) and os.access(runtime_folder, os.W_OK):
        path = Path(runtime_folder, "neondist") / "slots"
    with _convert_errors(path):
        for folder in (path.parent, path):
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != user_id or status.st_mode & 0o077:
                raise LaunchError(
                    f"{folder}: jobs share slots in this folder, but it is not private to you; remove it, or set"
                    " XDG_RUNTIME_DIR to a folder of your own"
                )
    return path


def _convert_errors(folder: Path) -> AbstractContextManager[None]:
    remedy = "set XDG_RUNTIME_DIR to a folder of your own"
    return convert_file_errors(folder, "jobs cannot share slots in it", remedy, LaunchError)


def _try_lock(descriptor: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def _count_free_slots(hosts: Mapping[str, int], entries: Sequence[_JobEntry]) -> dict[str, int]:
    used_slots: Counter[str] = Counter()
    for entry in entries:
        for host, workers in entry.workers_by_host.items():
            used_slots[host] += workers * entry.bounds.slots_per_worker
    return {host: max(0, slots - used_slots[host]) for host, slots in hosts.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
