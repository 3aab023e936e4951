"""Access of hooks and checkpoints to a model created in an AutoDist scope."""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...comm import ProcessGrid
from ...errors import ConfigError
from ...models import TrainingScriptAdapter
from ...parallel import ParameterShard
from ...terminal.console import counted
from ..module.module_scope import ModuleScope
from ..module.parameters import MODULE_KEY, whole_arrays
from ..module.weights import as_array, create_optimizer_state, optimizer_state_tensors, state_tensors
from .losses_and_optimizers import updates_any
from .partitioned_steps import PartitionedOptimizerSteps
from .script import ModuleScriptAdapter


class ScopeScriptAdapter(ModuleScriptAdapter):
    """Adapter that gives hooks and checkpoints access to a model created in an AutoDist scope, its optimiser and
    PyTorch's random state.

    Parameters
    ----------
    optimizer_steps : PartitionedOptimizerSteps, optional
        Object that partitions the optimiser's steps over the ranks.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        optimizer_steps: PartitionedOptimizerSteps | None,
        grid: ProcessGrid,
    ) -> None:
        TrainingScriptAdapter.__init__(self, grid)
        self.model, self.optimizer = model, optimizer
        self.optimizer_steps, self.sharded_parameters = optimizer_steps, None
        self.step_counter, self.named_parameters = self, model.named_parameters
        self.dtype = as_array(next(model.parameters())).dtype

    @classmethod
    def create(cls, scope: ModuleScope, optimizer_steps: PartitionedOptimizerSteps | None) -> list[Any]:
        """Return the adapter for a scope's model and optimiser, followed by the optimiser's schedulers.

        Raises
        ------
        ConfigError
            There is not exactly one model and one optimiser.
        """
        parameter_ids = set(map(id, scope.parameters.values()))
        optimizers = [item for item in _live_instances(torch.optim.Optimizer) if updates_any(item, parameter_ids)]
        if len(scope.models) != 1 or len(optimizers) != 1:
            counts_text = f"{counted(len(scope.models), 'model')} and {counted(len(optimizers), 'optimiser')}"
            raise ConfigError(
                f"session: the scope has {counts_text}, but a session takes one of each; combine the modules, and"
                " create one optimiser before the session"
            ).mark_raised_on_all_ranks()
        schedulers = [item for item in _live_instances(LRScheduler) if item.optimizer is optimizers[0]]
        inner_scheduler_ids = {id(part) for item in schedulers for part in getattr(item, "_schedulers", ())}
        outer_schedulers = sorted(
            (item for item in schedulers if id(item) not in inner_scheduler_ids), key=lambda item: type(item).__name__
        )
        return [cls(scope.models[0], optimizers[0], optimizer_steps, scope.grid), *outer_schedulers]

    @property
    def display_name(self) -> str:
        """Name of the model in headlines and messages."""
        return type(self.model).__name__

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return the model's state and this rank's parts of the optimiser's state."""
        slot_names = [name.removeprefix(f"{MODULE_KEY}/") for name in slots]
        weights = whole_arrays(state_tensors(self.model), self.grid)
        if self.optimizer_steps is None:
            tensors = dict(self.model.named_parameters())
            create_optimizer_state(tensors, self.optimizer, slot_names)
            state = optimizer_state_tensors(tensors, self.optimizer)
            return {"model": weights, "optimizer": whole_arrays(state, self.grid)}
        parameters = self.optimizer_steps.parameters
        with self.optimizer_steps.expose_own_parts(self.optimizer):
            create_optimizer_state(parameters.optimizer_parameters, self.optimizer, slot_names)
        return {"model": weights, "optimizer": parameters.optimizer_slots(self.optimizer)}


def _live_instances(instance_class: type) -> list[Any]:
    """Return all existing objects of a class, as optimisers and schedulers are not registered on creation."""
    return [item for item in gc.get_objects() if issubclass(type(item), instance_class)]
