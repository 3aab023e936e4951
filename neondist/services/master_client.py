"""Client of the master: the tasks of a worker, and reports of their progress."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import repeat

import numpy as np

from ..comm import Transport, all_or_none
from ..errors import DataError, ServiceError
from .master import Master
from .progress import AppliedMinibatches, MinibatchId
from .queue import Task
from .wire import ServiceClient

RETRY_SECONDS = 60.0
"""Seconds for which workers retry calls to unavailable services, such as those that are being restarted."""


class MasterClient:
    """Client of the master: requests a worker's tasks and reports their progress; only the first rank communicates.

    Parameters
    ----------
    address, token : str
        Address of the master, and token of the job.
    worker : str
        Name, unique within the job.
    world : Transport
        The ranks of this worker.
    is_first_worker : bool
        Whether this worker writes the output of all epochs, and therefore starts at the first one.
    parameters : dict of str to int
        records, batch_size, epochs and seed, the same on all workers.

    Attributes
    ----------
    minibatch : MinibatchId
        Current minibatch.
    samples : int
        Samples of the current minibatch.
    was_pushed : bool
        Whether the gradient of the current minibatch was pushed.
    was_rejected : bool
        Whether a server has rejected this gradient as too old; set on the first rank only.
    has_waited, wait_interrupted : bool
        Whether the last task was not available at once, and whether the wait for it was interrupted.

    Raises
    ------
    ServiceError
        On every rank: the master is unreachable, or other workers use different training parameters.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: str,
        world: Transport,
        parameters: Mapping[str, int],
        is_first_worker: bool = True,
    ) -> None:
        self.worker, self.world, self.is_first_worker = worker, world, is_first_worker
        self._batch_size, self._num_records = parameters["batch_size"], parameters["records"]
        self.minibatch, self.samples = MinibatchId(0, 0, 0), 0
        self.was_pushed = self.was_rejected = False
        self._next_task: Task | None = None
        self._task: Task | None = None
        self._minibatch_end = self._records_per_task = 0
        self._master: ServiceClient | None = None
        self._closed = threading.Event()
        self.has_waited = self.wait_interrupted = False
        self.set_callbacks(lambda: None, lambda: None)
        with all_or_none(world, root_only=True):
            if world.rank == 0:
                self._master = ServiceClient(address, Master.name, token, retry_seconds=RETRY_SECONDS)
                self._master.check_service_version()
                reply = self._master.call("report_training_params", parameters)
                self._records_per_task = reply.integer("records_per_task", 1)
                interval = reply.number("lease") / 3
                threading.Thread(target=self._send_heartbeats, args=(interval,), name="heartbeat", daemon=True).start()
        self._records_per_task = world.bcast(self._records_per_task)

    def epoch_of_next_task(self, should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the next task; return its epoch, or None if all are done or the wait is interrupted. Collective.

        Parameters
        ----------
        should_stop : callable
            Returns whether to interrupt the wait; called on the first rank.
        """
        self._next_task = self._next_task or self._wait_for_task(should_stop)
        return None if self._next_task is None else self._next_task.epoch

    def tasks_through_epoch(self, epoch: int, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Task]:
        """Yield tasks until the next one is of a later epoch, all are done, or the wait is interrupted. Collective.

        The tasks may include those of earlier epochs that other workers have lost.
        """
        while True:
            task, self._next_task = self._next_task or self._wait_for_task(should_stop), None
            if task is None or task.epoch > epoch:
                self._next_task = task
                return
            self._task = task
            yield task

    def minibatches_before(self, epoch: int, position: int) -> AppliedMinibatches:
        """Return the minibatches of all epochs before `epoch`, and those before a position in it.

        Raises
        ------
        DataError
            The position is within a minibatch.
        """
        applied, batch_size, records = AppliedMinibatches(), self._batch_size, self._num_records
        if position % batch_size and position < records:
            raise DataError(
                f"checkpoint.h5: {position} samples of the epoch have been processed, which is not a multiple of"
                f" batch_size {batch_size}; resume with the batch size of the run that wrote the checkpoint"
            )
        for epoch_number, upto in enumerate([*repeat(records, epoch), position]):
            for start in range(0, upto, batch_size):
                task, first_record = divmod(start, self._records_per_task)
                applied.add(MinibatchId(epoch_number, task, first_record // batch_size))
        return applied

    def begin_minibatch(self, start: int, stop: int, samples: int) -> None:
        """Set the minibatch of the current task to be trained next."""
        assert self._task is not None
        task_number = start // self._records_per_task
        index_in_task = (start - task_number * self._records_per_task) // self._batch_size
        self.minibatch = MinibatchId(self._task.epoch, task_number, index_in_task)
        self._minibatch_end, self.samples, self.was_pushed, self.was_rejected = stop, samples, False, False

    def finish_minibatch(self, loss: float = math.nan) -> bool:
        """Report that the minibatch, with mean loss `loss`, was trained. Collective.

        Returns False if its gradient was rejected or the lease has expired; the rest of the task is then reissued.
        """
        assert self._task is not None
        is_credited, fields = True, {"task_id": self._task.id}
        with all_or_none(self.world, root_only=True):
            if self._master is not None:
                progress = {"upto": self._minibatch_end, "updated": self.was_pushed, "credit": list(self.minibatch)}
                progress |= {"loss": loss, "samples": self.samples} if math.isfinite(loss) else {}
                is_credited = not self.was_rejected and self._master.call("applied", fields | progress).flag("credited")
                if is_credited and self._minibatch_end == self._task.end:
                    self._master.call("report_task_result", {**fields, "err_message": ""})
        return bool(self.world.bcast(is_credited))

    def set_callbacks(self, before_wait: Callable[[], object], while_uninitialised: Callable[[], object]) -> None:
        """Set functions that the first rank calls before it waits for a task or ends, and while servers are empty."""
        self._before_wait, self._while_uninitialised = before_wait, while_uninitialised

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        if self._master is not None:
            self._master.close()

    def _wait_for_task(self, should_stop: Callable[[], bool]) -> Task | None:
        """Wait for the next task and return it; None if all tasks are done or the wait was interrupted."""
        task = None
        with all_or_none(self.world, root_only=True):
            if self._master is not None:
                task = self._request_task(self._master, should_stop)
        shared_state = task, self.has_waited, self.wait_interrupted
        task, self.has_waited, self.wait_interrupted = self.world.bcast(shared_state)
        return task

    def _request_task(self, master: ServiceClient, should_stop: Callable[[], bool]) -> Task | None:
        pause, self.has_waited = 0.0, False
        while (reply := master.call("get_task", {"worker": self.worker})).text("type") == "WAIT":
            self.has_waited = True
            if not pause:
                self._before_wait()
            if reply.fields.get("blank"):
                self._while_uninitialised()
            if should_stop():
                self.wait_interrupted = True
                return None
            pause = min(2 * pause + 0.02, 0.5)
            time.sleep(pause)
        if reply.text("type") == "NONE":
            self._before_wait()
            return None
        task_id, epoch, start, end = (reply.integer(name) for name in ("task_id", "epoch", "start", "end"))
        indices, positions = (reply.array(name, np.int64, [None]) for name in ("indices", "positions"))
        return Task(task_id, epoch, start, end, "training", indices, positions)

    def _send_heartbeats(self, interval: float) -> None:
        """Send heartbeats until the client is closed; if the master is lost, the next call raises an error."""
        assert self._master is not None
        while not self._closed.wait(interval):
            with suppress(ServiceError, ValueError):  # the master is being restarted, or the connection is closed
                self._master.call("heartbeat", {"worker": self.worker})
