"""A script's own training steps, as hooks and checkpoints see a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..halo import ExchangePolicy, GlobalArray
from ..parallel import ControlFlags, ParameterShard, SyncState


class FlagSync:
    """The control flags of steps in which no gradients are summed."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid, self.flags = grid, ControlFlags()

    def publish_flags(self) -> None:
        """Add up the flags of all ranks; collective."""
        self.flags.reduced[:] = self.flags.mine
        self.grid.world.allreduce(self.flags.reduced)


class ScriptModel:
    """Adapter of a script's own training steps to `TrainState`; here without any arrays.

    Attributes
    ----------
    seed : int or None
        Of the order of samples; None until a checkpoint or the script gives one.
    step : int
        Steps of the session, which has counted them.
    uncounted, num_initial_epochs : int
        As of `Trainable`.
    loss_scaler : None
        A script scales its loss itself, if it does.
    """

    num_initial_epochs = 0
    exchanged: Mapping[str, Sequence[GlobalArray]] = {}
    schemes: Mapping[str, ExchangePolicy] = {}
    bytes_sent = bytes_summed = 0
    dtype = np.dtype("float32")
    loss_scaler = None

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self.seed: int | None = None
        self.step = self.uncounted = 0
        self.sync: Any = FlagSync(grid)

    @property
    def whole(self) -> ScriptModel:
        """The model itself."""
        return self

    @property
    def sync_states(self) -> Sequence[SyncState]:
        """State of gradient synchronisation that is kept from step to step."""
        return ()

    def check_trains(self) -> None:
        """Raise ConfigError if something is missing that a checkpoint of the training has to hold."""

    def count(self) -> None:
        """Count a step, and hear the flags of all ranks; collective."""
        self.sync.publish_flags()
        self.step += 1

    def kept_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of all that a checkpoint holds, by group, as `Trainable.kept_arrays`."""
        return {"model": [], "optimizer": []}

    def settings(self) -> dict[str, Any]:
        """Return what a step depends on beside arrays, for JSON; collective."""
        return {}

    def take_settings(self, settings: Mapping[str, Any]) -> None:
        """Go on with what `settings` returned, perhaps on another number of ranks; ValueError if it does not fit."""
