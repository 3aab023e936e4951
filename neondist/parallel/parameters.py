"""The trained arrays of a model in flat buffers: one update and one allreduce for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import namespace, to_host
from ..comm import ProcessGrid
from ..errors import ShapeError
from ..optim import FlatLayout, Optimizer
from ..strategies.shares import ParameterShare
from .compressed import CompressedGradients
from .flags import HEADER_SIZE, Flag
from .owners import OwnedParts
from .shard import ParameterShard
from .sync import AllReduce, GradientSync, is_finite


class Parameters:
    """The trained arrays of a model of either kind, their gradients, and their order in memory.

    Arrays that every rank updates identically come first, the compressed ones last; then this rank's part of the
    arrays cut over the tiles; from `owned_start` on, whole, the arrays whose parts have owners.

    Parameters
    ----------
    grid : ProcessGrid
    trained : iterable of ParameterShard
    allocate_zeros : callable
        Returns a flat array of n zeros.
    sync : type of GradientSync
    shares : mapping of str to ParameterShare, optional
        The parts of owners, by full name.
    compressors : mapping of str to str, optional
        Texts, by full name, for parameters whose gradients are compressed.

    Attributes
    ----------
    first : int
        The model's first trained node.
    trained : list of ParameterShard
        In the order of the flat arrays.
    spans : list of (start, stop)
        The range of each in them.
    values, grads : flat arrays
    version : int
        Counts the changes of the values.
    sync : GradientSync
        Sums the shares of the ranks.
    reductions : Reductions
        Those of the gradients.
    """

    first = 0

    def __init__(
        self,
        grid: ProcessGrid,
        trained: Iterable[ParameterShard],
        allocate_zeros: Callable[[int], Any],
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, ParameterShare] | None = None,
        compressors: Mapping[str, str] | None = None,
    ) -> None:
        self.grid, shares, compressors = grid, shares or {}, compressors or {}

        def place(shard: ParameterShard) -> tuple[bool, bool, str, bool]:
            compressor = compressors.get(shard.full_name, "")
            return shard.full_name in shares, shard.is_tiled, compressor, shard.parameter.layout.is_partitioned

        self.trained = sorted(trained, key=place)
        ends = list(accumulate((prod(shard.local_shape) for shard in self.trained), initial=0))
        self.spans = list(pairwise(ends))
        self.owned_names = shares.keys()
        self._shares = [shares.get(shard.full_name) for shard in self.trained]
        self.first_owned_index = next((at for at, share in enumerate(self._shares) if share), len(self.trained))
        self.owned_start, summed = ends[self.first_owned_index], self.trained[: self.first_owned_index]
        self.shared_size = sum(prod(shard.local_shape) for shard in summed if not shard.is_tiled)
        packed = [(s.full_name, s.local_shape, compressors[s.full_name]) for s in summed if place(s)[2]]
        uncompressed_size = self.shared_size - sum(prod(shape) for _, shape, _ in packed)
        self.values, buffer = allocate_zeros(ends[-1]), allocate_zeros(HEADER_SIZE + ends[-1])
        self.grads = buffer[HEADER_SIZE:]
        self.sync = sync(
            grid, buffer[: HEADER_SIZE + self.owned_start], self.spans[: self.first_owned_index], self.shared_size,
            uncompressed_size,
        )  # fmt: skip
        self.reductions = self.sync.reductions
        self.compressed = CompressedGradients(self.reductions, self.grads[uncompressed_size : self.shared_size], packed)
        owned = [(shard, share) for shard, share in zip(self.trained, self._shares, strict=True) if share]
        widths = [prod(shard.parameter.shape[1:]) * bool(shard.parameter.max_rows_per_sample) for shard, _ in owned]
        self.owners = OwnedParts(self.reductions, [share for _, share in owned], widths)
        self.version = 0

    def split_flat(self, flat: Any, shards: list[ParameterShard] | None = None) -> list[Any]:
        """Return the parts of a flat array that belong to the shards (default the trained ones), as views."""
        parts, start = [], 0
        for shard in self.trained if shards is None else shards:
            stop = start + prod(shard.local_shape)
            parts.append(flat[start:stop].reshape(shard.local_shape))
            start = stop
        return parts

    def sum_gradients(self, for_update: bool = False, loss_scale: float = 1.0) -> None:
        """Sum the shares of all ranks; those of parameters cut over the tiles, over the replicas.

        Parameters
        ----------
        for_update : bool
            Whether the sums are needed only for `update`: sums of owned parameters, only by their owners.
        loss_scale : float
            Loss scale: the shares contain this factor, the sums do not.
        """
        with self.grid.observers.observe("sync"):
            owned, packed = self.grads[self.owned_start :], self.compressed.gradients
            if loss_scale != 1:
                packed /= loss_scale  # residuals are kept unscaled
            if for_update and owned.size:
                self.owners.reduce_to_owners(owned)
                self.sync.record_finiteness(is_finite(self.owners.own_part(owned)))
            elif owned.size:
                self.reductions.allreduce("world", owned)
                self.sync.record_finiteness(is_finite(owned))
            self.sync.record_finiteness(self.compressed.is_finite())
            self.sync.finish_sums()
            if loss_scale != 1:
                self.grads[: self.sync.uncompressed_size] /= loss_scale
                self.grads[self.shared_size :] /= loss_scale
            if not for_update:
                self.reductions.allreduce("world", packed)
            elif self._is_finite():
                self.compressed.sum_over_ranks()

    def _is_finite(self) -> bool:
        """Return whether all gradients checked so far are finite, the same on every rank."""
        sync = self.sync
        return bool(
            self.compressed.gradients.size and not sync.header[Flag.NON_FINITE] and is_finite(sync.world_message)
        )

    def update(
        self,
        optimizer: Optimizer,
        slots: dict[str, Any],
        step: int,
        loss_scale: float,
        is_chosen: Sequence[bool] | None = None,
    ) -> None:
        """Update all values, or those of the chosen parameters, by their gradients; collective with owners."""
        self.version += 1
        if self.owned_start == self.values.size:
            optimizer.update(self.values, self.grads, slots, step, loss_scale, self.flat_layout(is_chosen))
            return
        values, grads = self.updated_part(self.values), self.updated_part(self.grads)
        optimizer.update(values, grads, slots, step, loss_scale, self.flat_layout(is_chosen))
        del grads
        self.store_and_broadcast(values)

    def updated_part(self, flat: Any) -> Any:
        """Return a new flat array of what this rank updates: all except the parts of other owners."""
        return namespace(flat).concatenate([flat[: self.owned_start], self.owners.own_part(flat[self.owned_start :])])

    def store_and_broadcast(self, held: Any) -> None:
        """Store the values that this rank updates, and receive those of other owners; collective."""
        owned = self.values[self.owned_start :]
        before = self.owners.copy_sparse_rows(owned)
        self.values[: self.owned_start] = held[: self.owned_start]
        self.owners.store_own_part(held[self.owned_start :], owned)
        self.owners.broadcast_from_owners(owned, before)

    @contextmanager
    def temporarily_replaced(self, held: Any) -> Iterator[None]:
        """Replace the values that this rank updates within the context; collective."""
        kept = self.values.copy()
        self.store_and_broadcast(held)
        self.version += 1
        try:
            yield
        finally:
            self.values[...] = kept
            self.version += 1

    def create_slots(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's arrays for what this rank updates."""
        return optimizer.create_slots(self.values[: self.owned_start + self.owners.size])

    def flat_layout(self, is_chosen: Sequence[bool] | None = None) -> FlatLayout:
        """Return the layout of the parameters that this rank updates, or of the chosen ones, in its flat arrays."""
        selected = [True] * len(self.trained) if is_chosen is None else is_chosen
        owned = ((self.owned_start + start, self.owned_start + stop) for start, stop in self.owners.spans)
        summed = (span for span, share in zip(self.spans, self._shares, strict=True) if share is None)
        spans, chosen_shards = [], []
        for span, shard, included in zip((*summed, *owned), self.trained, selected, strict=True):
            if included:
                spans.append(span)
                chosen_shards.append(shard)
        parts = [shard.is_tiled for shard in chosen_shards if shard.is_tiled or shard.full_name in self.owned_names]
        decays = tuple(shard.decays for shard in chosen_shards)
        return FlatLayout(tuple(spans), decays, len(spans) - len(parts), partial(self._sum_parts_over_ranks, parts))

    def _sum_parts_over_ranks(self, cut: Sequence[bool], sums: Any) -> Any:
        """Return sums of parts over the ranks that have them; parts of a tile are counted in the first replica only."""
        if all(cut):
            return self.reductions.allreduce("tiles", sums)
        if self.grid.replica:
            sums[namespace(sums).asarray(cut)] = 0
        return self.reductions.allreduce("world", sums)

    def read_flags(self, loss: Any) -> tuple[float, bool]:
        """Return a step's loss (1,), and whether it and all gradients are finite, the same on every rank.

        Also reads the flags of all ranks. Everything is in one copy: the only time that a step waits for the device.
        """
        xp, sync = namespace(self.grads), self.sync
        all_finite = is_finite(self.grads[: self.shared_size]).reshape(1)
        message = to_host(xp.concatenate([sync.header, all_finite, loss]))
        sync.flags.rank_counts[...] = message[:HEADER_SIZE]
        return float(message[-1]), bool(message[HEADER_SIZE]) and not sync.flags.rank_counts[Flag.NON_FINITE]

    def slot_shards(self, flat: dict[str, Any]) -> list[tuple[ParameterShard, Any]]:
        """Return an optimiser's flat slots as arrays by '<layer name>/<parameter>/<slot>'."""
        shards, ends = list(zip(self.trained, self._shares, strict=True)), [0]
        for shard, share in shards:
            ends.append(ends[-1] + (prod(shard.local_shape) if share is None else shard.slot_shard("", share).box.size))
        arrays = []
        for slot, array in flat.items():
            for (shard, share), start, stop in zip(shards, ends, ends[1:], strict=False):
                slot_shard = shard.slot_shard(slot, share)
                arrays.append((slot_shard, array[start:stop].reshape(slot_shard.local_shape)))
        return arrays


def gather_arrays(arrays: Iterable[tuple[ParameterShard, Any]]) -> dict[str, Any]:
    """Return copies of whole arrays by full name; collective if some are cut over the tiles."""
    return {shard.full_name: shard.gather(array) for shard, array in arrays}


def load_arrays(arrays: list[tuple[ParameterShard, Any]], values: dict[str, Any], source: str) -> None:
    """Copy whole `values` into `arrays`; ShapeError, before anything is copied, if they do not fit."""
    shards = {shard.full_name: shard for shard, _ in arrays}
    missing, unknown = sorted(shards.keys() - values.keys()), sorted(values.keys() - shards.keys())
    if missing or unknown:
        raise ShapeError(
            f"{source} does not fit the model: missing {', '.join(missing) or 'none'};"
            f" unknown {', '.join(unknown) or 'none'}"
        )
    for name, shard in shards.items():
        if np.shape(values[name]) != shard.parameter.shape:
            raise ShapeError(
                f"{source}: '{name}' has shape {np.shape(values[name])}, but the model's has {shard.parameter.shape}"
            )
    for shard, array in arrays:
        array[...] = namespace(array).asarray(shard.own_part_of(values[shard.full_name]))
