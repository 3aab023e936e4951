"""Slots of a machine that jobs of one user share: each runs between a minimum and a maximum number of workers.

A folder of the user has a file for each job, with its bounds and the slots that it holds. A job keeps the kernel's lock
(flock) on its file, so that a job that was killed holds nothing, however it ended. Another lock lets one job at a time
read and change these files.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

PATIENCE = 2.0
"""Seconds for which a job waits while others read and change the files."""
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MOST_BYTES = 1 << 16
_LIMIT = 1 << 22


@dataclass(frozen=True)
class Demand:
    """Bounds of a job.

    Attributes
    ----------
    low, high : int
        Workers.
    width : int
        Slots of each worker.
    """

    low: int
    high: int
    width: int = 1


def fair_shares(slots: int, demands: Sequence[Demand]) -> list[int]:
    """Return how many workers each job may have, in the order in which the jobs came.

    Jobs get their minimum in this order, up to the first one whose minimum does not fit: it and those after it get 0.
    Further workers go one by one to the job with the fewest slots that is below its maximum.

    Parameters
    ----------
    slots : int
    demands : sequence of Demand
    """
    shares, left = [0] * len(demands), slots
    admitted: list[int] = []
    for at, one in enumerate(demands):
        if one.low * one.width > left:
            break
        shares[at] = one.low
        left -= one.low * one.width
        admitted.append(at)
    while admitted:
        admitted = [at for at in admitted if shares[at] < demands[at].high and demands[at].width <= left]
        if admitted:
            poorest = min(admitted, key=lambda at: shares[at] * demands[at].width)
            shares[poorest] += 1
            left -= demands[poorest].width
    return shares


@dataclass
class _Entry:
    """The file of a job: its place in the order of jobs, its bounds, and its workers on each host."""

    order: int
    demand: Demand
    held: Counter[str] = field(default_factory=Counter)

    @property
    def waits(self) -> bool:
        """Whether the job has less than its minimum."""
        return self.held.total() < self.demand.low

    def format(self) -> bytes:
        return json.dumps({"order": self.order, **asdict(self.demand), "held": dict(self.held)}).encode()

    @classmethod
    def parse(cls, text: bytes) -> _Entry | None:
        """Return the entry that a file has; None if it has none."""
        try:
            found = json.loads(text)
            order, low, high, width = (found[name] for name in ("order", "low", "high", "width"))
            held = Counter({str(host): count for host, count in found["held"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        numbers = [order, low, high, width, *held.values()]
        return cls(order, Demand(low, high, width), held) if all(map(_is_count, numbers)) else None


class SlotTable:
    """The slots of one job among those of others; a context manager.

    Parameters
    ----------
    demand : Demand
    folder : Path, optional
        Where jobs that share slots keep their files. Default: that of the user.

    Raises
    ------
    LaunchError
        The folder cannot be used.
    """

    def __init__(self, demand: Demand, folder: Path | None = None) -> None:
        self._folder = user_folder() if folder is None else folder
        self._path = self._folder / f"job-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._own, self._descriptor = _Entry(0, demand), -1

    def __enter__(self) -> SlotTable:
        with _translated(self._folder), self._locked() as locked:
            if not locked:
                raise LaunchError(
                    f"{self._folder}: another job has locked it for {PATIENCE:g} s; end that job if it is stopped"
                )
            self._own.order = 1 + max((one.order for one in self._others()), default=0)
            self._descriptor = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)

    @property
    def demand(self) -> Demand:
        """The bounds of this job."""
        return self._own.demand

    @property
    def workers(self) -> int:
        """Workers for which this job holds slots."""
        return self._own.held.total()

    def take(self, hosts: Mapping[str, int]) -> list[str]:
        """Take slots for as many further workers as this job's fair share allows and hosts have room for.

        Parameters
        ----------
        hosts : mapping of str to int
            Slots of each host, also those in use.

        Returns
        -------
        list of str
            The host of each worker. A job with less than its minimum gets none unless it gets its minimum.
        """
        with self._updating() as others:
            if others is None:
                return []
            found = self._available(hosts, others)
            self._own.held.update(found)
            return found

    def has_room(self, hosts: Mapping[str, int]) -> bool:
        """Whether `take` would return anything."""
        with self._updating() as others:
            return bool(others is not None and self._available(hosts, others))

    def give(self, host: str, for_good: bool = False) -> None:
        """Give the slots of a worker on a host back; `for_good`: the job, which is about to end, wants no others."""
        self._own.held[host] -= 1  # first: should the files be locked, the next change says so
        self._own.held += Counter()
        if for_good:
            low, high = (min(bound, self.workers) for bound in (self.demand.low, self.demand.high))
            self._own.demand = Demand(low, high, self.demand.width)
        with self._updating():
            pass

    def surplus(self, hosts: Mapping[str, int]) -> int:
        """Return by how many workers this job is above its fair share; never below its minimum."""
        with self._updating() as others:
            if others is None:
                return 0
            return max(0, self.workers - max(self.demand.low, self._share(hosts, others)))

    def describe(self, hosts: Mapping[str, int]) -> str:
        """Return in words how many slots there are, and who uses them."""
        with self._updating() as others:
            used = sum(one.held.total() * one.demand.width for one in others or [])
        total, count = sum(hosts.values()), sum(1 for one in others or [])
        jobs = "another job" if count == 1 else f"{count} other jobs"
        needs = self.demand.low * self.demand.width
        return f"{used} of {total} slots are in use by {jobs}, and at least {needs} are needed"

    def _available(self, hosts: Mapping[str, int], others: list[_Entry]) -> list[str]:
        """Return the hosts of workers that this job may have beside those that it has."""
        wanted = self._share(hosts, others) - self.workers
        found: list[str] = []
        for host, slots in _free(hosts, [self._own, *others]).items():
            found += [host] * max(0, min(slots // self.demand.width, wanted - len(found)))
        return found if self.workers + len(found) >= self.demand.low else []

    def _share(self, hosts: Mapping[str, int], others: list[_Entry]) -> int:
        """Return the fair share of this job, in workers; jobs that run come before those that wait."""
        entries = sorted([self._own, *others], key=lambda one: (one.waits, one.order))
        shares = fair_shares(sum(hosts.values()), [one.demand for one in entries])
        return next(share for share, one in zip(shares, entries, strict=True) if one is self._own)

    @contextmanager
    def _updating(self) -> Iterator[list[_Entry] | None]:
        """Yield the entries of other jobs, and write this job's at the end.

        None while the files are locked, or if they have been removed: a job that runs stays as it is.
        """
        if not self._folder.is_dir():
            yield None
            return
        with _translated(self._folder), self._locked() as locked:
            yield self._others() if locked else None
            if locked:
                self._write()

    def _others(self) -> list[_Entry]:
        """Return the entries of other jobs, without those that have ended, whose files are removed."""
        found = []
        for path in sorted(self._folder.glob("job-*.json")):
            if path == self._path:
                continue
            try:
                descriptor = os.open(path, _FLAGS)
            except FileNotFoundError:  # a job that has just ended
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except FileNotFoundError:
                pass
            except BlockingIOError:
                entry = _Entry.parse(os.pread(descriptor, _MOST_BYTES, 0))
                found += [entry] if entry is not None else []
            finally:
                os.close(descriptor)
        return found

    def _write(self) -> None:
        text = self._own.format()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Let no other job use the files; False if one does for long, as one that is stopped."""
        descriptor = os.open(self._folder / "lock", _FLAGS | os.O_CREAT, 0o600)
        try:
            yield _lock(descriptor, PATIENCE)
        finally:
            os.close(descriptor)


def user_folder() -> Path:
    """Return the folder, made if it is missing, in which jobs of this user on this machine share slots.

    It is in XDG_RUNTIME_DIR, or else in the folder for temporary files.

    Raises
    ------
    LaunchError
        It is not the user's alone, or cannot be made.
    """
    if fcntl is None or not hasattr(os, "getuid"):
        raise LaunchError("--num-workers MIN:MAX: needs POSIX file locks; give a fixed number of workers")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.getuid()
    path = Path(tempfile.gettempdir(), f"neondist-{user}") / "slots"
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        path = Path(runtime, "neondist") / "slots"
    with _translated(path):
        for one in (path.parent, path):
            with suppress(FileExistsError):
                one.mkdir(0o700)
            facts = one.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != user or facts.st_mode & 0o077:
                raise LaunchError(
                    f"{one}: jobs share slots there, but other users can write to it; remove it, or set"
                    " XDG_RUNTIME_DIR to a"
                    " folder of your own"
                )
    return path


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{folder}: jobs share slots there, but it is unusable ({error.strerror}); set XDG_RUNTIME_DIR to a"
            " folder of your own"
        ) from error


def _lock(descriptor: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def _free(hosts: Mapping[str, int], entries: Sequence[_Entry]) -> dict[str, int]:
    """Return the free slots of each host."""
    used: Counter[str] = Counter()
    for one in entries:
        for host, workers in one.held.items():
            used[host] += workers * one.demand.width
    return {host: max(0, slots - used[host]) for host, slots in hosts.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LIMIT
