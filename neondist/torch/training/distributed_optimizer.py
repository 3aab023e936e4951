"""PyTorch optimisers for distributed modules, partitioned by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as hooks

from ...comm import all_or_none
from ...errors import ConfigError, NonFiniteError
from ...geometry import part_range
from ...io.checkpoint.sync_state import SYNC_GROUP as SYNCHRONISATION
from ...parallel import ControlFlag, ParameterShard, SyncState
from ...strategies import Strategy, StrategyBuilder
from ..module.module import DistributedModule
from ..module.parameters import ModuleParameters, plan_parameters, sparse_embedding_weights
from ..module.weights import PartitionedOptimizer, as_array, create_optimizer_state
from .losses_and_optimizers import TorchOptimizer, updates_any

_PLAIN_TYPES = bool, int, float, str, tuple


class DistributedOptimizer(PartitionedOptimizer):
    """A torch.optim optimiser partitioned over the ranks by a strategy. Construction is collective.

    Gradients are synchronised when `backward` returns. Gradients of parameters with owners are then None in the module,
    and are stored in `param_groups` of the owners: clip them with this class's `clip_grad_norm_`.

    Parameters
    ----------
    model : DistributedModule
        A module returned by `distribute`. Its parameters become views of one flat buffer.
    optimizer : class
        Optimiser class, such as torch.optim.Adam, or a function of a list of parameters and the arguments. It is first
        called with other parameters, to check the optimiser; groups must consist of parameters in the list.
    strategy : StrategyBuilder or Strategy or str, optional
        A builder of `nd.strategies`, its name, or the path of a strategy file. Default: AllReduce.
    **arguments
        Further arguments of the optimiser, such as lr.

    Raises
    ------
    ConfigError
        On every rank, if the strategy does not match the model or the grid, or partitions parameters that the optimiser
        can only update whole.

    Examples
    --------
    >>> optimizer = ndt.DistributedOptimizer(model, torch.optim.Adam, "ShardedOptimizer", lr=0.01)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: DistributedModule,
        optimizer: Callable[..., torch.optim.Optimizer],
        strategy: StrategyBuilder | Strategy | str | None = None,
        **arguments: Any,
    ) -> None:
        if not isinstance(model, DistributedModule):
            raise ConfigError(f"model: expected a module returned by distribute, got {type(model).__name__}")
        grid = model.grid
        settings = {f"the argument {key}": value for key, value in arguments.items() if isinstance(value, _PLAIN_TYPES)}
        optimizer_name = getattr(optimizer, "__qualname__", type(optimizer).__name__)
        grid.check("DistributedOptimizer", {"strategy": str(strategy), "optimizer": optimizer_name} | settings)
        with all_or_none(grid.world):
            optimizer_factory = TorchOptimizer(optimizer, arguments)
            tensors = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
            if not tensors:
                raise ConfigError("model: no parameter requires gradients; call requires_grad_() on those to train")
            sparse_weights = sparse_embedding_weights(model)
            plan = plan_parameters(tensors, grid.shape, strategy, sparse_weights)
            if plan.splits_parameters and not optimizer_factory.elementwise:
                raise ConfigError(
                    f"strategy: {optimizer_factory.constructor.__name__} needs whole parameters; use AllReduce"
                )
            self.parameters = ModuleParameters(
                tensors, grid, shares=plan.shares, gradient_compressors=plan.gradient_compressors, sparse=sparse_weights
            )
        self.grid, self.strategy = grid, plan.strategy
        self.optimizer = self.parameters.partition_optimizer(optimizer_factory.create(tensors.values()))
        names_by_part = {part: name for name, part in self.parameters.optimizer_parameters.items()}
        self._parameter_names = [
            names_by_part[part] for group in self.optimizer.param_groups for part in group["params"]
        ]
        self._overflow_parameter: torch.Tensor | None = None
        if self.parameters.names_with_owners:
            # GradScaler checks only the gradients that this rank owns, if any, but all ranks must skip the same steps
            self._overflow_parameter = torch.zeros(1, dtype=next(iter(tensors.values())).dtype, requires_grad=True)
            self.optimizer.param_groups[-1]["params"].append(self._overflow_parameter)
            self._partitioned_ids = {id(tensor) for name, tensor in tensors.items() if self.parameters.shards[name][1]}
            grid.on_close(hooks.register_optimizer_step_pre_hook(self._reject_other_optimizers).remove)
        self._has_frozen_param_groups = False
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self._has_frozen_param_groups = True
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.module, model.optimizer = model, self
        self._in_backward = False
        for tensor, parts in zip(tensors.values(), model.defer_gradients(tensors.values(), record=True), strict=True):
            # earlier hooks may have replaced the gradient computed on tiles
            tensor.register_hook(partial(self._prepare_gradient_for_sum, parts, not tensor._backward_hooks))

    def step(self, closure: Any = None) -> Any:
        """Update the parameters that this rank owns, and receive the others from their owners. Collective.

        Parameters
        ----------
        closure : callable, optional
            Function that computes the loss and its gradients, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.parameters.names_with_owners:
            self.grid.check("DistributedOptimizer.step")
        if self._overflow_parameter is not None:
            self._overflow_parameter.grad = None  # so that the optimiser creates no state for it
        with self.parameters.optimizer_update():
            self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module's parameters and of the parts owned by this rank."""
        for tensor in (*self.parameters.tensors.values(), *self.parameters.optimizer_parameters.values()):
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before scaling. Collective.

        As with `torch.nn.utils.clip_grad_norm_`, gradients are scaled even if the norm is not finite, unless
        `error_if_nonfinite` is set: then every rank raises NonFiniteError, and gradients are unchanged.
        """
        options = {"max_norm": float(max_norm), "error_if_nonfinite": error_if_nonfinite}
        self.grid.check("clip_grad_norm_", options)
        square_sums = {True: 0.0, False: 0.0}
        gradients = []
        for name, (_, share) in self.parameters.shards.items():
            if (gradient := self.parameters.optimizer_parameters[name].grad) is not None:
                gradients.append(gradient)
                square_sums[share is None] += float(gradient.double().square().sum())
        owned_square_sum = self.parameters.reductions.allreduce("world", np.array([square_sums[False]]))
        norm = torch.tensor(square_sums[True] + owned_square_sum[0]).sqrt()
        if error_if_nonfinite and not norm.isfinite():
            raise NonFiniteError(
                f"clip_grad_norm_: the norm of the gradients is {norm:g}; skip the step, or use a lower learning rate"
            ).mark_raised_on_all_ranks()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(float(scale))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the unpartitioned state, as an optimiser in a single process would. Collective.

        Compressors add their arrays as 'synchronisation'; arrays that differ between ranks are stacked by rank.
        """
        self.grid.check("DistributedOptimizer.state_dict")
        result = self._as_state_dict(self.gather_slots())
        sync_tensors = {}
        for state in self.parameters.compressed.sync_states():  # stacked by rank unless equal
            array = state.array.copy() if state.same_on_all_ranks else self.grid.world.allgather_array(state.array)
            sync_tensors[state.name] = torch.from_numpy(array)
        return result | ({SYNCHRONISATION: sync_tensors} if sync_tensors else {})

    def slots(self, slot_names: Iterable[str] = ()) -> list[tuple[ParameterShard, Any]]:
        """Return the optimiser state of this rank's parts; first create the slots 'PARAMETER/SLOT' in `slot_names`."""
        if self._overflow_parameter is not None:
            self._overflow_parameter.grad = None  # the step that creates slots must not update it
        create_optimizer_state(self.parameters.optimizer_parameters, self.optimizer, slot_names)
        return self.parameters.optimizer_slots(self.optimizer)

    def gather_slots(self, slot_names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
        """Return whole state tensors by 'PARAMETER/SLOT'; first create the slots in `slot_names`. Collective."""
        return {shard.name: torch.from_numpy(shard.gather(array)) for shard, array in self.slots(slot_names)}

    def load_slots(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `gather_slots`."""
        self.load_state_dict(self._as_state_dict(tensors))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks and with any strategy, or in one process."""
        parameters = self.parameters
        saved_slots = {self._parameter_names[index]: slots for index, slots in state_dict["state"].items()}
        self.slots(f"{name}/{slot}" for name in saved_slots for slot in saved_slots[name])
        state_by_index = {}
        for name, slots in saved_slots.items():
            shard, share = parameters.shards[name]
            parameter = parameters.optimizer_parameters[name]
            slot_shard = shard.slot_shard("", share)
            slot_values = self.optimizer.state[parameter]
            state_by_index[self._parameter_names.index(name)] = {
                slot: torch.from_numpy(np.array(slot_shard.own_part_of(as_array(value)), order="C"))
                if isinstance(value, torch.Tensor) and slot_values[slot].shape == parameter.shape
                else value
                for slot, value in slots.items()
            }
        groups = [{**group, "params": [*group["params"]]} for group in state_dict["param_groups"]]
        if self._overflow_parameter is not None:
            groups[-1]["params"].append(sum(len(group["params"]) for group in groups))
        self.optimizer.load_state_dict({"state": state_by_index, "param_groups": groups})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for sync_state in self.parameters.compressed.sync_states():
            self._restore_sync_state(sync_state, state_dict.get(SYNCHRONISATION, {}).get(sync_state.name))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Reject groups after construction: owners and the flat buffer are fixed."""
        if self._has_frozen_param_groups:
            raise ConfigError(
                "add_param_group: groups are fixed, because the strategy has partitioned the parameters; create a new"
                " optimiser"
            )
        super().add_param_group(param_group)

    def _as_state_dict(self, slots: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the `state_dict` of one process with whole state tensors by 'PARAMETER/SLOT'."""
        state_by_index: dict[int, dict[str, Any]] = {index: {} for index in range(len(self._parameter_names))}
        for full_name, tensor in slots.items():
            name, _, slot = full_name.rpartition("/")
            state_by_index[self._parameter_names.index(name)][slot] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        if self._overflow_parameter is not None:
            groups[-1]["params"].pop()
        return {"state": {index: slots for index, slots in state_by_index.items() if slots}, "param_groups": groups}

    def _reject_other_optimizers(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise ConfigError for another optimiser of parameters with owners, which would not see their gradients."""
        if updates_any(optimizer, self._partitioned_ids):
            raise ConfigError(
                f"step: a DistributedOptimizer partitions the parameters of this {type(optimizer).__name__}; call the"
                " DistributedOptimizer's step(), or train another copy of the module"
            ).mark_raised_on_all_ranks()

    def _restore_sync_state(self, state: SyncState, saved_tensor: torch.Tensor | None) -> None:
        """Restore an array of `state_dict`; if the number of ranks differs, preserve the sum over ranks."""
        shape = state.array.shape
        saved_array = None if saved_tensor is None else as_array(saved_tensor)
        if saved_array is not None and saved_array.shape[not state.same_on_all_ranks :] != shape:
            raise ConfigError(
                f"state_dict: {SYNCHRONISATION}: '{state.name}' has shape {saved_array.shape}; restore the same model"
            )
        if not state.same_on_all_ranks:
            saved_array = np.zeros((0, *shape)) if saved_array is None else saved_array
            lo, hi = part_range(len(saved_array), self.grid.size, self.grid.rank)
            state.array[...] = saved_array[lo:hi].sum(axis=0)
        elif saved_array is not None:
            state.array[...] = saved_array

    def _prepare_gradient_for_sum(
        self, contributions: list[torch.Tensor], is_first: bool, gradient: torch.Tensor
    ) -> Any:
        """Set aside the sums of earlier passes, and return the gradient to be summed over the ranks.

        Parameters
        ----------
        contributions : list of tensors
            Contributions of passes on this rank's tile. The rest of the gradient, such as that of a penalty on the
            parameters, is the same on all ranks.
        is_first : bool
            Whether the gradient comes directly from autograd.
        """
        if not self._in_backward:
            self._in_backward = True
            self.parameters.set_aside_gradient_sums()
            self.parameters.sync.begin_step()
            torch.autograd.Variable._execution_engine.queue_callback(self._synchronise_gradients)
        parts = contributions[:]
        contributions.clear()
        if not is_first or self.grid.size == 1 or (len(parts) == 1 and parts[0] is gradient):
            return None
        for part in parts:
            gradient = gradient - part
        return sum(parts, gradient / self.grid.size)

    def _synchronise_gradients(self) -> None:
        self._in_backward = False
        self.parameters.sum_gradients(to_owners=True)
        if self._overflow_parameter is not None:
            overflowed = self.parameters.sync.flag_header[ControlFlag.NON_FINITE]  # on some rank
            self._overflow_parameter.grad = torch.full_like(self._overflow_parameter, torch.inf if overflowed else 0)
        for name, (_, share) in self.parameters.shards.items():
            if share is not None:
                self.parameters.tensors[name].grad = None
