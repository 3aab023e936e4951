"""All arrays of a model in flat buffers: one update, one allreduce, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from .. import rng
from ..errors import ShapeError
from ..layers import Context, Layer, Parameter
from ..namespace import namespace, to_host
from ..optim import FlatLayout, Optimizer
from ..strategies.shares import Share
from .flags import HEADER, Flag
from .owners import Owners
from .shard import ParameterShard
from .sync import AllReduce, GradientSync, finite


class Views(dict[str, Any]):
    """Arrays by name that live in a flat buffer: assigning copies the values in, so they stay there."""

    def __setitem__(self, name: str, values: Any) -> None:
        array, values = self._fitting(name, values)
        array[...] = values

    def _fitting(self, name: str, values: Any) -> tuple[Any, Any]:
        """Return the array of a name and values of its shape, of the same kind; otherwise KeyError or ShapeError."""
        if name not in self:
            raise KeyError(f"no array '{name}'; this layer has {', '.join(self) or 'none'}")
        array = super().__getitem__(name)
        values = namespace(array).asarray(values)
        if values.shape != array.shape:
            raise ShapeError(f"'{name}' of shape {values.shape}: expected {array.shape}")
        return array, values


class Gradients(Views):
    """Gradients by name: what is assigned is added to what was assigned since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.stale: set[str] = set()

    def begin(self) -> None:
        """Let everything be zero, which costs nothing until it is read."""
        self.stale.update(self)

    def __setitem__(self, name: str, values: Any) -> None:
        array, values = self._fitting(name, values)
        if name in self.stale:
            self.stale.discard(name)
            array[...] = values
        elif values is not array:  # as it is after grads[name] += values
            array += values

    def __getitem__(self, name: str) -> Any:
        array = super().__getitem__(name)
        if name in self.stale:
            self.stale.discard(name)
            array[...] = 0
        return array

    def settle(self) -> None:
        """Make zero what nothing was assigned to."""
        for name in list(self.stale):
            self[name]


class Parameters:
    """The trained arrays of all layers, their gradients and the arrays that are kept beside them.

    Binds `params`, `grads` and `state` of every layer to views of the buffers, and fills in first values, which depend
    on the seed, the layer's name and the shard's index alone.

    Attributes
    ----------
    first : int
        The model's node where what is trained begins.
    layers : dict of str to Layer
    values, grads : flat arrays
        What every rank updates alike comes first; then the arrays that are cut over the tiles, this rank's part; from
        `owned` on, those whose parts have owners, whole.
    buffers : flat array
        What is kept but not trained.
    version : int
        Counts the changes of the values.
    sync : GradientSync
        Adds up the ranks' shares.
    reductions : Reductions
        Those of the gradients.
    """

    first = 0

    def __init__(
        self,
        layers: Iterable[Layer],
        context: Context,
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        self.context, shares = context, shares or {}
        self.layers = {str(layer.name): layer for layer in layers}
        trained = [
            ParameterShard(layer, name, parameter, context.grid)
            for layer, one in self.layers.items()
            for name, parameter in one.parameters_for(one.input_shape).items()
        ]
        self.trained = sorted(trained, key=lambda shard: (shard.full_name in shares, shard.parameter.layout.cut))
        self.kept = [
            ParameterShard(layer, name, parameter, context.grid)
            for layer, one in self.layers.items()
            for name, parameter in one.state_for(one.input_shape).items()
        ]
        ends = list(accumulate((prod(shard.local_shape) for shard in self.trained), initial=0))
        self.spans = list(pairwise(ends))
        self.owned_names = shares.keys()
        self._shares = [shares.get(shard.full_name) for shard in self.trained]
        first_owned = next((at for at, share in enumerate(self._shares) if share), len(self.trained))
        self.owned, summed = ends[first_owned], self.trained[:first_owned]
        self.shared = sum(prod(shard.local_shape) for shard in summed if not shard.cut)
        self.values, self.buffers = self._flat(self.trained), self._flat(self.kept)
        buffer = context.backend.xp.zeros((HEADER + self.values.size,), context.dtype)
        self.grads = buffer[HEADER:]
        self.sync = sync(context.grid, buffer[: HEADER + self.owned], self.spans[:first_owned], self.shared)
        self.reductions = self.sync.reductions
        self.owners = Owners(self.reductions, [share for share in self._shares if share])
        self._spans: dict[str, list[tuple[int, int]]] = {layer: [] for layer in self.layers}
        for shard, span in zip(summed, self.spans, strict=False):
            self._spans[shard.layer].append(span)
        self.version = 0
        for one in self.layers.values():
            one.params, one.grads, one.state = Views(), Gradients(), Views()
        for shard, value, gradient in zip(self.trained, self.cut(self.values), self.cut(self.grads), strict=True):
            dict.__setitem__(self.layers[shard.layer].params, shard.name, value)
            dict.__setitem__(self.layers[shard.layer].grads, shard.name, gradient)
        for shard, value in zip(self.kept, self.cut(self.buffers, self.kept), strict=True):
            dict.__setitem__(self.layers[shard.layer].state, shard.name, value)
        for shard, value in self.arrays():
            self._begin(shard, value)

    def cut(self, flat: Any, shards: list[ParameterShard] | None = None) -> list[Any]:
        """Return the parts of a flat array that belong to the shards (default the trained ones), as views."""
        parts, start = [], 0
        for shard in self.trained if shards is None else shards:
            stop = start + prod(shard.local_shape)
            parts.append(flat[start:stop].reshape(shard.local_shape))
            start = stop
        return parts

    def begin_gradients(self) -> None:
        """Let all gradients be zero."""
        self.sync.begin()
        for layer in self.layers.values():
            layer.grads.begin()

    def ready(self, layer: Layer) -> None:
        """Take note that this rank's shares in a layer's gradients are complete."""
        layer.grads.settle()
        for span in self._spans[str(layer.name)]:
            self.sync.ready(span)

    def sum_gradients(self, for_update: bool = False) -> None:
        """Add up every rank's share over all ranks; what is cut over the tiles, over the replicas.

        Parameters
        ----------
        for_update : bool
            Whether the sums are wanted for `update` alone: those of parameters that have owners, by the owners.
        """
        with self.context.grid.observers.during("sync"):
            for layer in self.layers.values():
                layer.grads.settle()
            owned = self.grads[self.owned :]
            if for_update and owned.size:
                self.owners.reduce(owned)
                self.sync.note(finite(self.owners.pack(owned)))
            elif owned.size:
                self.reductions.allreduce("world", owned)
                self.sync.note(finite(owned))
            self.sync.finish()

    def update(
        self,
        optimizer: Optimizer,
        slots: dict[str, Any],
        step: int,
        scale: float,
        chosen: Sequence[bool] | None = None,
    ) -> None:
        """Change all values by their gradients, or those of the parameters that are chosen; collective with owners."""
        self.version += 1
        if self.owned == self.values.size:
            optimizer.update(self.values, self.grads, slots, step, scale, self.layout(chosen))
            return
        values, grads = self.held(self.values), self.held(self.grads)
        optimizer.update(values, grads, slots, step, scale, self.layout(chosen))
        del grads
        self.publish(values)

    def held(self, flat: Any) -> Any:
        """Return a new flat array of what this rank updates: all, but for the parts of other owners."""
        return namespace(flat).concatenate([flat[: self.owned], self.owners.pack(flat[self.owned :])])

    def publish(self, held: Any) -> None:
        """Take over the values of what this rank updates, and those of other owners from them; collective."""
        owned = self.values[self.owned :]
        self.values[: self.owned] = held[: self.owned]
        self.owners.unpack(held[self.owned :], owned)
        self.owners.broadcast(owned)

    def new_slots(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's arrays for what this rank updates."""
        return optimizer.slots(self.values[: self.owned + self.owners.size])

    def layout(self, chosen: Sequence[bool] | None = None) -> FlatLayout:
        """Return where the parameters that this rank updates are in its flat arrays, or those that are chosen."""
        mine = [True] * len(self.trained) if chosen is None else chosen
        owned = ((self.owned + start, self.owned + stop) for start, stop in self.owners.spans)
        summed = (span for span, share in zip(self.spans, self._shares, strict=True) if share is None)
        spans, chosen_shards = [], []
        for span, shard, yes in zip((*summed, *owned), self.trained, mine, strict=True):
            if yes:
                spans.append(span)
                chosen_shards.append(shard)
        parts = [shard.cut for shard in chosen_shards if shard.cut or shard.full_name in self.owned_names]
        decays = tuple(shard.decays for shard in chosen_shards)
        return FlatLayout(tuple(spans), decays, len(spans) - len(parts), partial(self._total, parts))

    def _total(self, cut: Sequence[bool], sums: Any) -> Any:
        """Return sums of parts over the ranks that have them; a tile's parameters are those of the first replica."""
        if all(cut):
            return self.reductions.allreduce("tiles", sums)
        if self.context.grid.replica:
            sums[namespace(sums).asarray(cut)] = 0
        return self.reductions.allreduce("world", sums)

    def hear(self, loss: Any) -> tuple[float, bool]:
        """Return a step's loss (1,), and whether it and all gradients are finite, the same on every rank.

        The flags are heard. All this comes in one copy: the only time that a step waits for the device.
        """
        xp, sync = self.context.backend.xp, self.sync
        good = finite(self.grads[: self.shared]).reshape(1)
        told = to_host(xp.concatenate([sync.header, good, loss]))
        sync.flags.heard[...] = told[:HEADER]
        return float(told[-1]), bool(told[HEADER]) and not sync.flags.heard[Flag.NON_FINITE]

    def arrays(self) -> list[tuple[ParameterShard, Any]]:
        """Return all arrays, trained and kept: views of this rank's part."""
        found = [(shard, self.layers[shard.layer].params[shard.name]) for shard in self.trained]
        return found + [(shard, self.layers[shard.layer].state[shard.name]) for shard in self.kept]

    def gradients(self) -> list[tuple[ParameterShard, Any]]:
        """Return the gradients of all trained arrays: views of this rank's part."""
        return [(shard, self.layers[shard.layer].grads[shard.name]) for shard in self.trained]

    def slots(self, flat: dict[str, Any]) -> list[tuple[ParameterShard, Any]]:
        """Return an optimiser's flat slots as arrays by '<layer name>/<parameter>/<slot>'."""
        shards, ends = list(zip(self.trained, self._shares, strict=True)), [0]
        for shard, share in shards:
            ends.append(ends[-1] + (prod(shard.local_shape) if share is None else shard.slot("", share).box.size))
        found = []
        for slot, array in flat.items():
            for (shard, share), start, stop in zip(shards, ends, ends[1:], strict=False):
                one = shard.slot(slot, share)
                found.append((one, array[start:stop].reshape(one.local_shape)))
        return found

    def _flat(self, shards: list[ParameterShard]) -> Any:
        return self.context.backend.xp.zeros((sum(prod(e.local_shape) for e in shards),), self.context.dtype)

    def _begin(self, shard: ParameterShard, array: Any) -> None:
        """Fill in first values."""
        stream = rng.key(self.context.seed, "weights", shard.layer, shard.name)
        parameter: Parameter = shard.parameter
        index = rng.box_index(shard.unfolded, shard.box.slices).reshape(array.shape)
        values = parameter.initializer.values(stream, index, parameter.fan_in, parameter.fan_out)
        array[...] = self.context.backend.from_host(values, array.dtype)


def gather(arrays: Iterable[tuple[ParameterShard, Any]]) -> dict[str, Any]:
    """Return copies of whole arrays by full name; collective where some are cut over the tiles."""
    return {shard.full_name: shard.gather(array) for shard, array in arrays}


def load(arrays: list[tuple[ParameterShard, Any]], values: dict[str, Any], what: str) -> None:
    """Copy whole `values` into `arrays`; ShapeError, before anything is copied, if they do not fit."""
    wanted = {shard.full_name: shard for shard, _ in arrays}
    missing, unknown = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
    if missing or unknown:
        raise ShapeError(
            f"{what} does not fit the model: missing {', '.join(missing) or 'none'};"
            f" unknown {', '.join(unknown) or 'none'}"
        )
    for name, shard in wanted.items():
        if np.shape(values[name]) != shard.parameter.shape:
            raise ShapeError(
                f"{what}: '{name}' has shape {np.shape(values[name])}, but the model's has {shard.parameter.shape}"
            )
    for shard, array in arrays:
        array[...] = namespace(array).asarray(shard.part_of(values[shard.full_name]))
