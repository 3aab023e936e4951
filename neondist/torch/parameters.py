"""A module's trained parameters in flat buffers, as views of which its gradients are synchronised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..comm import ProcessGrid
from ..errors import ConfigError
from ..geometry import GridShape
from ..layers import Parameter
from ..parallel import AllReduce, GradientSync, Parameters, ParameterShard
from ..plan import ParameterPlan
from ..strategies import Strategy, StrategyBuilder, as_strategy
from ..strategies.shares import Share
from .weights import as_array, slots_of

MODULE = "module"
"""The layer's name of a module's arrays in checkpoints and strategies."""


def sparse_tables(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the embeddings with `sparse=True`, whose gradients have few rows that are not 0."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {each.weight for each in module.modules() if isinstance(each, tables) and each.sparse}


def described(
    tensors: Mapping[str, nn.Parameter], sparse: AbstractSet[torch.Tensor] = frozenset()
) -> dict[str, Parameter]:
    """Return the parameters of a module by the names that checkpoints and strategies have for them.

    How many rows of a sparse one a sample uses is not known before: at most all of them.
    """
    return {
        f"{MODULE}/{name}": Parameter(tuple(tensor.shape), sparse=tensor.shape[0] if tensor in sparse else 0)
        for name, tensor in tensors.items()
    }


def planned_for(
    tensors: Mapping[str, nn.Parameter],
    grid: GridShape,
    strategy: StrategyBuilder | Strategy | str | None,
    sparse: AbstractSet[torch.Tensor] = frozenset(),
) -> ParameterPlan:
    """Return the plan of a module's parameters, some of them sparse, under a strategy."""
    dtype, chosen = as_array(next(iter(tensors.values()))).dtype, None if strategy is None else as_strategy(strategy)
    return ParameterPlan(described(tensors, sparse), grid, dtype, 0, chosen)


class ModuleParameters(Parameters):
    """The trained parameters of a module.

    Their data and gradients become views of the flat buffers: a gradient is moved there as soon as it is complete, and
    is this rank's share until `sum_gradients` has returned. Gradients that autograd does not compute stay None.

    Parameters
    ----------
    tensors : mapping of str to torch.nn.Parameter
        The module's own, by name, on the CPU and of one dtype.
    grid : ProcessGrid
    sync : type of GradientSync
    shares : mapping of str to Share, optional
    compressors : mapping of str to str, optional
    sparse : set of torch.nn.Parameter, optional
        Tables whose rows travel with their ids.

    Attributes
    ----------
    tensors : dict of str to torch.nn.Parameter
        The module's own.
    shards : dict of str to (ParameterShard, Share or None)
    updated : dict of str to torch.nn.Parameter
        What this rank's optimiser updates: the module's parameters, or views of the parts that this rank owns.

    Raises
    ------
    ConfigError
        Parameters of several dtypes, of one that NumPy does not have, or on another device.
    """

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        grid: ProcessGrid,
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, Share] | None = None,
        compressors: Mapping[str, str] | None = None,
        sparse: AbstractSet[torch.Tensor] = frozenset(),
    ) -> None:
        if any(_is_synchronised(tensor) for tensor in tensors.values()):
            raise ConfigError("model: already has a DistributedOptimizer; distribute another copy of the module")
        kinds = {f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors.values()}
        if not kinds <= {"torch.float32 on cpu"} and not kinds <= {"torch.float64 on cpu"}:
            raise ConfigError(
                f"strategy: the parameters are {', '.join(sorted(kinds))}; expected all float32, or all float64, on cpu"
            )
        dtype = as_array(next(iter(tensors.values()))).dtype if tensors else np.dtype("float32")
        named = zip(tensors, described(tensors, sparse).values(), strict=True)
        shards = [ParameterShard(MODULE, name, parameter, grid) for name, parameter in named]
        super().__init__(grid, shards, partial(np.zeros, dtype=dtype), sync, shares, compressors)
        self.tensors, self.updated = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
        self._views: dict[str, torch.Tensor] = {}
        arrays = zip(self.trained, self._shares, self.cut(self.values), self.cut(self.grads), strict=True)
        for shard, share, value, gradient in arrays:
            tensor = self.tensors[shard.name] = tensors[shard.name]
            value[...] = as_array(tensor)
            tensor.data, tensor.grad = torch.from_numpy(value), None
            self._views[shard.name] = torch.from_numpy(gradient)
            self.updated[shard.name] = tensor if share is None else nn.Parameter(self.part(share, tensor.data))
        self.shards = {shard.name: (shard, share) for shard, share in zip(self.trained, self._shares, strict=True)}
        spans = {shard.name: span for shard, span in zip(self.trained, self.spans, strict=True)}
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._complete, name, spans[name]))
            for name, tensor in self.tensors.items()
        ]

    def close(self) -> None:
        """Leave the module's parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin_gradients(self) -> None:
        """Let no parameter have a gradient."""
        self.sync.begin()
        for tensor in self.tensors.values():
            tensor.grad = None

    def sum_gradients(self, for_update: bool = False, scale: float = 1.0) -> None:
        """Add up every rank's share over all ranks, or, for `update`, at the owners, and divide; collective."""
        for name, tensor in self.tensors.items():
            if tensor.grad is None:
                self._views[name].zero_()
        super().sum_gradients(for_update, scale)
        for name, (_, share) in self.shards.items():
            if share is not None:
                there = self.tensors[name].grad is not None
                self.updated[name].grad = self.part(share, self._views[name]) if there else None

    def set_aside(self) -> np.ndarray | None:
        """Return the sums of earlier passes, and let the gradients be zero; None if there are not a sums."""
        names = [name for name, part in self.updated.items() if part.grad is not None]
        for name in names:
            if self.shards[name][1] is None:
                self._move(name)
            self.tensors[name].grad = self._views[name]
        sums = self.grads.copy() if names else None
        self.grads[...] = 0
        return sums

    def broadcast(self) -> None:
        """Take over the values of what this rank does not own from the owners; collective."""
        self.version += 1
        self.owners.broadcast(self.values[self.owned :])

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let an optimiser change what this rank owns meanwhile, then take over the rest from its owners; collective.

        Of sparse parameters the rows that have changed travel.
        """
        before = self.owners.rows(self.values[self.owned :])
        yield
        self.version += 1
        self.owners.broadcast(self.values[self.owned :], before)

    def slots_kept_by(self, optimizer: torch.optim.Optimizer) -> list[tuple[ParameterShard, Any]]:
        """Return an optimiser's state of `updated` as arrays: parts of parameters' shape, and others that are whole."""
        found = []
        for full_name, tensor in slots_of(self.updated, optimizer).items():
            name, _, slot = full_name.rpartition("/")
            shard, share = self.shards[name]
            array = as_array(tensor)
            if tensor.shape == self.updated[name].shape:
                found.append((shard.slot(slot, share), array))
            else:
                found.append((ParameterShard(MODULE, full_name, Parameter(array.shape), self.grid), array))
        return found

    def _complete(self, name: str, span: tuple[int, int], tensor: torch.Tensor) -> None:
        """Move a gradient that is complete to its place."""
        self._move(name)
        self.sync.ready(span)

    def _move(self, name: str) -> None:
        tensor, view = self.tensors[name], self._views[name]
        if tensor.grad is not None and (tensor.grad.is_sparse or tensor.grad.data_ptr() != view.data_ptr()):
            view.copy_(tensor.grad.to_dense())
            tensor.grad = view

    def part(self, share: Share, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor, such as a gradient, that this rank owns; a view of it."""
        return tensor.reshape(share.shape)[share.boxes[self.grid.rank].slices]


def _is_synchronised(tensor: nn.Parameter) -> bool:
    hooks = (tensor._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(getattr(getattr(hook, "func", None), "__self__", None), ModuleParameters) for hook in hooks)
