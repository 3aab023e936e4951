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
from typing import Final, Literal, TypeAlias

import numpy as np

from ..arrays.rng import shuffled_indices
from ..errors import ConfigError
from ..registry.arguments import type_checked
from ..registry.ranges import Count, Index, Positive
from ..terminal.console import counted
from .database import TaskDatabase, TaskRow

TaskKind: TypeAlias = Literal["training", "evaluation", "prediction"]


class _Wait(Enum):
    WAIT = "wait"

    def __repr__(self) -> str:
        return "nd.WAIT"


_STOP_REASON_NOTE = "stopped"
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
        Epoch, counted from 0; for evaluation and prediction, the round.
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

    An epoch's order is a function of seed and epoch only. Tasks of a lost worker, and tasks whose lease has expired,
    return to the queue from their first unapplied record. All state is in the database: a queue opened at the same path
    resumes. Methods may be called from several threads and processes.

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
        Time in seconds after which a worker that has not called `get`, `applied` or `heartbeat` is considered lost.
    retries : int
        Number of failures of a record after which the job stops or, with `skip_bad_records`, skips the record.
    clock : callable
        Returns seconds; must be the same clock whenever the queue is opened.
    source : str
        Name of the data set in messages.
    skip_bad_records : bool
        In training, skip records that have failed `retries` times instead of stopping; `skipped` lists them.

    Raises
    ------
    ConfigError
        If an argument is out of range, or the file is not a queue or was created with other arguments.

    Examples
    --------
    >>> queue = nd.TaskQueue("tasks.sqlite", records=1000, records_per_task=64)  # doctest: +SKIP
    >>> while (task := queue.get("worker 0")) is not None:  # doctest: +SKIP
    ...     if task is nd.WAIT:  # other workers hold the remaining tasks, which may return to the queue
    ...         time.sleep(1)
    ...     else:
    ...         train(task.indices)
    ...         queue.report(task.id)
    """

    @type_checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        records: Count,
        records_per_task: Count,
        epochs: Count = 1,
        seed: Index = 0,
        shuffle: bool = True,
        lease: Positive = 60.0,
        retries: Count = 3,
        clock: Callable[[], float] = time.time,
        *,
        source: str = "the data set",
        skip_bad_records: bool = False,
    ) -> None:
        self.records, self.records_per_task, self.epochs = int(records), int(records_per_task), int(epochs)
        self.seed, self.shuffle, self.lease, self.retries = int(seed), shuffle, lease, retries
        self.source, self.skip_bad_records, self._clock = source, skip_bad_records, clock
        names = "records", "records_per_task", "seed", "shuffle"
        self._database = TaskDatabase(Path(path), {name: int(getattr(self, name)) for name in names})
        self.order = lru_cache(maxsize=2)(self._epoch_order)

    @type_checked
    def get(self, worker: str | int, kind: TaskKind = "training") -> Task | Literal[_Wait.WAIT] | None:
        """Lease the next task to a worker.

        Returns
        -------
        Task, nd.WAIT or None
            WAIT: all remaining tasks are in progress, and may return to the queue. None: all tasks are done.

        Raises
        ------
        ConfigError
            If a record has failed too often; the message names the data set and the record.
        """
        with self._database.transaction():
            self._requeue_expired()
            if reason := self._database.load_note(_STOP_REASON_NOTE):
                raise ConfigError(reason)
            task = self._database.first_unassigned_task(kind)
            while task is None and self._try_begin_next_round(kind):
                task = self._database.first_unassigned_task(kind)
            if task is None:
                return WAIT if self._database.running_tasks(kind=kind) else None
            self._database.lease_task(task.id, str(worker), self._clock() + self.lease)
            skipped_records = [number for number, _ in self._database.skipped_records()] if kind == "training" else []
        positions = np.arange(task.start_record, task.end_record)
        positions = positions[~np.isin(self._record_numbers_through(task)[positions], skipped_records)]
        indices = self._record_numbers_through(task)[positions]
        return Task(task.id, task.epoch, task.start_record, task.end_record, kind, indices, positions)

    def applied(self, task_id: int, upto: int) -> bool:
        """Mark a task's records before a position as applied to the weights, and extend the task's lease.

        Parameters
        ----------
        task_id : int
        upto : int
            Position in the epoch's order, from the task's `start` to its `end`; ConfigError otherwise.

        Returns
        -------
        bool
            False if the lease has expired: the records are not marked, and another worker may have the range.
        """
        with self._database.transaction():
            task = self._requeue_expired_and_find(task_id)
            if task is None:
                return False
            if not task.start_record <= upto <= task.end_record:
                expected_range = f"expected {task.start_record} to {task.end_record}"
                raise ConfigError(f"upto: {upto} is outside task {task_id}; {expected_range}")
            self._database.record_progress(task.id, max(upto, task.applied_until), self._clock() + self.lease)
            return True

    def report(self, task_id: int, ok: bool = True, error: str | None = None, record: int | None = None) -> bool:
        """Finish a task: it is fully applied, or it has failed and its unapplied records return to the queue.

        Parameters
        ----------
        task_id : int
        ok : bool
        error : str, optional
            Reason for the failure.
        record : int, optional
            The record that failed. Default: the first unapplied record.

        Returns
        -------
        bool
            False if the lease has expired; the report then has no effect.

        Raises
        ------
        ConfigError
            If the same record has failed `retries` times (the message names the data set and the record), or `record`
            is not an unapplied record of the task.
        """
        with self._database.transaction():
            task = self._requeue_expired_and_find(task_id)
            if task is None:
                return False
            if ok or task.state == "done":
                self._database.record_progress(task.id, task.end_record, self._clock())
                return True
            reason = self._record_failure(task, error or "no reason given", record)
        if reason:
            raise ConfigError(reason)
        return True

    def heartbeat(self, worker: str | int) -> None:
        """Extend the leases of all tasks of a worker."""
        with self._database.transaction():
            self._requeue_expired()
            for task in self._database.running_tasks(worker=str(worker)):
                self._database.record_progress(task.id, task.applied_until, self._clock() + self.lease)

    def lost(self, worker: str | int) -> None:
        """Return all tasks of a worker to the queue, from the first unapplied record."""
        with self._database.transaction():
            for task in self._database.running_tasks(worker=str(worker)):
                self._database.reissue_ranges(task, [(task.applied_until, task.end_record)])

    @type_checked
    def start_round(self, kind: Literal["evaluation", "prediction"], records: Count | None = None) -> None:
        """Replace the evaluation or prediction tasks with a new round over `records` records (default: the queue's)."""
        with self._database.transaction():
            self._database.delete_tasks(kind)
            self._add_round(kind, self._database.count_begun_rounds(kind), records or self.records)

    def restore(self, applied: Iterable[tuple[int, int, int]], notes: Mapping[str, str] | None = None) -> None:
        """Reset the training tasks to the records not yet applied to the restored weights; their leases end.

        Parameters
        ----------
        applied : iterable of (epoch, start, upto)
            Ranges of positions whose records have been applied to the weights.
        notes : mapping of str to str, optional
            Texts to store in the same transaction.
        """
        applied_ranges: dict[int, list[tuple[int, int]]] = {}
        for epoch, start, upto in applied:
            applied_ranges.setdefault(epoch, []).append((start, upto))
        with self._database.transaction():
            self._database.delete_tasks_and_rounds("training")
            for epoch in range(max(applied_ranges, default=-1) + 1):
                self._add_round("training", epoch, self.records)
                for task in self._database.unassigned_tasks("training", epoch):
                    remaining = _uncovered_ranges(task.start_record, task.end_record, applied_ranges.get(epoch, []))
                    if remaining != [(task.start_record, task.end_record)]:
                        self._database.reissue_ranges(task, remaining)
            for name, text in (notes or {}).items():
                self._database.store_note(name, text)

    def store_note(self, name: str, text: str) -> None:
        """Store a text with the tasks."""
        with self._database.transaction():
            self._database.store_note(name, text)

    def load_note(self, name: str) -> str | None:
        """Return a text stored by `store_note`, or None."""
        with self._database.transaction():
            return self._database.load_note(name)

    def record_loss(self, epoch: int, task: int, minibatch: int, loss: float, samples: int) -> None:
        """Record the mean loss of a minibatch, replacing its loss from earlier training."""
        with self._database.transaction():
            self._database.losses.record(epoch, task, minibatch, loss, samples)

    def mean_loss(self, epoch: int) -> float | None:
        """Return the mean recorded loss over the samples of an epoch; None if no loss was recorded."""
        with self._database.transaction():
            return self._database.losses.mean(epoch)

    def counts(self, kind: str = "training") -> dict[str, int]:
        """Return the number of tasks by state: 'todo' (including future epochs), 'doing', 'done' and 'failed'."""
        with self._database.transaction():
            self._requeue_expired()
            counts = self._database.count_by_state(kind)
            if kind == "training":
                tasks_per_epoch = -(-self.records // self.records_per_task)
                counts["todo"] += max(0, self.epochs - self._database.count_begun_rounds(kind)) * tasks_per_epoch
        return counts

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """The skipped records and the last error of each."""
        return self._database.skipped_records()

    def close(self) -> None:
        """Close the database; tasks in progress keep their leases."""
        self._database.close()

    def __enter__(self) -> TaskQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Private methods.

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the numbers of the records of a training epoch, in the order of its positions."""
        return shuffled_indices(self.records, self.seed, epoch) if self.shuffle else np.arange(self.records)

    def _record_numbers_through(self, task: TaskRow) -> np.ndarray:
        """Return the record numbers by position, at least up to a task's end."""
        return self.order(task.epoch) if task.kind == "training" else np.arange(task.end_record)

    def _requeue_expired(self) -> None:
        now, running = self._clock(), self._database.running_tasks
        # leases that end too late began before the clock was set back
        for task in running(expired_before=now) + running(expiring_after=now + 2 * self.lease):
            self._database.reissue_ranges(task, [(task.applied_until, task.end_record)])

    def _requeue_expired_and_find(self, task_id: int) -> TaskRow | None:
        """Requeue expired tasks; return a task if its lease is valid, or was valid until the task was done."""
        self._requeue_expired()
        return self._database.find_leased_task(task_id)

    def _try_begin_next_round(self, kind: str) -> bool:
        """Add the tasks of the next round; return whether there was one."""
        num_begun = self._database.count_begun_rounds(kind)
        if num_begun >= (self.epochs if kind == "training" else 1):
            return False
        self._add_round(kind, num_begun, self.records)
        return True

    def _add_round(self, kind: str, epoch: int, records: int) -> None:
        task_bounds = [*range(0, records, self.records_per_task), records]
        self._database.add_round(kind, epoch, list(pairwise(task_bounds)))

    def _record_failure(self, task: TaskRow, error: str, record: int | None) -> str | None:
        """Count a failure and reissue the remaining records; return the reason if the job must stop."""
        unapplied_records = self._record_numbers_through(task)[task.applied_until : task.end_record]
        failed = int(unapplied_records[0] if record is None else record)
        if failed not in unapplied_records:
            raise ConfigError(f"record: {failed} is not an unapplied record of task {task.id}; give an unapplied one")
        failures = self._database.record_failure_and_count(task.kind, failed, error)
        is_skipped = failures >= self.retries and self.skip_bad_records and task.kind == "training"
        if is_skipped:
            self._database.skip_record(failed, error)
        if is_skipped or failures < self.retries:
            self._database.reissue_ranges(task, [(task.applied_until, task.end_record)])
            return None
        self._database.mark_failed(task)
        stop_reason = (
            f"{self.source}: record {failed} has failed {counted(failures, 'time')}, the last time with: {error};"
            " correct the record, or skip such records with --skip-bad-records"
        )
        self._database.store_note(_STOP_REASON_NOTE, stop_reason)
        return stop_reason


def _uncovered_ranges(start: int, end: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    gaps, position = [], start
    for first, last in sorted(covered):
        if first > position and position < end:
            gaps.append((position, min(first, end)))
        position = max(position, last)
    return [*gaps, (position, end)] if position < end else gaps
