"""Tasks as a data set of PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..data.records import BadRecord
from ..errors import ConfigError
from .queue import WAIT, TaskQueue


class TaskDataset(IterableDataset):
    """Minibatches of the tasks that a queue hands to a worker.

    A minibatch is credited when the next one is asked for, and so once it has been trained. Those of a task whose lease
    has ended are left to others.

    Parameters
    ----------
    queue : TaskQueue, or what has its methods
    worker : str
        Unique within the job.
    read : callable
        From numbers of records (int64, shape (n,)) to a minibatch. A BadRecord that it raises is reported.
    minibatch_size : int
    kind : {'training', 'evaluation', 'prediction'}
    poll : float
        Seconds between two questions while others have the last tasks.

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
        kind: str = "training",
        poll: float = 1.0,
    ) -> None:
        self.queue, self.worker, self.read = queue, worker, read
        self.minibatch_size, self.kind, self.poll = minibatch_size, kind, poll

    def __iter__(self) -> Iterator[Any]:
        """Yield minibatches until all tasks of the job are done.

        Raises
        ------
        ConfigError
            In a process of a DataLoader with num_workers, which reads ahead of what is trained; or a record has failed
            too often.
        """
        if get_worker_info() is not None:
            raise ConfigError("num_workers: prefetched minibatches would be counted as trained; give 0")
        while (task := self.queue.get(self.worker, self.kind)) is not None:
            if task is WAIT:
                time.sleep(self.poll)
                continue
            for _, upto, numbers in task.minibatches(self.minibatch_size):
                try:
                    batch = self.read(numbers)
                except BadRecord as error:
                    self.queue.report(task.id, ok=False, error=str(error), record=error.record)
                    break
                yield batch
                if not self.queue.applied(task.id, upto):
                    break
            else:
                self.queue.report(task.id)
