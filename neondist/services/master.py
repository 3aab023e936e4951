"""The master of a job, which hands the tasks of a queue to workers, and a worker's side of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np

from ..comm import Transport, all_or_none
from ..errors import ConfigError, ServiceError
from .database import read_note
from .message import Message
from .progress import Credit, Credits
from .queue import WAIT, Task, TaskQueue
from .wire import Method, Service, ServiceClient

LEASE = 60.0
"""Seconds that a worker keeps its task without a sign of life; the death of a process is known at once."""
PATIENCE = 60.0
"""Seconds for which workers try services again that do not answer, as while they are restarted."""
_FACTS = "records", "batch_size", "epochs", "seed"
_TRAINING, _WITHOUT_UPDATE, _SERVERS = "training", "without update", "servers"
"""Names of what is noted in the queue: what workers train on, minibatches without an update, and the servers' state."""


class Master(Service):
    """The tasks of one job.

    There are none until a worker reports what it trains on; all workers must report the same.

    Parameters
    ----------
    minibatches_per_task : int
    lease : float
        As of `TaskQueue`.
    source : str
        Name of the data in messages.
    path : Path, optional
        The queue, with all that another master needs to go on. Workers then get tasks while it is `ready`, and are
        dismissed when it is `finished`. Default: in memory.

    Attributes
    ----------
    ready : bool
        Whether the servers hold what the queue says.
    blank : bool
        Whether servers wait for a worker to give them the model.
    finished : bool
        Whether the results of all tasks are safe.
    """

    name = "Master"

    def __init__(
        self,
        minibatches_per_task: int = 1,
        lease: float = LEASE,
        source: str = "the data set",
        path: Path | None = None,
    ) -> None:
        self._per_task, self._lease, self._source, self._path = minibatches_per_task, lease, source, path
        self._lock = threading.Lock()
        self._queue: TaskQueue | None = None
        self._facts: dict[str, int] = {}
        self._without_update: set[Credit] = set()
        self.ready = self.finished = path is None
        self.blank = False
        if path is not None and (facts := read_note(path, _TRAINING)) is not None:
            self._open(json.loads(facts))

    def methods(self) -> Mapping[str, Method]:
        """Return the methods that workers call."""
        return {
            "report_training_params": self.report_training_params,
            "get_task": self.get_task,
            "applied": self.applied,
            "report_task_result": self.report_task_result,
            "heartbeat": self.heartbeat,
            "lost": self.lose,
            "check": self.compare,
        }

    def report_training_params(self, request: Message) -> Message:
        """Make the queue, or check that it is the same; return records per task and lease.

        A queue that is kept takes more epochs, as of a job that is resumed.
        """
        facts = {name: request.integer(name, int(name != "seed")) for name in _FACTS}
        with self._lock:
            if self._queue is None:
                self._open(facts)
            elif self._path is not None and facts["epochs"] > self._facts["epochs"]:
                self._queue.close()
                self._open(self._facts | {"epochs": facts["epochs"]})
            for name, value in facts.items():
                if value != self._facts[name]:
                    raise ConfigError(f"{name}: {value}, but other workers of the job have {self._facts[name]}")
            return Message({"records_per_task": self._begun().records_per_task, "lease": self._lease})

    def get_task(self, request: Message) -> Message:
        """Lease the next task to a worker, and take back what it has had: `type` is TRAINING, WAIT or NONE."""
        queue, worker = self._begun(), request.text("worker")
        queue.lost(worker)
        task = queue.get(worker) if self.ready else WAIT
        if task is WAIT or (task is None and not self.finished):
            return Message({"type": "WAIT", "blank": self.blank})
        if task is None:
            return Message({"type": "NONE"})
        fields = {"type": "TRAINING", "task_id": task.id, "epoch": task.epoch, "start": task.start, "end": task.end}
        return Message(fields, {"indices": task.indices, "positions": task.positions})

    def applied(self, request: Message) -> Message:
        """Credit a task up to the end of a minibatch; `credited` is false if its lease is over."""
        task_id, upto = request.integer("task_id"), request.integer("upto")
        if not request.flag("updated"):  # nothing was pushed, as where a gradient was not finite
            with self._lock:
                self._without_update.add(Credit.parse(request.items("credit")))
                self._begun().note(_WITHOUT_UPDATE, json.dumps(sorted(self._without_update)))
        return Message({"credited": self._begun().applied(task_id, upto)})

    def report_task_result(self, request: Message) -> Message:
        """End a task, which has failed if there is an `err_message`; `credited` is false if its lease is over."""
        error = request.text("err_message")
        return Message({"credited": self._begun().report(request.integer("task_id"), not error, error or None)})

    def heartbeat(self, request: Message) -> Message:
        """Extend the lease of a worker's task."""
        self._begun().heartbeat(request.text("worker"))
        return Message()

    def lost(self, worker: str) -> None:
        """Take back the task of a worker that has ended."""
        if self._queue is not None:
            self._queue.lost(worker)

    def lose(self, request: Message) -> Message:
        """Take back the task of a worker that has ended."""
        self.lost(request.text("worker"))
        return Message()

    def compare(self, request: Message) -> Message:
        """Compare what a server has applied with the tasks; see `check`."""
        text = self.check(request.number("samples"), Credits.parse(request.mapping("credits")))
        return Message({"text": text})

    @property
    def begun(self) -> bool:
        """Whether a worker has reported what it trains on."""
        return self._queue is not None

    def agreed_with(self) -> list[str] | None:
        """Return the incarnations of the servers that hold what the queue says; None before the first agreement."""
        noted = None if self._queue is None else self._queue.noted(_SERVERS)
        return None if noted is None else list(json.loads(noted))

    def agree(self, incarnations: Sequence[str]) -> None:
        """Note that servers hold what the queue says, as at the beginning."""
        self._begun().note(_SERVERS, json.dumps(list(incarnations)))
        self.ready = True

    def restore(self, credits: Credits, incarnations: Sequence[str]) -> None:
        """Let the tasks be those that restored servers lack; all leases end."""
        queue, size = self._begun(), self._facts["batch_size"]
        per_task, records = queue.records_per_task, self._facts["records"]
        ranges = []
        for one in credits.listed():
            first = one.task * per_task + one.minibatch * size
            ranges.append((one.epoch, first, min(first + size, (one.task + 1) * per_task, records)))
        queue.restore(ranges, {_SERVERS: json.dumps(list(incarnations))})
        self.ready = True

    def counts(self) -> dict[str, int]:
        """Return the number of tasks by state."""
        return self._begun().counts()

    def is_done(self) -> bool:
        """Whether all tasks are done."""
        if self._queue is None:
            return False
        counts = self._queue.counts()
        return not counts["todo"] and not counts["doing"]

    def close(self) -> None:
        """Close the queue."""
        if self._queue is not None:
            self._queue.close()

    def check(self, samples: float, credits: Credits) -> str:
        """Return what a server has applied in words, after all workers have ended.

        Parameters
        ----------
        samples : float
            Of all gradients that the server has applied.
        credits : Credits
            Of these gradients.

        Raises
        ------
        ServiceError
            A minibatch was applied twice, or was left out although all tasks are done.
        """
        if self._queue is None:
            return "no records"
        records, size, epochs = self._facts["records"], self._facts["batch_size"], self._facts["epochs"]
        per_task, listed = self._queue.records_per_task, credits.listed()
        sizes = {
            Credit(epoch, first // per_task, first % per_task // size): min(size, records - first)
            for epoch, first in product(range(epochs), range(0, records, size))
        }
        once = sum(sizes.get(credit, 0) for credit in listed)
        if samples != once:
            raise ServiceError(f"a server has applied {samples:g} records, {once} of them once")
        counts = self._queue.counts()
        if counts["todo"] or counts["doing"]:
            return f"{once} of {records * epochs} records, each once"
        absent = sizes.keys() - set(listed)
        if absent - self._without_update:
            raise ServiceError(
                f"a server has not applied {len(absent - self._without_update)} of {len(sizes)} minibatches"
            )
        skipped = f", but for {len(absent)} minibatches whose gradients were not finite" if absent else ""
        return f"{records} records in each of {epochs} epochs, each once{skipped}"

    def _open(self, facts: Mapping[str, int]) -> None:
        """Open the queue of what workers train on."""
        self._facts = {name: int(facts[name]) for name in _FACTS}
        per_task = facts.get("records_per_task", self._facts["batch_size"] * self._per_task)
        path, known = self._path or ":memory:", self._facts
        self._queue = TaskQueue(
            path, known["records"], per_task, known["epochs"], known["seed"], lease=self._lease, source=self._source
        )
        self._queue.note(_TRAINING, json.dumps({**known, "records_per_task": per_task}))
        noted = json.loads(self._queue.noted(_WITHOUT_UPDATE) or "[]")
        self._without_update = {Credit.parse(one) for one in noted}

    def _begun(self) -> TaskQueue:
        if self._queue is None:
            raise ConfigError("no worker has reported what it trains on; call report_training_params first")
        return self._queue


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

    Raises
    ------
    ServiceError
        On every rank: the master cannot be reached, or other workers train on something else.
    """

    def __init__(self, address: str, token: str, worker: str, world: Transport, facts: Mapping[str, int]) -> None:
        self.worker, self.world, self._size = worker, world, facts["batch_size"]
        self.credit, self.samples, self.updated, self.refused = Credit(0, 0, 0), 0, False, False
        self._ahead: Task | None = None
        self._task: Task | None = None
        self._upto = self._per_task = 0
        self._master: ServiceClient | None = None
        self._closed = threading.Event()
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

    def of_epoch(self, epoch: int) -> Iterator[Task]:
        """Yield tasks until one of a later epoch comes, or all are done; collective.

        Tasks of earlier epochs that others have lost may be among them.
        """
        while True:
            task, self._ahead = self._ahead or self._take(), None
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

    def _take(self) -> Task | None:
        """Return the next task, as soon as there is one; None if all are done."""
        task = None
        with all_or_none(self.world):
            if self._master is not None:
                task = self._next(self._master)
        return self.world.bcast(task)

    def _next(self, master: ServiceClient) -> Task | None:
        pause = 0.0
        while (reply := master.call("get_task", {"worker": self.worker})).text("type") == "WAIT":
            if not pause:
                self._idle()
            if reply.fields.get("blank"):
                self._blank()
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
