"""Master of a job, which assigns the tasks of a queue to workers."""

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
"""Seconds without a heartbeat after which a worker loses its task; killed processes are detected at once."""
_FACTS = "records", "batch_size", "epochs", "seed"
_TRAINING, _WITHOUT_UPDATE, _SERVERS = "training", "without update", "servers"
"""Names of notes in the queue: parameters of the training, minibatches without an update, servers' incarnations."""


class Master(Service):
    """Tasks of a job.

    They are created once a worker reports its training parameters, which must be equal on all workers.

    Parameters
    ----------
    minibatches_per_task : int
    lease : float
        As for `TaskQueue`.
    source : str
        Name of the data in messages.
    path : Path, optional
        Path of a persistent queue, from which a restarted master continues. Workers then get tasks while the master is
        `ready`, and are dismissed once it is `finished`. Default: in memory.

    Attributes
    ----------
    ready : bool
        Whether the servers agree with the queue.
    blank : bool
        Whether servers wait for a worker to push the model.
    finished : bool
        Whether the results of all tasks are saved.
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
        """Create the queue, or check that the parameters match; return records per task and lease.

        A persistent queue can be extended by more epochs, such as by a resumed job.
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
            return Message({"records_per_task": self._require_queue().records_per_task, "lease": self._lease})

    def get_task(self, request: Message) -> Message:
        """Requeue the current task of a worker and lease it the next one: `type` is TRAINING, WAIT or NONE."""
        queue, worker = self._require_queue(), request.text("worker")
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
        """Credit a task up to the end of a minibatch; `credited` is false if its lease has expired."""
        task_id, upto = request.integer("task_id"), request.integer("upto")
        if not request.flag("updated"):  # nothing was pushed, such as for a non-finite gradient
            with self._lock:
                self._without_update.add(Credit.parse(request.items("credit")))
                self._require_queue().note(_WITHOUT_UPDATE, json.dumps(sorted(self._without_update)))
        return Message({"credited": self._require_queue().applied(task_id, upto)})

    def report_task_result(self, request: Message) -> Message:
        """Finish a task, as failed if `err_message` is set; `credited` is false if its lease has expired."""
        error = request.text("err_message")
        return Message({"credited": self._require_queue().report(request.integer("task_id"), not error, error or None)})

    def heartbeat(self, request: Message) -> Message:
        """Extend the lease of a worker's task."""
        self._require_queue().heartbeat(request.text("worker"))
        return Message()

    def release(self, worker: str) -> None:
        """Requeue the task of an ended worker."""
        self._workers.discard(worker)
        if self._queue is not None:
            self._queue.lost(worker)

    def lose(self, request: Message) -> Message:
        """Requeue the task of an ended worker."""
        self.release(request.text("worker"))
        return Message()

    def progress(self, request: Message) -> Message:
        """Return the number of unassigned tasks, 1 before the first report, and the workers that requested one."""
        todo = self.counts()["todo"] if self.is_configured else 1
        return Message({"todo": todo, "workers": self.workers})

    def compare(self, request: Message) -> Message:
        """Compare the applied gradients of a server with the tasks; see `check`."""
        text = self.check(request.number("samples"), Credits.parse(request.mapping("credits")))
        return Message({"text": text})

    @property
    def workers(self) -> list[str]:
        """Workers that have requested a task, and have not ended."""
        return sorted([*self._workers])

    @property
    def is_configured(self) -> bool:
        """Whether a worker has reported its training parameters."""
        return self._queue is not None

    def read_incarnations(self) -> list[str] | None:
        """Return the incarnations of the servers that agree with the queue; None before the first agreement."""
        note = None if self._queue is None else self._queue.noted(_SERVERS)
        return None if note is None else list(json.loads(note))

    def agree(self, incarnations: Sequence[str]) -> None:
        """Record that servers agree with the queue, such as at the beginning."""
        self._require_queue().note(_SERVERS, json.dumps(list(incarnations)))
        self.ready = True

    def restore(self, credits: Credits, incarnations: Sequence[str]) -> None:
        """Reset the tasks to those that restored servers lack; all leases end."""
        queue, size = self._require_queue(), self._facts["batch_size"]
        per_task, records = queue.records_per_task, self._facts["records"]
        ranges = []
        for credit in credits.to_list():
            first = credit.task * per_task + credit.minibatch * size
            ranges.append((credit.epoch, first, min(first + size, (credit.task + 1) * per_task, records)))
        queue.restore(ranges, {_SERVERS: json.dumps(list(incarnations))})
        self.ready = True

    def counts(self) -> dict[str, int]:
        """Return the number of tasks by state."""
        return self._require_queue().counts()

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
        """Check and describe the applied gradients of a server, after all workers have ended.

        Parameters
        ----------
        samples : float
            Total samples of the applied gradients.
        credits : Credits
            Their minibatches.

        Raises
        ------
        ServiceError
            A minibatch was applied twice, or is missing although all tasks are done.
        """
        if self._queue is None:
            return "no records"
        records, size, epochs = self._facts["records"], self._facts["batch_size"], self._facts["epochs"]
        per_task, listed = self._queue.records_per_task, credits.to_list()
        sizes = {
            Credit(epoch, first // per_task, first % per_task // size): min(size, records - first)
            for epoch, first in product(range(epochs), range(0, records, size))
        }
        unique = sum(sizes.get(credit, 0) for credit in listed)
        if samples != unique:
            raise ServiceError(f"a server has applied {samples:g} records, {unique} of them once")
        counts = self._queue.counts()
        if counts["todo"] or counts["doing"]:
            return f"{unique} of {records * epochs} records, each once"
        absent = sizes.keys() - set(listed)
        if absent - self._without_update:
            raise ServiceError(
                f"a server has not applied {len(absent - self._without_update)} of {len(sizes)} minibatches"
            )
        skipped = f", but for {len(absent)} minibatches whose gradients were not finite" if absent else ""
        return f"{records} records in each of {epochs} epochs, each once{skipped}"

    def _open(self, facts: Mapping[str, int]) -> None:
        """Open the queue for training parameters."""
        self._facts = {name: int(facts[name]) for name in _FACTS}
        per_task = facts.get("records_per_task", self._facts["batch_size"] * self._per_task)
        path, values = self._path or ":memory:", self._facts
        self._queue = TaskQueue(
            path, values["records"], per_task, values["epochs"], values["seed"], lease=self._lease, source=self._source
        )
        self._queue.note(_TRAINING, json.dumps({**values, "records_per_task": per_task}))
        minibatches = json.loads(self._queue.noted(_WITHOUT_UPDATE) or "[]")
        self._without_update = {Credit.parse(minibatch) for minibatch in minibatches}

    def _require_queue(self) -> TaskQueue:
        if self._queue is None:
            raise ConfigError("no worker has reported its training parameters; call report_training_params first")
        return self._queue
