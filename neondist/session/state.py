"""The state of a session: what hooks look at, and what its checkpoints hold beside arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..comm import ProcessGrid
from ..data import Dataset, Split
from ..errors import ConfigError, NotReadyError
from ..io.checkpoint import from_plain, to_plain
from ..io.checkpoint.texts import of_kind, plain_json
from ..models import ScriptModel, TrainableModel
from ..train import Stop, TrainState

TEXT = "session"
"""The name in the file."""


class _NoData(Dataset):
    """The data set of a session until it has one."""

    def __getattr__(self, name: str) -> Any:
        raise _no_data(name)

    def check(self) -> None:
        """Raise NotReadyError."""
        raise _no_data("check")

    def load(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Raise NotReadyError."""
        raise _no_data("load")


def _no_data(name: str) -> NotReadyError:
    return NotReadyError(
        f"the session has no data set, and so no '{name}': read batches from session.batches(dataset, batch_size), or"
        " leave out the hook that asks for it"
    )


class SessionState(TrainState):
    """The state of a session; its `model` may be a ScriptModel.

    Attributes
    ----------
    stateful : list
        Further objects that checkpoints hold, by `state_dict` and `load_state_dict`, such as schedulers.
    requested : str
        Why this rank has asked to stop since the last step; '' if it has not.
    """

    model: Any

    def __init__(self, model: Any, stateful: Iterable[Any] = ()) -> None:
        super().__init__(model, _NoData(), sys.maxsize, getattr(model, "batch_size", model.grid.replicas))
        self.stateful, self.requested = list(stateful), ""
        self._samples = 0

    @property
    def has_data(self) -> bool:
        """Whether the session reads a data set."""
        return not isinstance(self.dataset, _NoData)

    @property
    def samples(self) -> int:
        """Samples of an epoch; without a data set those of the checkpoint that is continued, or 0."""
        return self._samples

    def use_data(self, dataset: Dataset, samples: int) -> None:
        """Read a data set of which an epoch has so many samples; DataError if it cannot go on in the epoch's middle."""
        if self.samples_seen and self._samples != samples:
            before, self._samples = self._samples, samples
            super().check_samples(before)
        self.dataset, self._samples = dataset, samples

    def check_samples(self, samples: int) -> None:
        """Take note of an epoch's samples until there is a data set; then DataError if it has others."""
        if self.has_data:
            super().check_samples(samples)
        self._samples = samples

    def request_stop(self, reason: str) -> None:
        """Ask, on this rank or on several, that the session ends on all ranks after the step under way."""
        self.requested = self.requested or reason

    def read_requests(self) -> None:
        """Leave it to `agree`."""

    def agree(self) -> None:
        """Stop on all ranks, if one of them, or a hook of one, asks for it; collective."""
        mine = Stop(self.requested, code=0) if self.requested and self.stop is None else self.stop
        alike = self.grid.check("DistributedSession.run", {"step": self.step}, versions=(int(mine is not None),))
        if mine is not None or not alike:
            asked = [(stop.reason, stop.code) for stop in self.grid.world.allgather(mine) if stop is not None]
            self.stop = Stop(*asked[0])
        self.requested = ""

    def texts(self) -> dict[str, str]:
        """Return settings of the model and the states of further objects; collective."""
        if isinstance(self.model, ScriptModel):
            settings = self.model.settings()
        else:
            settings = {"learning_rate_scale": self.model.learning_rate_scale, "momentum": self.model.momentum}
        states = [to_plain(f"{type(one).__name__}.state_dict()", one.state_dict()) for one in self.stateful]
        kinds = [type(one).__name__ for one in self.stateful]
        found = {TEXT: json.dumps({"settings": settings, "states": states, "kinds": kinds})}
        return found | (super().texts() if self.has_data else {})

    def take_texts(self, texts: Mapping[str, str]) -> None:
        """Go on with what `texts` returned; a checkpoint of an experiment has none of it."""
        if TEXT not in texts:
            return
        found = plain_json(texts[TEXT], dict)
        settings = of_kind("'settings'", found.get("settings"), dict)
        states, kinds = (of_kind(f"'{name}'", found.get(name), list) for name in ("states", "kinds"))
        here = [type(one).__name__ for one in self.stateful]
        if kinds != here or len(states) != len(kinds):
            raise ValueError(f"has states of {kinds or 'no objects'}, the session's model has {here or 'no such'}")
        if isinstance(self.model, ScriptModel):
            self.model.take_settings(settings)
        else:
            self.model.learning_rate_scale = _number(settings.get("learning_rate_scale", 1.0)) or 0.0
            self.model.momentum = _number(settings.get("momentum"))
        for one, state in zip(self.stateful, states, strict=True):
            one.load_state_dict(
                from_plain(one.state_dict(), of_kind(f"the state of {type(one).__name__}", state, dict))
            )


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise ValueError("a setting is not a number")
    return value


def state_of(given: Any, grid: ProcessGrid | None = None) -> SessionState:
    """Return the state of a session that trains what `given` is.

    Parameters
    ----------
    given : model, script, distributed module or its optimiser, None, or a sequence
        In a sequence further objects with `state_dict` and `load_state_dict` stand beside the model.
    grid : ProcessGrid, optional
        Of a session without a model; default: this process alone.

    Raises
    ------
    ConfigError
        There are several models, or one that is not distributed or not built.
    """
    parts = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    models: list[Any] = [part for part in parts if isinstance(part, TrainableModel | ScriptModel)]
    rest = [part for part in parts if not isinstance(part, TrainableModel | ScriptModel)]
    for part in parts:
        if isinstance(part, TrainableModel):
            _ = part.built
    if rest and "torch" in sys.modules:
        with suppress(ImportError):
            from ..torch.script import ModuleScript

            script, rest = ModuleScript.of(rest)
            models += [] if script is None else [script]
    for part in rest:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                "model: expected a neondist model, a distributed module, or objects with state_dict and"
                f" load_state_dict, got {type(part).__name__}"
            )
    if len(models) > 1:
        raise ConfigError("model: a session trains one model; make one of several, or one session for each")
    return SessionState(models[0] if models else ScriptModel(grid or ProcessGrid.serial()), rest)
