"""Parameter server: holds values, applies gradients, and synchronises workers."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ServiceUnavailableError
from .checkpoint import load_state, make_state_writer, read_configuration
from .message import Message, MessageError, encode
from .progress import AppliedMinibatches, StalenessBound, learning_rate_factor
from .state import PushedGradient, ServerState, SyncPolicy
from .wire import Reply, Service, ServiceMethod

MAX_WAIT_SECONDS = 60.0
"""Seconds after which a waiting call returns; clients repeat it."""
MAX_HOLD_SECONDS = 120.0
"""Seconds after which gradients are accepted again if a checkpoint was abandoned."""
_CHECKPOINT_NAME_PATTERN = re.compile(r"\w[\w.-]{0,99}")


class ParameterServer(Service):
    """Parameter server of a job.

    It is empty until a worker pushes a model or a checkpoint is loaded.

    Parameters
    ----------
    checkpoints : Path, optional
        Folder of the checkpoints, shared by all servers. None: checkpoints are disabled.
    """

    name = "PServer"

    def __init__(self, checkpoints: Path | None = None) -> None:
        self._checkpoint_folder = checkpoints
        self._condition = threading.Condition()
        self._incarnation = ""
        self._state: ServerState | None = None
        self._sync_policy, self._staleness_bound = SyncPolicy(), StalenessBound(None)
        self._pending_gradients: list[PushedGradient] = []
        self._gradients_in_round = 0
        self._last_push_numbers: dict[str, int] = {}
        self._cached_values_reply: tuple[tuple[int, int], list[bytes]] | None = None
        self._hold_deadline, self._admitted_minibatches, self._running_saves = 0.0, AppliedMinibatches(), 0
        self._stale_gradient_count, self._departed_workers = 0, set[str]()

    def methods(self) -> Mapping[str, ServiceMethod]:
        """Return the methods by name."""
        return {
            "push_model": self.push_model,
            "pull_variable": self.pull_variable,
            "pull_embedding_vector": self.pull_embedding_vector,
            "push_gradient": self.push_gradient,
            "join": self.add_worker,
            "leave": self.remove_worker,
            "wait_for_staleness_bound": self.wait_for_staleness_bound,
            "finish_round": self.finish_round,
            "finish_epoch": self.finish_epoch,
            "credits": self.report_applied_minibatches,
            "hold": self.hold_gradients,
            "release": self.accept_gradients_again,
            "save_checkpoint": self.save_checkpoint,
            "load_checkpoint": self.load_checkpoint,
            "status": self.report_status,
        }

    def push_model(self, request: Message) -> Message:
        """Set the model of an empty server; a request without values only asks whether there is a model.

        Raises
        ------
        ConfigError
            The server has another model, or cannot apply the optimiser.
        """
        new_model = None
        if self._state is None and request.flag("values"):  # without the lock: may import PyTorch
            new_model = _parse_server_configuration(request)
            new_model[0].start(request)
        with self._condition:
            accepted = new_model is not None and self._state is None
            if new_model is not None and accepted:
                self._install_model(*new_model)
            elif self._state is not None:
                self._require_same_configuration(request)
            return Message({"initialized": self._state is not None, "taken": accepted})

    def pull_variable(self, request: Message) -> Reply:
        """Wait for a version, then return all dense values and changed rows if they are newer than the caller's.

        With `slots`, return them unconditionally, together with the optimiser's state.
        """
        version, min_version = request.integer("version"), request.integer("at_least")
        incarnation = request.text("incarnation")
        with self._condition:
            state = self._require_state()
            self._wait_until(request, lambda: self._incarnation != incarnation or state.version >= min_version)
            state = self._require_state()
            fields = {"version": state.version, "incarnation": self._incarnation}
            if request.flag("slots"):
                return list(encode(Message(fields, state.dense_parameters.message_arrays(with_slots=True))))
            if incarnation == self._incarnation and version >= state.version:
                return Message(fields)
            held_version = (
                version if incarnation == self._incarnation and state.dense_parameters.has_sparse_rows else -1
            )
            versions = held_version, state.version
            if self._cached_values_reply is None or self._cached_values_reply[0] != versions:
                chunks = list(encode(Message(fields, state.dense_parameters.message_arrays(held_version))))
                self._cached_values_reply = versions, chunks
            return self._cached_values_reply[1]

    def pull_embedding_vector(self, request: Message) -> Message:
        """Return rows of a table by ids, created at their first use."""
        ids = request.array("ids", "int64", [None])
        with self._condition:
            state = self._require_state()
            rows = state.find_table(request.text("name")).get_or_create_rows(ids)
            return Message({"version": state.version}, {"rows": rows})

    def push_gradient(self, request: Message) -> Message:
        """Apply a gradient, or keep it for its round; reject it if it is too old or already applied.

        The reply's `outcome` is 'applied', 'stale' or 'duplicate'; `version` is the first that contains the gradient.
        """
        with self._condition:
            state = self._require_state()
        gradient, incarnation = state.read_gradient(request), request.text("incarnation")
        with self._condition:
            self._condition.wait_for(lambda: self._may_apply(gradient), MAX_HOLD_SECONDS)
            state = self._require_state()
            if incarnation != self._incarnation:
                return self._reject_gradient("stale")
            self._staleness_bound.add_worker(gradient.worker)
            if gradient.push_number <= self._last_push_numbers.get(gradient.client_id, -1):  # repeated
                return self._reject_gradient("duplicate")
            if self._has_gradient_of_minibatch(gradient):
                self._count_gradient_in_round()  # otherwise the rounds of two servers could deadlock
                return self._reject_gradient("duplicate")
            staleness = max(0, state.version - gradient.values_version)
            if self._sync_policy.sync and staleness > self._sync_policy.version_tolerance:
                return self._reject_gradient("stale")
            self._last_push_numbers[gradient.client_id] = gradient.push_number
            self._staleness_bound.finish_step(gradient.worker)
            factor = 1.0
            if self._sync_policy.sync:
                self._pending_gradients.append(gradient)
                target_version = state.version + 1
                self._count_gradient_in_round()
            else:
                factor = learning_rate_factor(staleness, self._sync_policy.modulate)
                state.apply_gradients([gradient], factor)
                target_version = state.version
            self._condition.notify_all()
            return Message({"outcome": "applied", "version": target_version, "staleness": staleness, "factor": factor})

    def add_worker(self, request: Message) -> Message:
        """Add a worker."""
        with self._condition:
            self._staleness_bound.add_worker(request.text("worker"))
            self._departed_workers.discard(request.text("worker"))
            return Message()

    def remove_worker(self, request: Message) -> Message:
        """Remove a worker that has ended or is lost."""
        with self._condition:
            self._staleness_bound.remove_worker(request.text("worker"))
            self._departed_workers.add(request.text("worker"))
            if self._state is not None:
                self._end_round(must_be_complete=True)
            self._condition.notify_all()
            return Message()

    def wait_for_staleness_bound(self, request: Message) -> Message:
        """Wait until the staleness bound permits a worker to continue."""
        worker = request.text("worker")
        with self._condition:
            return Message({"ready": self._wait_until(request, lambda: self._staleness_bound.may_continue(worker))})

    def finish_round(self, request: Message) -> Message:
        """Apply the gradients of an incomplete round, such as at the end of an epoch."""
        with self._condition:
            self._require_state()
            self._end_round(must_be_complete=False)
            self._condition.notify_all()
            return Message()

    def finish_epoch(self, request: Message) -> Message:
        """Drop the listed minibatches up to a completed epoch, all of which then count as applied."""
        with self._condition:
            self._require_state().applied_minibatches.drop_through_epoch(request.integer("epoch"))
            return Message()

    def report_applied_minibatches(self, request: Message) -> Message:
        """Return the minibatches of the applied gradients."""
        with self._condition:
            return Message({"credits": self._require_state().applied_minibatches.to_json()})

    def hold_gradients(self, request: Message) -> Message:
        """Hold back all gradients except those of admitted minibatches; return the applied minibatches."""
        admitted = AppliedMinibatches.parse(request.mapping("admitted"))
        with self._condition:
            state = self._require_state()
            self._hold_deadline, self._admitted_minibatches = time.monotonic() + MAX_HOLD_SECONDS, admitted
            self._condition.notify_all()
            return Message({"credits": state.applied_minibatches.to_json(), "version": state.version})

    def accept_gradients_again(self, request: Message) -> Message:
        """Accept gradients again."""
        with self._condition:
            self._hold_deadline = 0.0
            self._condition.notify_all()
            return Message()

    def save_checkpoint(self, request: Message) -> Message:
        """Write the state of this server to the folder of a checkpoint; gradients must be held back."""
        folder = self._folder_of_checkpoint(request)
        with self._condition:
            state = self._require_state()
            if time.monotonic() > self._hold_deadline:
                raise ConfigError("save_checkpoint: gradients are not held back; send a 'hold' request first")
            write_file = make_state_writer(state, self._sync_policy, folder, request.text("save"))
            self._running_saves += 1
        try:
            write_file()
        finally:
            with self._condition:
                self._running_saves -= 1
        return Message({"version": state.version})

    def load_checkpoint(self, request: Message) -> Message:
        """Load this server's parts of a checkpoint of any number of servers.

        A request without a layout keeps the configuration of this server or, if there is none, takes the configuration
        of server `index` of `servers` from the checkpoint.
        """
        folder, configuration = self._folder_of_checkpoint(request), request
        with self._condition:
            old_state, policy = self._state, self._sync_policy
        if "layout" not in request.fields and old_state is not None:
            layout: Any = old_state.layout.to_json()
            configuration = Message({"layout": layout, "optimizer": old_state.optimizer, "policy": policy.to_json()})
        elif "layout" not in request.fields:
            configuration = read_configuration(folder, request.integer("index"), request.integer("servers", 1))
        state, policy = _parse_server_configuration(configuration)
        load_state(state, folder)
        with self._condition:
            workers = list(self._staleness_bound.steps_by_worker)
            self._install_model(state, policy)
            for worker in workers:
                self._staleness_bound.add_worker(worker)
            self._condition.notify_all()
            fields = {"version": state.version, "incarnation": self._incarnation}
            return Message({**fields, "credits": state.applied_minibatches.to_json()})

    def report_status(self, request: Message) -> Message:
        """Return the status, such as the version, samples, rows in use, rejected gradients, and steps by worker."""
        with self._condition:
            state = self._state
            rows = {} if state is None else {name: table.row_count for name, table in state.tables.items()}
            fields = {
                "initialized": state is not None,
                "incarnation": self._incarnation,
                "version": 0 if state is None else state.version,
                "samples": 0.0 if state is None else state.samples,
                "bytes": 0 if state is None else state.dense_parameters.nbytes,
                "rows": rows,
                "rejected": self._stale_gradient_count,
                "pending": len(self._pending_gradients),
                "left": len(self._departed_workers),
                "workers": dict(self._staleness_bound.steps_by_worker),
            }
            return Message(fields)

    def _install_model(self, state: ServerState, policy: SyncPolicy) -> None:
        self._state, self._sync_policy = state, policy
        self._staleness_bound = StalenessBound(None if policy.sync else policy.staleness)
        self._incarnation = secrets.token_hex(8)
        self._pending_gradients = []
        self._gradients_in_round = 0
        self._last_push_numbers = {}
        self._cached_values_reply = None
        self._hold_deadline = 0.0

    def _require_state(self) -> ServerState:
        if self._state is None:
            raise ServiceUnavailableError("the server has no model yet; push one, or load a checkpoint")
        return self._state

    def _require_same_configuration(self, request: Message) -> None:
        state = self._require_state()
        expected = state.layout.to_json(), state.optimizer, self._sync_policy.to_json()
        for part, value in zip(("layout", "optimizer", "policy"), expected, strict=True):
            if request.mapping(part) != value:
                raise ConfigError(
                    f"the server has a model with a different {part}; start separate servers for each job"
                )

    def _has_gradient_of_minibatch(self, gradient: PushedGradient) -> bool:
        minibatch = gradient.minibatch
        return minibatch is not None and (
            minibatch in self._require_state().applied_minibatches
            or any(pending.minibatch == minibatch for pending in self._pending_gradients)
        )

    def _reject_gradient(self, outcome: str) -> Message:
        self._stale_gradient_count += outcome == "stale"
        version = self._require_state().version + bool(outcome == "duplicate" and self._pending_gradients)
        return Message({"outcome": outcome, "version": version, "staleness": 0, "factor": 0.0})

    def _may_apply(self, gradient: PushedGradient) -> bool:
        if time.monotonic() > self._hold_deadline:
            return not self._running_saves
        minibatch = gradient.minibatch
        return not self._running_saves and minibatch is not None and minibatch in self._admitted_minibatches

    def _count_gradient_in_round(self) -> None:
        """Count a gradient in the round, and end the round once there are enough gradients."""
        if self._sync_policy.sync:
            self._gradients_in_round += 1
            self._end_round(must_be_complete=True)
            self._condition.notify_all()

    def _end_round(self, must_be_complete: bool) -> None:
        """Apply the gradients of the round if there are enough or, unless `must_be_complete`, if there are any."""
        workers = len(self._staleness_bound.steps_by_worker)
        needed_gradients = min(self._sync_policy.grads_to_wait, workers) if workers else self._sync_policy.grads_to_wait
        if self._pending_gradients and (not must_be_complete or self._gradients_in_round >= needed_gradients):
            gradients, self._pending_gradients = self._pending_gradients, []
            self._gradients_in_round = 0
            self._require_state().apply_gradients(gradients)

    def _wait_until(self, request: Message, condition: Callable[[], bool]) -> bool:
        return self._condition.wait_for(condition, min(request.number("seconds"), MAX_WAIT_SECONDS))

    def _folder_of_checkpoint(self, request: Message) -> Path:
        name = request.text("name")
        if self._checkpoint_folder is None:
            raise ConfigError("the server has no checkpoint folder; start it with one (--checkpoint-dir)")
        if not _CHECKPOINT_NAME_PATTERN.fullmatch(name):
            raise MessageError("field 'name': expected letters, digits, '.', '-' and '_'")
        return self._checkpoint_folder / name


def _parse_server_configuration(request: Message) -> tuple[ServerState, SyncPolicy]:
    state = ServerState(request.mapping("layout"), request.mapping("optimizer"))
    return state, SyncPolicy.parse(request.mapping("policy"))
