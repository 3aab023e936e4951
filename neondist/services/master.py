"""Master of a job, which assigns the tasks of a queue to workers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from ..errors import ConfigError, ServiceError
from ..terminal.console import counted
from .database import delete_note, read_note
from .message import Message
from .progress import AppliedMinibatches, MinibatchId
from .queue import WAIT, TaskQueue
from .wire import Service, ServiceMethod

LEASE_SECONDS = 60.0
"""Seconds without a heartbeat after which a worker loses its task; killed processes are detected at once."""
_TRAINING_PARAMETER_NAMES = "records", "batch_size", "epochs", "seed"
_PARAMETERS_NOTE, _SKIPPED_NOTE, _INCARNATIONS_NOTE = "training", "without update", "servers"
"""Names of notes in the queue: parameters of the training, minibatches without an update, servers' incarnations."""


def forget_server_incarnations(path: Path) -> None:
    """Let the next master of a persistent queue wait until workers have configured the servers, as in a new job."""
    delete_note(path, _INCARNATIONS_NOTE)


class Master(Service):
    """Service that assigns the tasks of a job.

    The tasks are created once a worker reports its training parameters, which must be the same on all workers.

    Parameters
    ----------
    minibatches_per_task : int
    lease : float
        As for `TaskQueue`.
    source : str
        Name of the data set in messages.
    path : Path, optional
        Path of a persistent queue, from which a restarted master continues. Workers then get tasks only while
        `servers_match_queue` is true, and are dismissed once `results_saved` is true. Default: a queue in memory.

    Attributes
    ----------
    servers_match_queue : bool
        Whether the servers have applied exactly the gradients that the queue has recorded.
    servers_need_model : bool
        Whether servers are waiting for a worker to push the model.
    results_saved : bool
        Whether the results of all tasks are saved.
    """

    name = "Master"

    def __init__(
        self,
        minibatches_per_task: int = 1,
        lease: float = LEASE_SECONDS,
        source: str = "the data set",
        path: Path | None = None,
    ) -> None:
        self._minibatches_per_task, self._lease, self._source, self._path = minibatches_per_task, lease, source, path
        self._lock = threading.Lock()
        self._queue: TaskQueue | None = None
        self._parameters: dict[str, int] = {}
        self._skipped_minibatches: set[MinibatchId] = set()
        self._workers: set[str] = set()
        self.servers_match_queue = self.results_saved = path is None
        self.servers_need_model = False
        if path is not None and (parameters := read_note(path, _PARAMETERS_NOTE)) is not None:
            self._open_queue(json.loads(parameters))

    def methods(self) -> Mapping[str, ServiceMethod]:
        """Return the methods by name."""
        return {
            "report_training_params": self.report_training_params,
            "get_task": self.get_task,
            "applied": self.credit_records,
            "report_task_result": self.report_task_result,
            "heartbeat": self.extend_lease,
            "lost": self.report_lost_worker,
            "progress": self.get_progress,
            "check": self.verify_server_gradients,
        }

    def report_training_params(self, request: Message) -> Message:
        """Create the queue, or check that the parameters match; return the records per task and the lease.

        A resumed job, for example, may extend a persistent queue by further epochs.
        """
        parameters = {name: request.integer(name, int(name != "seed")) for name in _TRAINING_PARAMETER_NAMES}
        with self._lock:
            if self._queue is None:
                self._open_queue(parameters)
            elif self._path is not None and parameters["epochs"] > self._parameters["epochs"]:
                # in place: other threads use the queue
                self._parameters["epochs"] = self._queue.epochs = parameters["epochs"]
                self._store_parameters()
            for name, value in parameters.items():
                if value != self._parameters[name]:
                    raise ConfigError(
                        f"{name}: {value}, but {self._parameters[name]} on other workers or in the run to resume;"
                        " use the same value"
                    )
            return Message({"records_per_task": self._require_queue().records_per_task, "lease": self._lease})

    def get_task(self, request: Message) -> Message:
        """Lease the next task to a worker, requeueing its current one; the reply's `type` is TRAINING, WAIT or NONE."""
        queue, worker = self._require_queue(), request.text("worker")
        queue.lost(worker)
        self._workers.add(worker)
        task = queue.get(worker) if self.servers_match_queue else WAIT
        if task is WAIT or (task is None and not self.results_saved):
            return Message({"type": "WAIT", "blank": self.servers_need_model})
        if task is None:
            return Message({"type": "NONE"})
        fields = {"type": "TRAINING", "task_id": task.id, "epoch": task.epoch, "start": task.start, "end": task.end}
        return Message(fields, {"indices": task.indices, "positions": task.positions})

    def credit_records(self, request: Message) -> Message:
        """Credit a task up to the end of a minibatch; `credited` is false if the task's lease has expired."""
        task_id, upto = request.integer("task_id"), request.integer("upto")
        minibatch = MinibatchId.parse(request.sequence("credit"))
        if not request.flag("updated"):  # nothing was pushed, such as for a non-finite gradient
            with self._lock:
                self._skipped_minibatches.add(minibatch)
                note_text = json.dumps(sorted(self._skipped_minibatches))
                self._require_queue().store_note(_SKIPPED_NOTE, note_text)
        credited = self._require_queue().applied(task_id, upto)
        if credited and "loss" in request.fields:
            loss, samples = request.number("loss", -math.inf), request.integer("samples")
            self._require_queue().record_loss(*minibatch, loss, samples)
        return Message({"credited": credited})

    def report_task_result(self, request: Message) -> Message:
        """Finish a task, marking it as failed if `err_message` is set; `credited` is false if the lease has expired."""
        error = request.text("err_message")
        return Message({"credited": self._require_queue().report(request.integer("task_id"), not error, error or None)})

    def extend_lease(self, request: Message) -> Message:
        """Extend the lease of a worker's task."""
        self._require_queue().heartbeat(request.text("worker"))
        return Message()

    def requeue_task_of(self, worker: str) -> None:
        """Requeue the task of a worker that was lost or has ended."""
        self._workers.discard(worker)
        if self._queue is not None:
            self._queue.lost(worker)

    def report_lost_worker(self, request: Message) -> Message:
        """Requeue the task of a worker that was lost or has ended."""
        self.requeue_task_of(request.text("worker"))
        return Message()

    def get_progress(self, request: Message) -> Message:
        """Return the number of unassigned tasks (1 before their creation), and the names in `workers`."""
        unassigned_tasks = self.task_counts_by_state()["todo"] if self.has_training_parameters else 1
        return Message({"todo": unassigned_tasks, "workers": self.workers})

    def verify_server_gradients(self, request: Message) -> Message:
        """Verify the gradients that a server has applied, as `verify_applied_gradients` does."""
        minibatches = AppliedMinibatches.parse(request.mapping("credits"))
        return Message({"text": self.verify_applied_gradients(request.number("samples"), minibatches)})

    def mean_training_loss(self, epoch: int) -> float | None:
        """Return the mean loss over an epoch's credited minibatches; None if unknown."""
        return None if self._queue is None else self._queue.mean_loss(epoch)

    @property
    def workers(self) -> list[str]:
        """Workers that have requested a task, and have not ended."""
        return sorted([*self._workers])

    @property
    def has_training_parameters(self) -> bool:
        """Whether a worker has reported its training parameters."""
        return self._queue is not None

    def read_matching_incarnations(self) -> list[str] | None:
        """Return the incarnations of the servers last recorded as matching the queue; None if there are none."""
        note = None if self._queue is None else self._queue.load_note(_INCARNATIONS_NOTE)
        return None if note is None else list(json.loads(note))

    def reset_tasks(self, minibatches: AppliedMinibatches, incarnations: Sequence[str]) -> None:
        """Reset the tasks to the records that new or restored servers have not applied; all leases end."""
        queue, size = self._require_queue(), self._parameters["batch_size"]
        per_task, records = queue.records_per_task, self._parameters["records"]
        ranges = []
        for minibatch in minibatches.to_list():
            start = minibatch.task * per_task + minibatch.index_in_task * size
            ranges.append((minibatch.epoch, start, min(start + size, (minibatch.task + 1) * per_task, records)))
        queue.restore(ranges, {_INCARNATIONS_NOTE: json.dumps(list(incarnations))})
        self.servers_match_queue = True

    def task_counts_by_state(self) -> dict[str, int]:
        """Return the number of tasks by state."""
        return self._require_queue().counts()

    def all_tasks_done(self) -> bool:
        """Whether all tasks are done."""
        if self._queue is None:
            return False
        counts = self._queue.counts()
        return not counts["todo"] and not counts["doing"]

    def close(self) -> None:
        """Close the queue."""
        if self._queue is not None:
            self._queue.close()

    def verify_applied_gradients(self, samples: float, minibatches: AppliedMinibatches) -> str:
        """Check and describe the applied gradients of a server, after all workers have ended.

        Parameters
        ----------
        samples : float
            Total samples of the applied gradients.
        minibatches : AppliedMinibatches
            Minibatches of the applied gradients.

        Raises
        ------
        ServiceError
            A minibatch was applied twice, or is missing although all tasks are done.
        """
        if self._queue is None:
            return "no records"
        records, size, epochs = (self._parameters[name] for name in ("records", "batch_size", "epochs"))
        per_task, applied = self._queue.records_per_task, minibatches.to_list()
        sample_counts = {
            MinibatchId(epoch, start // per_task, start % per_task // size): min(size, records - start)
            for epoch, start in product(range(epochs), range(0, records, size))
        }
        expected_samples = sum(sample_counts.get(minibatch, 0) for minibatch in applied)
        if samples != expected_samples:
            raise ServiceError(
                f"a server has applied {samples:g} records, but {expected_samples} were expected; start the job again"
            )
        counts = self._queue.counts()
        if counts["todo"] or counts["doing"]:
            return f"{expected_samples} of {records * epochs} records, each once"
        absent = sample_counts.keys() - set(applied)
        if absent - self._skipped_minibatches:
            num_missing = len(absent - self._skipped_minibatches)
            raise ServiceError(f"a server lacks {num_missing} of {len(sample_counts)} minibatches; start the job again")
        absent_text = counted(len(absent), "minibatch", "minibatches")
        suffix = f", but for {absent_text} whose gradients were not finite" if absent else ""
        return f"{counted(records, 'record')} in each of {counted(epochs, 'epoch')}, each once{suffix}"

    def _open_queue(self, parameters: Mapping[str, int]) -> None:
        self._parameters = {name: int(parameters[name]) for name in _TRAINING_PARAMETER_NAMES}
        per_task = parameters.get("records_per_task", self._parameters["batch_size"] * self._minibatches_per_task)
        path, values = self._path or ":memory:", self._parameters
        self._queue = TaskQueue(
            path, values["records"], per_task, values["epochs"], values["seed"], lease=self._lease, source=self._source
        )
        self._store_parameters()
        minibatches = json.loads(self._queue.load_note(_SKIPPED_NOTE) or "[]")
        self._skipped_minibatches = {MinibatchId.parse(minibatch) for minibatch in minibatches}

    def _store_parameters(self) -> None:
        queue = self._require_queue()
        values = {**self._parameters, "records_per_task": queue.records_per_task}
        queue.store_note(_PARAMETERS_NOTE, json.dumps(values))

    def _require_queue(self) -> TaskQueue:
        if self._queue is None:
            raise ConfigError("no worker has reported its training parameters; call report_training_params first")
        return self._queue
