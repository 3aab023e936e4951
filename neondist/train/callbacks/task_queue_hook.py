"""tasks.sqlite: hook that reads the order of records from the task queue of a single-process run."""

from __future__ import annotations

from pathlib import Path

from ...io.output import TASKS
from ...services import Task, TaskQueue
from ..state import TrainState
from .hook import Hook

_LEASE_SECONDS = 1e9
"""Lease in seconds; practically unlimited, since the only worker is this process."""


class TaskQueueHook(Hook):
    """Take the order of records from a queue in the run's folder, and mark them as done after each step.

    A resumed run continues from its checkpoint: records on which its weights were not trained are pending again.

    Parameters
    ----------
    folder : path
    records_per_task : int
        Number of records of a task, a multiple of the batch size.
    source : str
        Name of the data in messages.
    """

    def __init__(self, folder: Path, records_per_task: int, source: str) -> None:
        self.folder, self.records_per_task, self.source = folder, records_per_task, source
        self.queue: TaskQueue | None = None
        self._task: Task | None = None

    def before_run(self, run: TrainState) -> None:
        """Open the queue at the position of the run."""
        if run.step == 0:
            for path in self.folder.glob(f"{TASKS}*"):
                path.unlink()
        samples, epoch = len(run.dataset.train), run.epoch
        self.queue = TaskQueue(
            self.folder / TASKS, samples, self.records_per_task, run.epochs, run.model.seed, lease=_LEASE_SECONDS,
            source=self.source,
        )  # fmt: skip
        completed_ranges = [(past_epoch, 0, samples) for past_epoch in range(epoch)]
        self.queue.restore([*completed_ranges, (epoch, 0, run.samples_seen)] if run.samples_seen else completed_ranges)
        run.dataset.train.sampler = self.queue

    def after_step(self, run: TrainState) -> None:
        """Mark the records of the batch as done."""
        self._credit_samples(run.epoch, run.samples_seen)

    def close(self) -> None:
        """Close the queue, which completes its file."""
        if self.queue is not None:
            self.queue.close()

    def _credit_samples(self, epoch: int, samples_seen: int) -> None:
        assert self.queue is not None
        while self._task is None or (self._task.epoch, self._task.end) < (epoch, samples_seen):
            if self._task is not None:
                self.queue.report(self._task.id)
            task = self.queue.get("local")
            assert isinstance(task, Task)  # each batch belongs to a task
            self._task = task
        self.queue.applied(self._task.id, samples_seen)
