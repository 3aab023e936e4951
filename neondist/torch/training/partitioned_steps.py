"""Partitioned steps of a script's optimisers; each rank updates the parts of parameters that it owns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import optimizer as hooks

from ...comm import ProcessGrid
from ...errors import ConfigError
from ...plan import ParameterPlan
from ..module.parameters import ModuleParameters
from ..module.weights import as_array
from .losses_and_optimizers import TorchOptimizer, updates_any


class PartitionedOptimizerSteps:
    """Optimiser steps under a strategy with owners: each rank updates only the parts of parameters that it owns.

    Gradients stay whole on every rank, for clipping and other uses. During a step an optimiser's `param_groups` and
    state contain this rank's parts; afterwards the updated values are received from their owners. `state_dict` is as in
    a single process. Steps, `state_dict` and `load_state_dict` are collective.

    Parameters
    ----------
    tensors : mapping of str to torch.nn.Parameter
        Parameters whose data become views of one flat buffer.
    """

    def __init__(self, tensors: Mapping[str, nn.Parameter], grid: ProcessGrid, parameter_plan: ParameterPlan) -> None:
        self.grid, self.strategy = grid, parameter_plan.strategy.builder
        earlier_gradients = {name: tensor.grad for name, tensor in tensors.items()}
        self.parameters = ModuleParameters(tensors, grid, shares=parameter_plan.shares)
        self.parameters.close()
        for name, tensor in tensors.items():
            tensor.grad = earlier_gradients[name]
        tensors_and_parts = [
            (tensor, self.parameters.optimizer_parameters[name]) for name, tensor in self.parameters.tensors.items()
        ]
        self._part_by_id = {id(tensor): part for tensor, part in tensors_and_parts}
        self._whole_by_part_id = {id(part): tensor for tensor, part in tensors_and_parts}
        self._name_by_part_id = {id(part): name for name, part in self.parameters.optimizer_parameters.items()}
        self._adopted_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_exposing_parts = False
        grid.on_close(hooks.register_optimizer_step_pre_hook(self._replace_by_own_parts).remove)

    def _replace_by_own_parts(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Replace an optimiser's parameters and gradients with this rank's parts."""
        if self._is_exposing_parts or not updates_any(optimizer, self._part_by_id):
            return
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise ConfigError(
                f"strategy: {self.strategy} partitions the update, but {type(optimizer).__name__}.step got a closure;"
                " call backward and then step() without a closure, or use the strategy AllReduce"
            ).mark_raised_on_all_ranks()
        self._adopt_optimizer(optimizer)
        self.grid.check("step", {"the optimizer": type(optimizer).__name__})
        self.parameters.adopt_assigned_data()
        for name, (_, share) in self.parameters.shards.items():
            if share is not None:
                gradient = self.parameters.tensors[name].grad
                part = None if gradient is None else self.parameters.own_part(share, gradient.to_dense()).contiguous()
                self.parameters.optimizer_parameters[name].grad = part
        self._replace_parameters(optimizer, self._part_by_id)

    def _restore_whole_parameters(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the whole parameters, with values received from their owners."""
        if optimizer in self._adopted_optimizers and not self._is_exposing_parts:
            self._replace_parameters(optimizer, self._whole_by_part_id)
            self.parameters.broadcast_from_owners()

    @contextmanager
    def expose_own_parts(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which an optimiser's parameters are this rank's parts, and its steps run without hooks."""
        self._adopt_optimizer(optimizer)
        self._replace_parameters(optimizer, self._part_by_id)
        self._is_exposing_parts = True
        try:
            yield
        finally:
            self._is_exposing_parts = False
            self._replace_parameters(optimizer, self._whole_by_part_id)

    def _adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Partition an optimiser's existing state, and register hooks that keep its `state_dict` unpartitioned."""
        if optimizer in self._adopted_optimizers:
            return
        if not _is_elementwise(optimizer):
            raise ConfigError(
                f"strategy: {self.strategy} partitions the update, but {type(optimizer).__name__} needs whole"
                " parameters; use the strategy AllReduce"
            ).mark_raised_on_all_ranks()
        for tensor in [tensor for tensor in optimizer.state if id(tensor) in self._part_by_id]:
            part, slots = self._part_by_id[id(tensor)], optimizer.state.pop(tensor)
            optimizer.state[part] = {slot: self._own_slot_part(part, slot, value) for slot, value in slots.items()}
        # not a global hook, as virtual ranks share global hooks and may end while others are still in a step
        self.grid.on_close(optimizer.register_step_post_hook(self._restore_whole_parameters).remove)
        optimizer.register_state_dict_pre_hook(self._begin_state_dict)
        optimizer.register_state_dict_post_hook(self._end_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._begin_load_state_dict)
        optimizer.register_load_state_dict_post_hook(self._end_load_state_dict)
        self._adopted_optimizers.add(optimizer)

    def _begin_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self.grid.check("state_dict of an optimizer")
        self._replace_parameters(optimizer, self._part_by_id)

    def _end_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        self._replace_parameters(optimizer, self._whole_by_part_id)
        slots_by_index = state_dict["state"]
        for index, part in enumerate(parts):
            if index in slots_by_index and id(part) in self._name_by_part_id:
                slots = slots_by_index[index]
                slots_by_index[index] = {slot: self._gather_slot(part, slot, value) for slot, value in slots.items()}

    def _begin_load_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._replace_parameters(optimizer, self._part_by_id)
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        slots_by_index = {
            index: {slot: self._own_slot_part(parts[index], slot, value) for slot, value in slots.items()}
            for index, slots in state_dict["state"].items()
        }
        return {**state_dict, "state": slots_by_index}

    def _end_load_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self._replace_parameters(optimizer, self._whole_by_part_id)

    def _own_slot_part(self, part: nn.Parameter, slot: str, value: Any) -> Any:
        """Return this rank's part of an optimiser-state tensor that belongs to a whole parameter."""
        name = self._name_by_part_id.get(id(part))
        return value if name is None else self.parameters.own_slot_part(name, slot, value)

    def _gather_slot(self, part: nn.Parameter, slot: str, value: Any) -> Any:
        """Return a value in an optimiser's state for the whole parameter, given this rank's part. Collective."""
        shard, share = self.parameters.shards[self._name_by_part_id[id(part)]]
        if share is None or not isinstance(value, torch.Tensor) or value.shape != part.shape:
            return value
        return torch.from_numpy(shard.slot_shard(slot, share).gather(as_array(value)))

    @staticmethod
    def _replace_parameters(optimizer: torch.optim.Optimizer, replacements_by_id: Mapping[int, nn.Parameter]) -> None:
        for group in optimizer.param_groups:
            group["params"] = [replacements_by_id.get(id(tensor), tensor) for tensor in group["params"]]


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser gives the same result if a parameter is updated in two halves."""
    parameters = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in parameters}
    try:
        return TorchOptimizer(type(optimizer), options).elementwise
    except ConfigError:  # the optimiser cannot be constructed from its defaults
        return False
