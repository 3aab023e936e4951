"""A worker's side of the master: the tasks that it gets, and what it reports of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import numpy as np

from ..comm import Transport, all_or_none
from ..errors import ServiceError
from .master import Master
from .progress import Credit
from .queue import Task
from .wire import ServiceClient

PATIENCE = 60.0
"""Seconds for which workers try services again that do not answer, as while they are restarted."""


class WorkerTasks:
    """The tasks of a worker, whose first rank speaks with the master.

    Parameters
    ----------
    address, token : str
        Of the master.
    worker : str
        Unique within the job.
    world : Transport
        The ranks of this worker.
    is_first : bool
        Whether it writes the records of the job.
    facts : dict of str to int
        records, batch_size, epochs and seed: the same on all workers.

    Attributes
    ----------
    credit : Credit
        The present minibatch.
    samples : int
        Of the present minibatch.
    updated : bool
        Whether its gradient was pushed.
    refused : bool
        Whether a server has refused it, as one of older values; set on the first rank.
    interrupted : bool
        Whether the last wait for a task was interrupted.

    Raises
    ------
    ServiceError
        On every rank: the master cannot be reached, or other workers train on something else.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: str,
        world: Transport,
        facts: Mapping[str, int],
        is_first: bool = True,
    ) -> None:
        self.worker, self.world, self.is_first, self._size = worker, world, is_first, facts["batch_size"]
        self.credit, self.samples, self.updated, self.refused = Credit(0, 0, 0), 0, False, False
        self._ahead: Task | None = None
        self._task: Task | None = None
        self._upto = self._per_task = 0
        self._master: ServiceClient | None = None
        self._closed = threading.Event()
        self.interrupted = False
        self._idle: Callable[[], object] = lambda: None
        self._blank: Callable[[], object] = lambda: None
        with all_or_none(world):
            if world.rank == 0:
                self._master = ServiceClient(address, Master.name, token, patience=PATIENCE)
                self._master.hello()
                reply = self._master.call("report_training_params", facts)
                self._per_task = reply.integer("records_per_task", 1)
                pause = reply.number("lease") / 3
                threading.Thread(target=self._beat, args=(pause,), name="heartbeat", daemon=True).start()
        self._per_task = world.bcast(self._per_task)

    def next_epoch(self, stops: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the next task and return its epoch; None if all are done, or the wait was interrupted; collective.

        Parameters
        ----------
        stops : callable
            Whether to interrupt the wait; called on the first rank.
        """
        self._ahead = self._ahead or self._take(stops)
        return None if self._ahead is None else self._ahead.epoch

    def of_epoch(self, epoch: int, stops: Callable[[], bool] = lambda: False) -> Iterator[Task]:
        """Yield tasks until one of a later epoch comes, all are done, or `stops` interrupts the wait; collective.

        Tasks of earlier epochs that others have lost may be among them.
        """
        while True:
            task, self._ahead = self._ahead or self._take(stops), None
            if task is None or task.epoch > epoch:
                self._ahead = task
                return
            self._task = task
            yield task

    def begin(self, first: int, upto: int, samples: int) -> None:
        """Take note of the minibatch of the present task that is trained next."""
        assert self._task is not None
        number = first // self._per_task
        self.credit = Credit(self._task.epoch, number, (first - number * self._per_task) // self._size)
        self._upto, self.samples, self.updated, self.refused = upto, samples, False, False

    def finish_minibatch(self) -> bool:
        """Report that the minibatch was trained; collective. False: it was refused, or the lease is over.

        The rest of the task is then handed out again.
        """
        assert self._task is not None
        credited, told = True, {"task_id": self._task.id}
        with all_or_none(self.world):
            if self._master is not None:
                more = {"upto": self._upto, "updated": self.updated, "credit": list(self.credit)}
                credited = not self.refused and self._master.call("applied", {**told, **more}).flag("credited")
                if credited and self._upto == self._task.end:
                    self._master.call("report_task_result", {**told, "err_message": ""})
        return bool(self.world.bcast(credited))

    def when_idle(self, function: Callable[[], object]) -> None:
        """Call a function, on the first rank, before it waits for a task, and when there are none any more."""
        self._idle = function

    def when_blank(self, function: Callable[[], object]) -> None:
        """Call a function, on the first rank, while servers wait for the model."""
        self._blank = function

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        if self._master is not None:
            self._master.close()

    def _take(self, stops: Callable[[], bool]) -> Task | None:
        """Return the next task, as soon as there is one; None if all are done, or the wait was interrupted."""
        task = None
        with all_or_none(self.world):
            if self._master is not None:
                task = self._next(self._master, stops)
        task, self.interrupted = self.world.bcast((task, self.interrupted))
        return task

    def _next(self, master: ServiceClient, stops: Callable[[], bool]) -> Task | None:
        pause = 0.0
        while (reply := master.call("get_task", {"worker": self.worker})).text("type") == "WAIT":
            if not pause:
                self._idle()
            if reply.fields.get("blank"):
                self._blank()
            if stops():
                self.interrupted = True
                return None
            pause = min(2 * pause + 0.02, 0.5)
            time.sleep(pause)
        if reply.text("type") == "NONE":
            self._idle()
            return None
        task_id, epoch, start, end = (reply.integer(name) for name in ("task_id", "epoch", "start", "end"))
        indices, positions = (reply.array(name, np.int64, [None]) for name in ("indices", "positions"))
        return Task(task_id, epoch, start, end, "training", indices, positions)

    def _beat(self, pause: float) -> None:
        """Give signs of life until the end; where the master is gone for good, the next call says so."""
        assert self._master is not None
        while not self._closed.wait(pause):
            with suppress(ServiceError, ValueError):  # it is restarted, or this is the end
                self._master.call("heartbeat", {"worker": self.worker})
