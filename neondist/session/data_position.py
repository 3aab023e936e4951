"""Batches of a data set from the position of a checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np

from ..data import Dataset
from ..errors import ConfigError
from ..models import TrainableModel
from ..train.loop import close_epoch, losses_so_far, set_schedule
from ..train.state import Record
from .state import SessionState


class DataPosition:
    """Position of a session in a data set, advanced after each step.

    Parameters
    ----------
    state : SessionState
    dataset : Dataset
        Opened on the model's grid.
    batch_size : int
        Samples of a batch, over all replicas.
    seed : int
        Seed of the order of samples.
    """

    def __init__(self, state: SessionState, dataset: Dataset, batch_size: int, seed: int) -> None:
        self.state, self.dataset, self.batch_size, self.seed = state, dataset, batch_size, seed
        #: number of samples, over all replicas, of the current batch, and of those not yet counted by a step
        self.size = self.pending = 0
        replicas = state.grid.replicas
        #: whether each replica reads a shard of its own
        self.own_shards = replicas > 1 and dataset.num_shards == replicas
        if self.own_shards and batch_size % replicas:
            raise ConfigError(
                f"batch_size: {batch_size}, but {replicas} replicas read shards of the data; give a multiple"
            )
        samples = dataset.least_shard * replicas if self.own_shards else len(dataset.train)
        state.use_data(dataset, samples)
        state.batch_size = batch_size

    def parts(self) -> list[tuple[int, np.ndarray]]:
        """Return, for each remaining batch of the epoch, its size over all replicas and this rank's sample numbers."""
        state, grid = self.state, self.state.grid
        numbers = self.dataset.train.order(self.seed, state.epoch)
        starts = range(state.samples_seen, state.samples, self.batch_size)
        sizes = [min(self.batch_size, state.samples - start) for start in starts]
        if self.own_shards:
            of = grid.replicas
            return [(n, numbers[start // of : (start + n) // of]) for start, n in zip(starts, sizes, strict=True)]
        batches = [numbers[start : start + n] for start, n in zip(starts, sizes, strict=True)]
        return [(len(batch), batch[slice(*grid.sample_range(len(batch)))]) for batch in batches]

    def batches(self) -> Generator[tuple[Any, Any]]:
        """Yield this rank's images and targets until the end of the epoch."""
        state, split = self.state, self.dataset.train
        split.epoch = state.epoch
        model = state.model if isinstance(state.model, TrainableModel) else None
        if model is not None:
            model.begin_epoch(state.epoch, state.samples_seen)
        losses = [] if model is None else losses_so_far(state)
        parts = self.parts()
        lazily = model is not None and model.streams
        with closing(split.batches((part for _, part in parts), state.model.dtype, lazily)) as read:
            for (size, _), (x, targets) in zip(parts, read, strict=True):
                if model is not None and model.optimizer.schedule is not None:
                    set_schedule(state, losses)
                self.size = self.pending = size
                yield x, targets
                if state.stop is not None:
                    return

    def take(self) -> int:
        """Advance past the current batch; return its number of samples, 0 if it is already counted."""
        size, self.pending = self.pending, 0
        self.state.samples_seen += size
        return size

    def ends(self) -> bool:
        """Whether all samples of the epoch have been used."""
        return self.state.samples_seen >= self.state.samples

    def close_epoch(self) -> None:
        """Complete the epoch; collective."""
        close_epoch(self.state, Record())
