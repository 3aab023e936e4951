"""PyTorch data set of the tasks of a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..data.records.base import BadRecordError
from ..errors import ConfigError
from .queue import WAIT, TaskKind, TaskQueue


class TaskDataset(IterableDataset):
    """Minibatches of the tasks that a queue assigns to a worker.

    A minibatch is credited after its training step, when the next one is requested. The rest of a task whose lease has
    expired is left to other workers.

    Parameters
    ----------
    queue : TaskQueue, or an object with its methods
    worker : str
        Name, unique within the job.
    read : callable
        Returns the minibatch with given record numbers (int64, shape (n,)); a BadRecordError is reported to the queue.
    minibatch_size : int
    kind : {'training', 'evaluation', 'prediction'}
    poll : float
        Seconds between requests while other workers process the last tasks.

    Examples
    --------
    >>> data = TaskDataset(queue, "worker 0", lambda numbers: (x[numbers], y[numbers]), 64)  # doctest: +SKIP
    >>> for features, labels in torch.utils.data.DataLoader(data, batch_size=None):  # doctest: +SKIP
    ...     step(features, labels)
    """

    def __init__(
        self,
        queue: TaskQueue,
        worker: str,
        read: Callable[[np.ndarray], Any],
        minibatch_size: int,
        kind: TaskKind = "training",
        poll: float = 1.0,
    ) -> None:
        self.queue, self.worker, self.read = queue, worker, read
        self.minibatch_size, self.kind, self.poll = minibatch_size, kind, poll

    def __iter__(self) -> Iterator[Any]:
        """Yield minibatches until all tasks of the job are done.

        Raises
        ------
        ConfigError
            The data set is used in a DataLoader with num_workers, which prefetches minibatches; or a record has failed
            too often.
        """
        if get_worker_info() is not None:
            raise ConfigError("num_workers: prefetched minibatches would be counted as trained; set num_workers to 0")
        while (task := self.queue.get(self.worker, self.kind)) is not None:
            if task is WAIT:
                time.sleep(self.poll)
                continue
            for _, upto, record_numbers in task.minibatches(self.minibatch_size):
                try:
                    batch = self.read(record_numbers)
                except BadRecordError as error:
                    self.queue.report(task.id, ok=False, error=str(error), record=error.record_number)
                    break
                yield batch
                if not self.queue.applied(task.id, upto):
                    break
            else:
                self.queue.report(task.id)
