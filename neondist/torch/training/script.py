"""Training steps of a distributed module in a script, with the interface of a model for hooks and checkpoints."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, DataError, NonFiniteError
from ...io.checkpoint import from_json_value, to_json_value
from ...io.checkpoint.texts import require_json_integer, require_json_type
from ...models import TrainingScriptAdapter
from ...parallel import ParameterShard, SyncState
from ...terminal.console import counted
from ..module.module import DistributedModule
from ..module.parameters import MODULE_KEY, whole_arrays
from ..module.weights import as_array, create_optimizer_state, optimizer_state_tensors, state_tensors
from .distributed_optimizer import DistributedOptimizer


class ModuleScriptAdapter(TrainingScriptAdapter):
    """Distributed module with its optimiser and PyTorch's random state.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, optional
        Optimiser of the module's parameters: a DistributedOptimizer, or an optimiser replicated on every rank. None:
        nothing is trained.
    """

    def __init__(self, module: DistributedModule, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(module.grid)
        self.module, self.optimizer = module, optimizer
        self.step_counter: DistributedModule | TrainingScriptAdapter = module
        self.named_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] = module.named_parameters
        self.sharded_parameters = optimizer.parameters if isinstance(optimizer, DistributedOptimizer) else None
        if self.sharded_parameters is not None:
            self.sync = self.sharded_parameters.sync
        self.dtype = as_array(next(iter(module.parameters()), torch.zeros(()))).dtype

    @classmethod
    def from_objects(cls, objects: Iterable[Any]) -> tuple[ModuleScriptAdapter | None, list[Any]]:
        """Return the adapter for the distributed module and its optimiser (None without a module), and other objects.

        Raises
        ------
        ConfigError
            There are several modules or optimisers, an optimiser without a module, or a module that is not distributed.
        """
        other_objects = []
        modules, optimizers = list[DistributedModule](), list[torch.optim.Optimizer]()
        for item in objects:
            if isinstance(item, DistributedModule):
                modules.append(item)
            elif isinstance(item, torch.optim.Optimizer):
                optimizers.append(item)
                modules += [item.module] if isinstance(item, DistributedOptimizer) else []
            elif isinstance(item, nn.Module):
                raise ConfigError(
                    f"model: {type(item).__name__} is not distributed; give the result of ndt.distribute(module,"
                    " example_shape)"
                )
            else:
                other_objects.append(item)
        modules = list({id(module): module for module in modules}.values())
        optimizers = optimizers or [module.optimizer for module in modules if module.optimizer is not None]
        if len(modules) > 1 or len(optimizers) > 1:
            raise ConfigError(
                f"model: {counted(len(modules), 'module')} and {counted(len(optimizers), 'optimiser')} given, but a"
                " session takes one of each; wrap the modules in one, or give one optimiser with several groups"
            )
        if optimizers and not modules:
            raise ConfigError(f"model: {type(optimizers[0]).__name__} needs its module; give [module, optimizer]")
        return (cls(modules[0], optimizers[0] if optimizers else None) if modules else None), other_objects

    @property
    def display_name(self) -> str:
        """Name of the model in headlines and messages."""
        return type(self.module.module).__name__

    def check_checkpointable(self) -> None:
        """Raise ConfigError if there is no optimiser."""
        if self.optimizer is None:
            raise ConfigError(
                "model: the module has no optimiser to save; create an ndt.DistributedOptimizer for the module, or"
                " give [module, optimizer]"
            )

    def check_finite(self) -> None:
        """Raise NonFiniteError if a parameter on this rank is not finite."""
        for name, parameter in self.named_parameters():
            if not parameter.isfinite().all():
                raise NonFiniteError(
                    f"step {self.step}: parameter '{name}' is not finite; lower the learning rate, check the data, or"
                    " skip steps whose loss or gradients are not finite"
                )

    def count_step_and_sum_flags(self) -> None:
        """Count a step and sum the flags of all ranks; a DistributedOptimizer has summed them with the gradients."""
        if self.sharded_parameters is None:
            super().count_step_and_sum_flags()
        else:
            self.sync.flags.num_ranks_by_flag[:] = self.sync.flag_header
            self.step += 1

    @property
    def sync_states(self) -> Sequence[SyncState]:
        """Persistent state of gradient synchronisation."""
        return () if self.sharded_parameters is None else self.sharded_parameters.compressed.sync_states()

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return the state of the module and of the optimiser, named as in a TorchModel."""
        slot_names = [name.removeprefix(f"{MODULE_KEY}/") for name in slots]
        slot_arrays: list[tuple[ParameterShard, Any]] = []
        if isinstance(self.optimizer, DistributedOptimizer):
            slot_arrays = self.optimizer.slots(slot_names)
        elif self.optimizer is not None:
            tensors = dict(self.module.named_parameters())
            create_optimizer_state(tensors, self.optimizer, slot_names)
            slot_arrays = whole_arrays(optimizer_state_tensors(tensors, self.optimizer), self.grid)
        return {"model": whole_arrays(state_tensors(self.module), self.grid), "optimizer": slot_arrays}

    def settings(self) -> dict[str, Any]:
        """Return the settings of parameter groups, the module's forward count and the random states of all ranks."""
        group_settings = [
            {name: value for name, value in group.items() if name != "params"} for group in self._param_groups
        ]
        own_random_state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        random_states = self.grid.world.allgather(own_random_state)
        distinct_states = sorted(set(random_states))  # usually all ranks but the first have the same state
        return {
            "groups": to_json_value("param_groups", group_settings, "keep it outside the optimiser's parameter groups"),
            "forwards": self.step_counter.step,
            "random": {"states": distinct_states, "ranks": [distinct_states.index(state) for state in random_states]},
        }

    def restore_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore the result of `settings`; additional ranks take the random state of the last saved rank."""
        saved_groups = require_json_type("'groups'", settings.get("groups"), list)
        if len(saved_groups) != len(self._param_groups):
            raise DataError(
                f"has {counted(len(saved_groups), 'parameter group')}, but the optimiser has"
                f" {len(self._param_groups)}; create the optimiser with the same groups as the saved one"
            )
        for group, saved_group in zip(self._param_groups, saved_groups, strict=True):
            saved_settings = from_json_value(group, require_json_type("a group of parameters", saved_group, dict))
            group.update({name: value for name, value in saved_settings.items() if name != "params"})
        self.step_counter.step = require_json_integer("'forwards'", settings.get("forwards"))
        saved_random = require_json_type("'random'", settings.get("random"), dict)
        encoded_states = require_json_type("'states'", saved_random.get("states"), list)
        state_indices = require_json_type("'ranks'", saved_random.get("ranks"), list)
        saved_rank = min(self.grid.rank, len(state_indices) - 1)
        state_index = (
            require_json_integer("'ranks'", state_indices[saved_rank]) if state_indices else len(encoded_states)
        )
        if state_index >= len(encoded_states):
            raise ValueError("'random' has no state for this rank")
        encoded_state = require_json_type("a random state", encoded_states[state_index], str)
        random_state = bytearray(base64.b64decode(encoded_state, validate=True))
        try:
            torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"its random state is invalid ({error})") from None

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups
