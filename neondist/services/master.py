"""The master of a job, which hands the tasks of a queue to workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from ..errors import ConfigError, ServiceError
from .database import read_note
from .message import Message
from .progress import Credit, Credits
from .queue import WAIT, TaskQueue
from .wire import Method, Service

LEASE = 60.0
"""Seconds that a worker keeps its task without a heartbeat; the death of a process is detected at once."""
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
        self._workers: set[str] = set()
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
            "progress": self.progress,
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
        self._workers.add(worker)
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
        self._workers.discard(worker)
        if self._queue is not None:
            self._queue.lost(worker)

    def lose(self, request: Message) -> Message:
        """Take back the task of a worker that has ended."""
        self.lost(request.text("worker"))
        return Message()

    def progress(self, request: Message) -> Message:
        """Return the number of tasks that no worker has yet, at least 1 before the first report of a worker, and the
        workers that have asked for one.
        """
        todo = self.counts()["todo"] if self.begun else 1
        return Message({"todo": todo, "workers": self.workers})

    def compare(self, request: Message) -> Message:
        """Compare what a server has applied with the tasks; see `check`."""
        text = self.check(request.number("samples"), Credits.parse(request.mapping("credits")))
        return Message({"text": text})

    @property
    def workers(self) -> list[str]:
        """The workers that have asked for a task, and have not ended."""
        return sorted([*self._workers])

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
            raise ConfigError("no worker has reported its training parameters; call report_training_params first")
        return self._queue
