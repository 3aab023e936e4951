"""Batches of a data set, starting at the position of a checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np

from ..data import Dataset
from ..errors import ConfigError
from ..models import TrainableModel
from ..terminal.console import counted, say
from ..train.loop import selection_losses, set_scheduled_rate_and_momentum
from .state import SessionState


class DataPosition:
    """Position of a session in a data set, advanced after each step.

    Parameters
    ----------
    dataset : Dataset
        Opened on the model's grid.
    batch_size : int
        Number of samples in a batch, over all replicas.
    seed : int
        Seed of the order of samples.
    """

    def __init__(self, state: SessionState, dataset: Dataset, batch_size: int, seed: int) -> None:
        self.state, self.dataset, self.batch_size, self.seed = state, dataset, batch_size, seed
        #: number of samples, over all replicas, in the current batch, and how many of these no step has counted yet
        self.current_batch_size = self.uncounted_samples = 0
        replicas = state.grid.replicas
        #: whether each replica reads a shard of its own
        self.reads_own_shard = replicas > 1 and {*dataset.shard_of_replica} == {(replicas, i) for i in range(replicas)}
        if len({*dataset.shard_of_replica}) > 1 and not self.reads_own_shard:
            raise ConfigError(
                f"shard: the {replicas} replicas have shards {[*dataset.shard_of_replica]}, and an epoch would omit or"
                " repeat samples; give each its own, shard(grid.replicas, grid.replica), or all of them the same"
            )
        if self.reads_own_shard and batch_size % replicas:
            raise ConfigError(
                f"batch_size: {batch_size}, but {replicas} replicas read shards; give a multiple of {replicas}"
            )
        epoch_size = dataset.smallest_shard_size * replicas if self.reads_own_shard else len(dataset.train)
        state.set_dataset(dataset, epoch_size)
        num_shards = replicas if self.reads_own_shard else 1
        if state.samples_seen and state.num_shards != num_shards and state.is_first_rank:
            say(
                f"warning: epoch {state.epoch + 1} began with {counted(state.num_shards, 'shard')} and continues with"
                f" {num_shards}: some of its samples are repeated or omitted; without dataset.shard, none are"
            )
        state.num_shards = num_shards
        state.batch_size = batch_size

    def remaining_batches(self) -> list[tuple[int, np.ndarray]]:
        """Return, for each remaining batch of the epoch, its size over all replicas and this rank's sample indices."""
        state, grid = self.state, self.state.grid
        order = self.dataset.train.order(self.seed, state.epoch)
        starts = range(state.samples_seen, state.epoch_size, self.batch_size)
        sizes = [min(self.batch_size, state.epoch_size - start) for start in starts]
        if self.reads_own_shard:
            shards = grid.replicas
            return [(n, order[start // shards : (start + n) // shards]) for start, n in zip(starts, sizes, strict=True)]
        batches = [order[start : start + n] for start, n in zip(starts, sizes, strict=True)]
        return [(len(batch), batch[slice(*grid.sample_range(len(batch)))]) for batch in batches]

    def batches(self) -> Generator[tuple[Any, Any]]:
        """Yield this rank's images and targets until the end of the epoch, or until the session stops."""
        state, split = self.state, self.dataset.train
        split.epoch = state.epoch
        model = state.model if isinstance(state.model, TrainableModel) else None
        if model is not None:
            model.begin_epoch(state.epoch, state.samples_seen)
        losses = [] if model is None else selection_losses(state)
        remaining = self.remaining_batches()
        is_lazy = model is not None and model.is_streamed
        with closing(split.batches((indices for _, indices in remaining), state.model.dtype, is_lazy)) as reader:
            for (size, _), (x, targets) in zip(remaining, reader, strict=True):
                if model is not None and model.optimizer.schedule is not None:
                    set_scheduled_rate_and_momentum(state, state.epoch + state.samples_seen / state.epoch_size, losses)
                self.current_batch_size = self.uncounted_samples = size
                yield x, targets
                if state.stop is not None:
                    return

    def advance_past_batch(self) -> int:
        """Advance past the current batch; return its number of samples, or 0 if already counted."""
        size, self.uncounted_samples = self.uncounted_samples, 0
        self.state.samples_seen += size
        return size
