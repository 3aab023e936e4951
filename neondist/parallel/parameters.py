"""The trained arrays of a model in flat buffers: one update and one allreduce for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import as_real_numbers, namespace, to_host
from ..comm import ProcessGrid
from ..errors import ShapeError
from ..optim import FlatLayout, Optimizer
from ..strategies.shares import OwnerBoxes
from .compressed import CompressedAllReduce
from .flags import FLAG_HEADER_LENGTH, ControlFlag
from .owners import OwnedParts
from .shard import ParameterShard
from .sync import AllReduce, GradientSync, are_all_finite


class Parameters:
    """The trained arrays of a model (of layers, or a PyTorch module), their gradients, and their order in memory.

    The order is: arrays that every rank updates identically, with compressed ones at their end; this rank's parts of
    arrays partitioned over the tiles; and, starting at `owned_start`, whole arrays whose parts have owners.

    Parameters
    ----------
    allocate_zeros : callable
        Returns a flat array of n zeros.
    shares : mapping of str to OwnerBoxes, optional
        The parts of parameters with owners, by full name.
    gradient_compressors : mapping of str to str, optional
        Compressors as text, such as 'topk(0.01)', by full name of the parameters whose gradients are compressed.

    Attributes
    ----------
    first_node : int
        The model's first trained node.
    trained_shards : list of ParameterShard
        Trained shards, in the order of the flat arrays.
    spans : list of (start, stop)
        Range of each trained shard in the flat arrays.
    values, grads : flat arrays
    version : int
        Number of times that the values have changed.
    """

    first_node = 0

    def __init__(
        self,
        grid: ProcessGrid,
        trained: Iterable[ParameterShard],
        allocate_zeros: Callable[[int], Any],
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, OwnerBoxes] | None = None,
        gradient_compressors: Mapping[str, str] | None = None,
    ) -> None:
        self.grid, shares, gradient_compressors = grid, shares or {}, gradient_compressors or {}

        def sort_key(shard: ParameterShard) -> tuple[bool, bool, str, bool]:
            compressor = gradient_compressors.get(shard.full_name, "")
            return shard.full_name in shares, shard.is_tiled, compressor, shard.parameter.layout.is_partitioned

        self.trained_shards = sorted(trained, key=sort_key)
        shard_ends = list(accumulate((prod(shard.local_shape) for shard in self.trained_shards), initial=0))
        self.spans = list(pairwise(shard_ends))
        self.names_with_owners = shares.keys()
        self._shares = [shares.get(shard.full_name) for shard in self.trained_shards]
        self.first_owned_index = next((at for at, share in enumerate(self._shares) if share), len(self.trained_shards))
        self.owned_start, summed = shard_ends[self.first_owned_index], self.trained_shards[: self.first_owned_index]
        self.num_world_gradients = sum(prod(shard.local_shape) for shard in summed if not shard.is_tiled)
        compressed_shards = [
            (s.full_name, s.local_shape, gradient_compressors[s.full_name]) for s in summed if sort_key(s)[2]
        ]
        num_uncompressed_gradients = self.num_world_gradients - sum(prod(shape) for _, shape, _ in compressed_shards)
        self.values, buffer = allocate_zeros(shard_ends[-1]), allocate_zeros(FLAG_HEADER_LENGTH + shard_ends[-1])
        self.grads = buffer[FLAG_HEADER_LENGTH:]
        self.sync = sync(
            grid, buffer[: FLAG_HEADER_LENGTH + self.owned_start], self.spans[: self.first_owned_index],
            self.num_world_gradients, num_uncompressed_gradients,
        )  # fmt: skip
        self.reductions = self.sync.reductions
        self.compressed = CompressedAllReduce(
            self.reductions, self.grads[num_uncompressed_gradients : self.num_world_gradients], compressed_shards
        )
        owned = [(shard, share) for shard, share in zip(self.trained_shards, self._shares, strict=True) if share]
        widths = [prod(shard.parameter.shape[1:]) * bool(shard.parameter.max_rows_per_sample) for shard, _ in owned]
        self.owners = OwnedParts(self.reductions, [share for _, share in owned], widths)
        self.version = 0

    def split_flat(self, flat: Any, shards: list[ParameterShard] | None = None) -> list[Any]:
        """Return the parts of a flat array that belong to the shards (default: the trained shards), as views."""
        shard_arrays, start = [], 0
        for shard in self.trained_shards if shards is None else shards:
            stop = start + prod(shard.local_shape)
            shard_arrays.append(flat[start:stop].reshape(shard.local_shape))
            start = stop
        return shard_arrays

    def sum_gradients(self, to_owners: bool = False, loss_scale: float = 1.0) -> None:
        """Sum the gradients over all ranks; those of parameters partitioned over tiles, over replicas only.

        Parameters
        ----------
        to_owners : bool
            Whether only `update` needs the sums: if so, gradients of parameters with owners are summed only on their
            owners, and compressors are used; otherwise, every rank receives uncompressed sums.
        loss_scale : float
            Factor by which the gradients have been multiplied; the sums are divided by it.
        """
        with self.grid.observers.observe("sync"):
            owned, packed = self.grads[self.owned_start :], self.compressed.gradients
            if loss_scale != 1:
                packed /= loss_scale  # residuals are kept unscaled
            if to_owners and owned.size:
                self.owners.reduce_to_owners(owned)
                self.sync.record_finiteness(are_all_finite(self.owners.copy_own_part(owned)))
            elif owned.size:
                self.reductions.allreduce("world", owned)
                self.sync.record_finiteness(are_all_finite(owned))
            self.sync.record_finiteness(are_all_finite(packed))
            self.sync.finish_sums()
            if loss_scale != 1:
                self.grads[: self.sync.num_uncompressed_gradients] /= loss_scale
                self.grads[self.num_world_gradients :] /= loss_scale
            if not to_owners:
                self.reductions.allreduce("world", packed)
            elif self._needs_compressed_sums():
                self.compressed.sum_over_ranks()

    def _needs_compressed_sums(self) -> bool:
        """Return whether there are gradients to compress and all gradients are finite; equal on every rank."""
        sync = self.sync
        return bool(
            self.compressed.gradients.size
            and not sync.flag_header[ControlFlag.NON_FINITE]
            and are_all_finite(sync.world_message)
        )

    def update(
        self,
        optimizer: Optimizer,
        slots: dict[str, Any],
        step: int,
        rate_factor: float,
        update_mask: Sequence[bool] | None = None,
    ) -> None:
        """Update all values, or those in `update_mask`, from the gradients. Collective if parameters have owners."""
        self.version += 1
        if self.owned_start == self.values.size:
            optimizer.update(self.values, self.grads, slots, step, rate_factor, self.flat_layout(update_mask))
            return
        values, grads = self.copy_updated_part(self.values), self.copy_updated_part(self.grads)
        optimizer.update(values, grads, slots, step, rate_factor, self.flat_layout(update_mask))
        del grads
        self.store_and_broadcast_values(values)

    def copy_updated_part(self, flat: Any) -> Any:
        """Return a new flat array of the elements that this rank updates: all except the parts of other owners."""
        return namespace(flat).concatenate(
            [flat[: self.owned_start], self.owners.copy_own_part(flat[self.owned_start :])]
        )

    def store_and_broadcast_values(self, updated_part: Any) -> None:
        """Store the values that this rank updates, and exchange values with other owners. Collective."""
        owned = self.values[self.owned_start :]
        previous_sparse_parts = self.owners.copy_own_sparse_parts(owned)
        self.values[: self.owned_start] = updated_part[: self.owned_start]
        self.owners.store_own_part(updated_part[self.owned_start :], owned)
        self.owners.broadcast_from_owners(owned, previous_sparse_parts)

    @contextmanager
    def replace_values_temporarily(self, updated_part: Any) -> Iterator[None]:
        """Replace the values that this rank updates, within the context. Collective."""
        original_values = self.values.copy()
        self.store_and_broadcast_values(updated_part)
        self.version += 1
        try:
            yield
        finally:
            self.values[...] = original_values
            self.version += 1

    def create_slots(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's arrays for the elements that this rank updates."""
        return optimizer.create_slots(self.values[: self.owned_start + self.owners.num_own_elements])

    def flat_layout(self, update_mask: Sequence[bool] | None = None) -> FlatLayout:
        """Return the layout, in flat arrays, of the parameters that this rank updates, or of those in `update_mask`."""
        is_selected = [True] * len(self.trained_shards) if update_mask is None else update_mask
        owned = ((self.owned_start + start, self.owned_start + stop) for start, stop in self.owners.own_spans)
        summed = (span for span, share in zip(self.spans, self._shares, strict=True) if share is None)
        spans, chosen_shards = [], []
        for span, shard, included in zip((*summed, *owned), self.trained_shards, is_selected, strict=True):
            if included:
                spans.append(span)
                chosen_shards.append(shard)
        tiled = [part.is_tiled for part in chosen_shards if part.is_tiled or part.full_name in self.names_with_owners]
        decays = tuple(shard.decays for shard in chosen_shards)
        return FlatLayout(tuple(spans), decays, len(spans) - len(tiled), partial(self._sum_parts_over_ranks, tiled))

    def _sum_parts_over_ranks(self, is_tiled: Sequence[bool], sums: Any) -> Any:
        """Return each parameter's `sums` added over its parts; a tile's part counts once, not in every replica."""
        if all(is_tiled):
            return self.reductions.allreduce("tiles", sums)
        if self.grid.replica:
            sums[namespace(sums).asarray(is_tiled)] = 0
        return self.reductions.allreduce("world", sums)

    def fetch_loss_and_flags(self, device_loss: Any) -> tuple[float, bool]:
        """Return a step's loss, and whether the loss and all gradients are finite; equal on every rank.

        Also reads the flags of all ranks, in the same copy, the only operation of a step that waits for the device.
        """
        xp, sync = namespace(self.grads), self.sync
        all_finite = are_all_finite(self.grads[: self.num_world_gradients]).reshape(1)
        message = to_host(xp.concatenate([sync.flag_header, all_finite, device_loss]))
        sync.flags.num_ranks_by_flag[...] = message[:FLAG_HEADER_LENGTH]
        nonfinite_ranks = sync.flags.num_ranks_by_flag[ControlFlag.NON_FINITE]
        return float(message[-1]), bool(message[FLAG_HEADER_LENGTH]) and not nonfinite_ranks

    def slot_arrays(self, flat_slots: dict[str, Any]) -> list[tuple[ParameterShard, Any]]:
        """Return an optimiser's flat slots as arrays, with shards named '<layer name>/<parameter>/<slot>'."""
        shards, ends = list(zip(self.trained_shards, self._shares, strict=True)), [0]
        for shard, share in shards:
            ends.append(ends[-1] + (prod(shard.local_shape) if share is None else shard.slot_shard("", share).box.size))
        arrays = []
        for slot, array in flat_slots.items():
            for (shard, share), start, stop in zip(shards, ends, ends[1:], strict=False):
                slot_shard = shard.slot_shard(slot, share)
                arrays.append((slot_shard, array[start:stop].reshape(slot_shard.local_shape)))
        return arrays


def gather_arrays(arrays: Iterable[tuple[ParameterShard, Any]]) -> dict[str, Any]:
    """Return copies of whole arrays by full name. Collective if some are partitioned over ranks."""
    return {shard.full_name: shard.gather(array) for shard, array in arrays}


def load_arrays(arrays: list[tuple[ParameterShard, Any]], values: dict[str, Any], source: str) -> None:
    """Copy whole `values` into `arrays`; before that, ShapeError for wrong names or shapes, or non-real dtypes."""
    shards = {shard.full_name: shard for shard, _ in arrays}
    missing_names, unknown_names = sorted(shards.keys() - values.keys()), sorted(values.keys() - shards.keys())
    if missing_names or unknown_names:
        raise ShapeError(
            f"{source} does not fit the model: missing {', '.join(missing_names) or 'none'};"
            f" unknown {', '.join(unknown_names) or 'none'}; build the model with the same layers as the saved model"
        )
    xp = namespace(arrays[0][1]) if arrays else np
    values = {name: as_real_numbers(f"{source}: '{name}'", value, xp) for name, value in values.items()}
    for name, shard in shards.items():
        if np.shape(values[name]) != shard.parameter.shape:
            raise ShapeError(
                f"{source}: '{name}' has shape {np.shape(values[name])}, but the model's array has"
                f" {shard.parameter.shape}; build the model with the same layer sizes as the saved model"
            )
    for shard, array in arrays:
        array[...] = namespace(array).asarray(shard.own_part_of(values[shard.full_name]))
