"""Queue of tasks: ranges of records to train, evaluate or predict on, in a SQLite database."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import numpy as np

from ..arrays.rng import shuffled
from ..errors import ConfigError
from ..registry.ranges import choice, integer, real
from .database import Database, Piece

KINDS = ("training", "evaluation", "prediction")


class _Wait(Enum):
    WAIT = "wait"

    def __repr__(self) -> str:
        return "nd.WAIT"


_STOPPED = "stopped"
"""Name of the note with the reason why the queue has stopped."""
WAIT: Final = _Wait.WAIT
"""Result of `TaskQueue.get` while all remaining tasks are in progress; call it again later."""


@dataclass(frozen=True)
class Task:
    """A range of records of an epoch, leased to one worker.

    Attributes
    ----------
    id : int
        Unique in the queue; a range that is reassigned gets a new id.
    epoch : int
        Epoch, from 0; for evaluation and prediction the round.
    start, end : int
        Positions in the epoch's order.
    kind : {'training', 'evaluation', 'prediction'}
    indices : ndarray of int64
        Numbers of the records at these positions, without skipped records.
    positions : ndarray of int64
        Positions of `indices`.
    """

    id: int
    epoch: int
    start: int
    end: int
    kind: str
    indices: np.ndarray = field(compare=False, repr=False)
    positions: np.ndarray = field(compare=False, repr=False)

    def minibatches(self, size: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the start and end position of each minibatch, and the numbers of its records.

        Minibatches of a given size do not depend on the worker: (epoch, position) identifies one within the job.
        """
        for first in range(self.start, self.end, size):
            upto = min(first + size, self.end)
            records = self.indices[(first <= self.positions) & (self.positions < upto)]
            if len(records):
                yield first, upto, records


class TaskQueue:
    """Queue of tasks over the records of a data set, for any number of workers.

    An epoch's order is a function of seed and epoch only. Tasks of a lost worker, or one whose lease has expired, are
    returned to the queue from the first unapplied record. All state is in the database: opening the same path resumes.
    Methods may be called from several threads and processes.

    Parameters
    ----------
    path : path
        The SQLite database, created if it does not exist.
    records : int
        Number of records of the data set.
    records_per_task : int
    epochs : int
        Number of epochs of training tasks. Opening with more epochs continues a finished queue.
    seed : int
    shuffle : bool
        Whether to shuffle the training order in each epoch.
    lease : float
        Time in seconds after which a worker without `get`, `applied` or `heartbeat` is considered lost.
    retries : int
        Number of failures of a record after which the job stops, or with `skip_bad_records` skips the record.
    clock : callable
        Returns seconds; must be the same clock whenever the queue is opened.
    source : str
        Name of the data set in messages.
    skip_bad_records : bool
        Skip records that have failed `retries` times instead of stopping; `skipped` lists them.

    Raises
    ------
    ConfigError
        If an argument is out of range, or the file is not a queue or was created with other arguments.

    Examples
    --------
    >>> queue = nd.TaskQueue("tasks.sqlite", records=1000, records_per_task=64)  # doctest: +SKIP
    >>> while (task := queue.get("worker 0")) is not None:  # doctest: +SKIP
    ...     train(task.indices)
    ...     queue.report(task.id)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        records: int,
        records_per_task: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        lease: float = 60.0,
        retries: int = 3,
        clock: Callable[[], float] = time.time,
        *,
        source: str = "the data set",
        skip_bad_records: bool = False,
    ) -> None:
        self.records = integer("records", records, 1)
        self.records_per_task = integer("records_per_task", records_per_task, 1)
        self.epochs, self.seed, self.shuffle = integer("epochs", epochs, 1), integer("seed", seed, 0), bool(shuffle)
        self.lease, self.retries = real("lease", lease, 0.0, open_low=True), integer("retries", retries, 1)
        self.source, self.skip_bad_records, self._clock = source, bool(skip_bad_records), clock
        names = "records", "records_per_task", "seed", "shuffle"
        self._database = Database(Path(path), {name: int(getattr(self, name)) for name in names})
        self.order = lru_cache(maxsize=2)(self._order)

    def get(self, worker: str, kind: str = "training") -> Task | Literal[_Wait.WAIT] | None:
        """Lease the next task to a worker.

        Returns
        -------
        Task, nd.WAIT or None
            WAIT: all remaining tasks are in progress, and may be returned. None: all are done.

        Raises
        ------
        ConfigError
            If a record has failed too often; the message names the data set and the record.
        """
        choice("kind", kind, KINDS)
        with self._database.transaction():
            self._expire()
            if reason := self._database.noted(_STOPPED):
                raise ConfigError(reason)
            piece = self._database.first_todo(kind)
            while piece is None and self._begin_round(kind):
                piece = self._database.first_todo(kind)
            if piece is None:
                return WAIT if self._database.held(kind=kind) else None
            self._database.lease(piece.id, str(worker), self._clock() + self.lease)
            skipped = [number for number, _ in self._database.skipped()] if kind == "training" else []
        positions = np.arange(piece.start, piece.end)
        positions = positions[~np.isin(self._numbers(piece)[positions], skipped)]
        indices = self._numbers(piece)[positions]
        return Task(piece.id, piece.epoch, piece.start, piece.end, kind, indices, positions)

    def applied(self, task_id: int, upto: int) -> bool:
        """Mark a task's records before a position as applied to the weights, and extend its lease.

        Parameters
        ----------
        task_id : int
        upto : int
            Position in the epoch's order, at most the task's `end`.

        Returns
        -------
        bool
            False if the lease has expired: the records are not marked, and another worker may have the range.
        """
        with self._database.transaction():
            piece = self._leased(task_id)
            if piece is None:
                return False
            if not piece.start <= upto <= piece.end:
                raise ConfigError(f"upto: {upto} is outside of task {task_id}, {piece.start} to {piece.end}")
            self._database.credit(piece.id, max(upto, piece.applied), self._clock() + self.lease)
            return True

    def report(self, task_id: int, ok: bool = True, error: str | None = None, record: int | None = None) -> bool:
        """Finish a task: it is fully applied, or it failed and its unapplied records return to the queue.

        Parameters
        ----------
        task_id : int
        ok : bool
        error : str, optional
            Reason of the failure.
        record : int, optional
            The record that failed. Default: the first unapplied record.

        Returns
        -------
        bool
            False if the lease has expired; the report then has no effect.

        Raises
        ------
        ConfigError
            If the same record has failed `retries` times; the message names the data set and the record.
        """
        with self._database.transaction():
            piece = self._leased(task_id)
            if piece is None:
                return False
            if ok or piece.state == "done":
                self._database.credit(piece.id, piece.end, self._clock())
                return True
            reason = self._fail(piece, error or "no reason given", record)
        if reason:
            raise ConfigError(reason)
        return True

    def heartbeat(self, worker: str) -> None:
        """Extend the leases of all tasks of a worker."""
        with self._database.transaction():
            self._expire()
            for piece in self._database.held(worker=str(worker)):
                self._database.credit(piece.id, piece.applied, self._clock() + self.lease)

    def lost(self, worker: str) -> None:
        """Return all tasks of a worker to the queue, from the first unapplied record."""
        with self._database.transaction():
            for piece in self._database.held(worker=str(worker)):
                self._database.split(piece, [(piece.applied, piece.end)])

    def restart(self, kind: str, records: int | None = None) -> None:
        """Start another round of evaluation or prediction tasks over so many records (default: those of the queue)."""
        choice("kind", kind, KINDS[1:])
        count = self.records if records is None else integer("records", records, 1)
        with self._database.transaction():
            self._database.end_round(kind)
            self._add_round(kind, self._database.rounds(kind), count)

    def restore(self, credits: Iterable[tuple[int, int, int]], notes: Mapping[str, str] | None = None) -> None:
        """Reset the training tasks to the records missing from restored weights; all leases end.

        Parameters
        ----------
        credits : iterable of (epoch, start, upto)
            Ranges of positions whose records have been applied to the weights.
        notes : mapping of str to str, optional
            Texts to store in the same transaction.
        """
        applied_ranges: dict[int, list[tuple[int, int]]] = {}
        for epoch, start, upto in credits:
            applied_ranges.setdefault(epoch, []).append((start, upto))
        with self._database.transaction():
            self._database.clear("training")
            for epoch in range(max(applied_ranges, default=-1) + 1):
                self._add_round("training", epoch, self.records)
                for piece in self._database.pieces("training", epoch):
                    remaining = _missing(piece.start, piece.end, applied_ranges.get(epoch, []))
                    if remaining != [(piece.start, piece.end)]:
                        self._database.split(piece, remaining)
            for name, text in (notes or {}).items():
                self._database.note(name, text)

    def note(self, name: str, text: str) -> None:
        """Store a text with the tasks."""
        with self._database.transaction():
            self._database.note(name, text)

    def noted(self, name: str) -> str | None:
        """Return a text stored by `note`, or None."""
        with self._database.transaction():
            return self._database.noted(name)

    def counts(self, kind: str = "training") -> dict[str, int]:
        """Return the number of tasks by state: 'todo' (including future epochs), 'doing', 'done' and 'failed'."""
        with self._database.transaction():
            self._expire()
            counts = self._database.counts(kind)
            if kind == "training":
                counts["todo"] += max(0, self.epochs - self._database.rounds(kind)) * -(
                    -self.records // self.records_per_task
                )
        return counts

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """The skipped records and the last error of each."""
        return self._database.skipped()

    def close(self) -> None:
        """Close the database; tasks in progress keep their leases."""
        self._database.close()

    def __enter__(self) -> TaskQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Private methods.

    def _order(self, epoch: int) -> np.ndarray:
        """Return the numbers of the records of a training epoch, in the order of its positions."""
        return shuffled(self.records, self.seed, epoch) if self.shuffle else np.arange(self.records)

    def _numbers(self, piece: Piece) -> np.ndarray:
        """Return the records at all positions up to a task's end."""
        return self.order(piece.epoch) if piece.kind == "training" else np.arange(piece.end)

    def _expire(self) -> None:
        for piece in self._database.held(before=self._clock()):
            self._database.split(piece, [(piece.applied, piece.end)])

    def _leased(self, task_id: int) -> Piece | None:
        """Return a task if its lease is valid, or was until it was done."""
        self._expire()
        return self._database.leased(task_id)

    def _begin_round(self, kind: str) -> bool:
        """Add the tasks of the next round; return whether there was one."""
        rounds = self._database.rounds(kind)
        if rounds >= (self.epochs if kind == "training" else 1):
            return False
        self._add_round(kind, rounds, self.records)
        return True

    def _add_round(self, kind: str, epoch: int, records: int) -> None:
        cuts = [*range(0, records, self.records_per_task), records]
        self._database.add_round(kind, epoch, list(pairwise(cuts)))

    def _fail(self, piece: Piece, error: str, record: int | None) -> str | None:
        """Count a failure and reissue the remaining records; return the reason if the job must stop."""
        unapplied = self._numbers(piece)[piece.applied : piece.end]
        failed = int(unapplied[0] if record is None else record)
        if failed not in unapplied:
            raise ConfigError(f"record: {failed} is not among the unapplied records of task {piece.id}")
        failures = self._database.fail(piece.kind, failed, error)
        is_skipped = failures >= self.retries and self.skip_bad_records and piece.kind == "training"
        if is_skipped:
            self._database.skip(failed, error)
        if is_skipped or failures < self.retries:
            self._database.split(piece, [(piece.applied, piece.end)])
            return None
        self._database.end_failed(piece)
        reason = (
            f"{self.source}: record {failed} has failed {failures} times, the last time with: {error}; correct the"
            " record, or skip such records with --skip-bad-records"
        )
        self._database.note(_STOPPED, reason)
        return reason


def _missing(start: int, end: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a range that other ranges do not cover."""
    gaps, position = [], start
    for first, last in sorted(covered):
        if first > position and position < end:
            gaps.append((position, min(first, end)))
        position = max(position, last)
    return [*gaps, (position, end)] if position < end else gaps
