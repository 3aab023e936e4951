"""Model interface of a script's own training steps, for hooks and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..halo import ExchangePolicy, GlobalArray
from ..parallel import FLAG_HEADER_LENGTH, AllReduce, GradientSync, ParameterShard, SyncState


class TrainingScriptAdapter:
    """Adapter of a script's own training steps to `TrainState`; this base class has no arrays.

    Attributes
    ----------
    seed : int or None
        Seed of the order of samples; None until set by a checkpoint or the script.
    step : int
        Steps counted by the session.
    steps_without_optimizer, num_initial_epochs : int
        As in `Trainable`.
    loss_scaler, remote_update : None
        None: the script itself scales its loss and updates its parameters.
    """

    num_initial_epochs = 0
    exchanged_arrays: Mapping[str, Sequence[GlobalArray]] = {}
    schemes: Mapping[str, ExchangePolicy] = {}
    bytes_sent = bytes_summed = 0
    dtype = np.dtype("float32")
    loss_scaler = remote_update = None

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self.seed: int | None = None
        self.step = self.steps_without_optimizer = 0
        self.sync: GradientSync = AllReduce(grid, np.zeros(FLAG_HEADER_LENGTH), [], 0, 0)  # sums only flags

    @property
    def whole_model(self) -> TrainingScriptAdapter:
        """The model itself."""
        return self

    @property
    def sync_states(self) -> Sequence[SyncState]:
        """State of gradient synchronisation that is kept from step to step."""
        return ()

    def check_checkpointable(self) -> None:
        """Raise ConfigError if the state for a checkpoint is incomplete."""

    def check_finite(self) -> None:
        """Raise NonFiniteError if a parameter on this rank is not finite."""

    def count_step_and_sum_flags(self) -> None:
        """Count a step, and sum the flags of all ranks. Collective."""
        self.sync.publish_flags()
        self.sync.flags.num_ranks_by_flag[:] = self.sync.flag_header
        self.step += 1

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of the contents of a checkpoint, by group, as in `Trainable.checkpoint_arrays`."""
        return {"model": [], "optimizer": []}

    def settings(self) -> dict[str, Any]:
        """Return the state of a step other than arrays, for JSON. Collective."""
        return {}

    def restore_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore the result of `settings`, possibly of another number of ranks; raise ValueError if it is invalid."""
