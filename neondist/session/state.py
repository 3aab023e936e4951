"""State of a session, for hooks and for the non-array content of its checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..comm import ProcessGrid, raise_if_any_failed
from ..data import Dataset, Split
from ..errors import ConfigError, DataError, NonFiniteError, NotReadyError
from ..io.checkpoint import from_json_value, to_json_value
from ..io.checkpoint.texts import parse_json, require_json_integer, require_json_type, suggest_another_checkpoint
from ..models import TrainableModel, TrainingScriptAdapter
from ..train import Stop, TrainState

SESSION_ENTRY_NAME = "session"
"""Name of the session's entry in checkpoint files."""


class _MissingDataset(Dataset):
    """Placeholder for the data set of a session that has none."""

    def __getattr__(self, name: str) -> Any:
        raise _missing_data_error(name)

    def check(self) -> None:
        raise _missing_data_error("check")

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split]:
        raise _missing_data_error("open_splits")


def _missing_data_error(name: str) -> NotReadyError:
    return NotReadyError(
        f"the session has no data set, and so no '{name}': read batches from session.batches(dataset, batch_size), or"
        " remove the hook that needs it"
    )


class SessionState(TrainState):
    """The state of a session; its `model` may be a TrainingScriptAdapter.

    Attributes
    ----------
    stateful : list
        Further objects stored in checkpoints by `state_dict` and `load_state_dict`, such as schedulers.
    stop_reason : str
        Reason for the stop that this rank has requested since the last step; '' if none.
    """

    model: Any

    def __init__(self, model: Any, stateful: Iterable[Any] = ()) -> None:
        super().__init__(model, _MissingDataset(), sys.maxsize, getattr(model, "batch_size", model.grid.replicas))
        self.stateful, self.stop_reason = list(stateful), ""
        #: number of shards, one per replica, into which the current epoch is divided
        self.num_shards, self._epoch_size = 1, 0

    @property
    def has_dataset(self) -> bool:
        """Whether the session reads a data set."""
        return not isinstance(self.dataset, _MissingDataset)

    @property
    def epoch_size(self) -> int:
        """Number of samples of an epoch; without a data set, the number in the restored checkpoint, or 0."""
        return self._epoch_size

    def set_dataset(self, dataset: Dataset, epoch_size: int) -> None:
        """Set the data set and its number of samples; DataError if the epoch cannot be resumed with this number."""
        if self.samples_seen and self._epoch_size != epoch_size:
            previous_size, self._epoch_size = self._epoch_size, epoch_size
            super().require_epoch_size(previous_size)
        self.dataset, self._epoch_size = dataset, epoch_size

    def require_epoch_size(self, samples: int) -> None:
        """Record the number of samples of an epoch; DataError if the data set, if any, has a different number."""
        if self.has_dataset:
            super().require_epoch_size(samples)
        self._epoch_size = samples

    def request_stop(self, reason: str) -> None:
        """Request a stop of all ranks after the current or next step; a session of one rank stops at once."""
        self.stop_reason = self.stop_reason or reason
        if self.grid.size == 1:
            self.share_stop_requests()

    def receive_stop_requests(self) -> None:
        """Do nothing: `share_stop_requests` shares the requests."""

    def share_stop_requests(self, error: Exception | None = None) -> None:
        """Stop on all ranks if a rank or its hooks have requested it; raise if a rank has an error. Collective."""
        stop = Stop(self.stop_reason, exit_code=0) if self.stop_reason and self.stop is None else self.stop
        consistent = self.grid.check("DistributedSession.run", {"step": self.step}, error, (int(stop is not None),))
        if stop is not None or not consistent:
            requests = [(stop.reason, stop.exit_code) for stop in self.grid.world.allgather(stop) if stop is not None]
            self.stop = Stop(*requests[0])
        self.stop_reason = ""

    def find_nonfinite_parameter(self) -> NonFiniteError | None:
        """Return the error of a script whose step has left a non-finite parameter; models check their own steps."""
        try:
            if isinstance(self.model, TrainingScriptAdapter):
                self.model.check_finite()
        except NonFiniteError as error:
            return error
        return None

    def checkpoint_texts(self) -> dict[str, str]:
        """Return the model's settings and the states of further objects as texts. Collective.

        Raises
        ------
        NonFiniteError
            On every rank, if a parameter is not finite, so that no checkpoint is replaced.
        """
        raise_if_any_failed(self.grid.world, self.find_nonfinite_parameter())
        if isinstance(self.model, TrainingScriptAdapter):
            settings = self.model.settings()
        else:
            settings = {"learning_rate_scale": self.model.learning_rate_scale}
            settings["momentum"] = self.model.scheduled_momentum
        kinds, remedy = [type(part).__name__ for part in self.stateful], "remove this object from the `model` argument"
        states = [
            to_json_value(f"{type(part).__name__}.state_dict()", part.state_dict(), remedy) for part in self.stateful
        ]
        entry = {"settings": settings, "states": states, "kinds": kinds, "shards": self.num_shards}
        texts = {SESSION_ENTRY_NAME: json.dumps(entry)}
        return texts | (super().checkpoint_texts() if self.has_dataset else {})

    def restore_checkpoint_texts(self, texts: Mapping[str, str]) -> None:
        """Restore the result of `checkpoint_texts`, if present; checkpoints of experiments have none."""
        if SESSION_ENTRY_NAME in texts:
            with suggest_another_checkpoint():
                self._restore_session_entry(parse_json(texts[SESSION_ENTRY_NAME], dict))

    def _restore_session_entry(self, content: dict[str, Any]) -> None:
        settings = require_json_type("'settings'", content.get("settings"), dict)
        states, kinds = (require_json_type(f"'{name}'", content.get(name), list) for name in ("states", "kinds"))
        self.num_shards = require_json_integer("'shards'", content.get("shards", 1), 1)
        expected_names = [type(part).__name__ for part in self.stateful]
        if kinds != expected_names or len(states) != len(kinds):
            raise DataError(
                f"has states of {kinds or 'no objects'}, but the session has {expected_names or 'none'}; pass the same"
                " objects to the session as when the checkpoint was saved"
            )
        if isinstance(self.model, TrainingScriptAdapter):
            self.model.restore_settings(settings)
        else:
            self.model.learning_rate_scale = _require_number(settings, "learning_rate_scale", 1.0) or 0.0
            self.model.scheduled_momentum = _require_number(settings, "momentum")
        for part, state in zip(self.stateful, states, strict=True):
            part.load_state_dict(
                from_json_value(
                    part.state_dict(), require_json_type(f"the state of {type(part).__name__}", state, dict)
                )
            )


def _require_number(settings: dict[str, Any], name: str, default: float | None = None) -> float | None:
    value = settings.get(name, default)
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"'{name}' is not a number")
    return value


def create_session_state(model: Any) -> SessionState:
    """Return the state of a session that trains `model`.

    Parameters
    ----------
    model : model, script, distributed module or its optimiser, None, or a sequence
        A sequence may contain further objects with `state_dict` and `load_state_dict`.

    Raises
    ------
    ConfigError
        If there are several models, a model is not distributed or not built, or an object has no `state_dict`.
    """
    objects = list(model) if isinstance(model, (list, tuple)) else [] if model is None else [model]
    models: list[Any] = [item for item in objects if isinstance(item, TrainableModel | TrainingScriptAdapter)]
    other_objects = [item for item in objects if not isinstance(item, TrainableModel | TrainingScriptAdapter)]
    for item in objects:
        if isinstance(item, TrainableModel):
            _ = item.built_parameters
    if other_objects and "torch" in sys.modules:
        with suppress(ImportError):
            from ..torch.training.script import ModuleScriptAdapter

            script, other_objects = ModuleScriptAdapter.from_objects(other_objects)
            models += [] if script is None else [script]
    for item in other_objects:
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise ConfigError(
                "model: expected a neondist model, a distributed module, or objects with state_dict and"
                f" load_state_dict, got {type(item).__name__}"
            )
    if len(models) > 1:
        raise ConfigError("model: a session trains one model; combine them into one, or use one session for each")
    return SessionState(models[0] if models else TrainingScriptAdapter(ProcessGrid.serial()), other_objects)
