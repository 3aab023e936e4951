"""A module's trained parameters and gradients as views of flat buffers, for synchronisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ...comm import ProcessGrid
from ...errors import ConfigError
from ...geometry import GridShape
from ...layers import Parameter
from ...parallel import AllReduce, GradientSync, Parameters, ParameterShard
from ...plan import ParameterPlan
from ...strategies import Strategy, StrategyBuilder, as_strategy
from ...strategies.shares import OwnerBoxes
from .weights import as_array, optimizer_state_tensors

MODULE_KEY = "module"
"""Layer name of a module's arrays in checkpoints and strategies."""


def sparse_embedding_weights(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of embeddings with `sparse=True`, whose gradients have few nonzero rows."""
    embedding_classes = (nn.Embedding, nn.EmbeddingBag)
    return {part.weight for part in module.modules() if isinstance(part, embedding_classes) and part.sparse}


def parameters_by_name(
    tensors: Mapping[str, nn.Parameter], sparse: AbstractSet[torch.Tensor] = frozenset()
) -> dict[str, Parameter]:
    """Return the parameters of a module by their names in checkpoints and strategies.

    The number of rows of a sparse parameter that a sample uses is not known in advance, so all rows are assumed.
    """
    return {
        f"{MODULE_KEY}/{name}": Parameter(
            tuple(tensor.shape), max_rows_per_sample=tensor.shape[0] if tensor in sparse else 0
        )
        for name, tensor in tensors.items()
    }


def whole_arrays(tensors: Mapping[str, torch.Tensor], grid: ProcessGrid) -> list[tuple[ParameterShard, np.ndarray]]:
    """Return a module's tensors, which are whole on every rank, as arrays of a checkpoint."""
    arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
    return [(ParameterShard(MODULE_KEY, n, Parameter(array.shape), grid), array) for n, array in arrays.items()]


def plan_parameters(
    tensors: Mapping[str, nn.Parameter],
    grid: GridShape,
    strategy: StrategyBuilder | Strategy | str | None,
    sparse: AbstractSet[torch.Tensor] = frozenset(),
) -> ParameterPlan:
    """Return the plan of a module's parameters, including sparse parameters, under a strategy."""
    dtype = as_array(next(iter(tensors.values()))).dtype
    builder = None if strategy is None else as_strategy(strategy)
    return ParameterPlan(parameters_by_name(tensors, sparse), grid, dtype, 0, builder)


class ModuleParameters(Parameters):
    """The trained parameters of a module.

    Their data and gradients become views of flat buffers: a gradient is moved to its buffer as soon as it is complete,
    and contains only this rank's contribution until `sum_gradients` has returned. Gradients that autograd does not
    compute remain None.

    Parameters
    ----------
    tensors : mapping of str to torch.nn.Parameter
        The module's parameters by name, on the CPU and of one dtype.
    sparse : set of torch.nn.Parameter, optional
        Tables for which only changed rows are sent, with their ids.

    Attributes
    ----------
    optimizer_parameters : dict of str to torch.nn.Parameter
        Parameters for this rank's optimiser: whole parameters of the module, or the parts that this rank owns, which
        are views or copies. All are contiguous, as PyTorch's fused optimisers require.

    Raises
    ------
    ConfigError
        Parameters are not all float32, or all float64, on the CPU; or they already belong to a DistributedOptimizer.
    """

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        grid: ProcessGrid,
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, OwnerBoxes] | None = None,
        gradient_compressors: Mapping[str, str] | None = None,
        sparse: AbstractSet[torch.Tensor] = frozenset(),
    ) -> None:
        if any(_is_synchronised(tensor) for tensor in tensors.values()):
            raise ConfigError("model: already has a DistributedOptimizer; use it, or distribute a copy of the module")
        dtypes_and_devices = {f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors.values()}
        if not dtypes_and_devices <= {"torch.float32 on cpu"} and not dtypes_and_devices <= {"torch.float64 on cpu"}:
            raise ConfigError(
                f"strategy: the parameters are {', '.join(sorted(dtypes_and_devices))}; convert all to float32,"
                " or all to float64, on the CPU"
            )
        dtype = as_array(next(iter(tensors.values()))).dtype if tensors else np.dtype("float32")
        names_and_parameters = zip(tensors, parameters_by_name(tensors, sparse).values(), strict=True)
        shards = [ParameterShard(MODULE_KEY, name, parameter, grid) for name, parameter in names_and_parameters]
        super().__init__(grid, shards, partial(np.zeros, dtype=dtype), sync, shares, gradient_compressors)
        self.tensors = dict[str, nn.Parameter]()
        self.optimizer_parameters = dict[str, nn.Parameter]()
        self._value_views = dict[str, torch.Tensor]()
        self._gradient_views = dict[str, torch.Tensor]()
        self._earlier_sums: np.ndarray | None = None
        arrays = zip(
            self.trained_shards, self._shares, self.split_flat(self.values), self.split_flat(self.grads), strict=True
        )
        for shard, share, value, gradient in arrays:
            tensor = self.tensors[shard.name] = tensors[shard.name]
            value[...] = as_array(tensor)
            self._value_views[shard.name] = torch.from_numpy(value)
            self._gradient_views[shard.name] = torch.from_numpy(gradient)
            earlier_gradient = tensor.grad
            tensor.grad = None
            tensor.data = self._value_views[shard.name]
            if earlier_gradient is not None:  # gradient of earlier passes, summed over the ranks
                tensor.grad = self._gradient_views[shard.name].copy_(earlier_gradient.to_dense())
            self.optimizer_parameters[shard.name] = tensor
            if share is not None:
                own_parameter = nn.Parameter(self.own_part(share, tensor.data).contiguous())
                self.optimizer_parameters[shard.name] = own_parameter
                if earlier_gradient is not None:
                    own_parameter.grad = self.own_part(share, self._gradient_views[shard.name]).contiguous()
                    tensor.grad = None
        self.shards = {
            shard.name: (shard, share) for shard, share in zip(self.trained_shards, self._shares, strict=True)
        }
        spans = {shard.name: span for shard, span in zip(self.trained_shards, self.spans, strict=True)}
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._copy_and_mark_ready, name, spans[name]))
            for name, tensor in self.tensors.items()
        ]

    def close(self) -> None:
        """Remove the hooks from the module's parameters."""
        for hook in self._hooks:
            hook.remove()

    def reset_gradients(self) -> None:
        """Reset all gradients to None."""
        self.sync.begin_step()
        for tensor in self.tensors.values():
            tensor.grad = None

    def sum_gradients(self, to_owners: bool = False, loss_scale: float = 1.0) -> None:
        """Sum gradients over all ranks (`to_owners`: at their owners only), and divide by `loss_scale`. Collective."""
        for name, tensor in self.tensors.items():
            if tensor.grad is None:
                self._gradient_views[name].zero_()
        super().sum_gradients(to_owners, loss_scale)
        if self._earlier_sums is not None:
            self.grads += self._earlier_sums
            self._earlier_sums = None
        for name, (_, share) in self.shards.items():
            if share is not None:
                has_gradient = self.tensors[name].grad is not None
                own_gradient = self.own_part(share, self._gradient_views[name]).contiguous() if has_gradient else None
                self.optimizer_parameters[name].grad = own_gradient

    def set_aside_gradient_sums(self) -> None:
        """Keep the gradient sums of earlier passes, to which `sum_gradients` adds, and set the gradients to zero."""
        names = [name for name, part in self.optimizer_parameters.items() if part.grad is not None]
        for name in names:
            _, share = self.shards[name]
            if share is None:
                self._copy_gradient_to_buffer(name)
            else:
                own_view = self.own_part(share, self._gradient_views[name])
                _copy_if_separate(self.optimizer_parameters[name].grad, own_view)
            self.tensors[name].grad = self._gradient_views[name]
        self._earlier_sums = self.grads.copy() if names else None
        self.grads[...] = 0

    def broadcast_from_owners(self, previous_sparse_parts: list[Any] | None = None) -> None:
        """Receive, from their owners, the values that this rank does not own. Collective."""
        self.version += 1
        for part, own in self._owned_parts():
            _copy_if_separate(own, part)
        self.owners.broadcast_from_owners(self.values[self.owned_start :], previous_sparse_parts)

    @contextmanager
    def optimizer_update(self) -> Iterator[None]:
        """Context in which an optimiser updates the values that this rank owns. Collective.

        On exit, each rank receives the values of other owners; for sparse parameters, only changed rows are sent.

        Raises
        ------
        ConfigError
            The dtype, shape or device of a parameter has changed.
        """
        self.adopt_assigned_data()
        previous_sparse_parts = self.owners.copy_own_sparse_parts(self.values[self.owned_start :])
        yield
        self.broadcast_from_owners(previous_sparse_parts)

    def _owned_parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the parts that this rank owns in the flat buffer, each with the optimiser's tensor."""
        for name, (_, share) in self.shards.items():
            if share is not None:
                yield self.own_part(share, self._value_views[name]), self.optimizer_parameters[name].data

    def adopt_assigned_data(self) -> None:
        """Move values that were assigned to `data`, for example by initialisers, into the flat buffer.

        Also copies the values to the optimiser's parts.

        Raises
        ------
        ConfigError
            The dtype, shape or device of a parameter has changed.
        """
        for name, tensor in self.tensors.items():
            value = self._value_views[name]
            if tensor.data_ptr() != value.data_ptr():
                self._check_unconverted(name)
                value.copy_(tensor.data)
                tensor.data = value
        for part, own in self._owned_parts():
            _copy_if_separate(part, own)

    def _check_unconverted(self, name: str) -> None:
        """Raise ConfigError if a parameter's shape, dtype or device differs from its part of the flat buffer."""
        current, original = (
            f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
            for tensor in (self.tensors[name], self._value_views[name])
        )
        if current != original:
            raise ConfigError(
                f"model: parameter '{name}' is {current}, but was {original} when its optimiser was created; convert"
                " the module before you create the optimiser"
            )

    def partition_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace parameters in an optimiser's groups and state with this rank's parts; return the optimiser.

        An optimiser is created with whole parameters, since its groups may depend on their shapes and identities.
        """
        names: dict[torch.Tensor, str] = {tensor: name for name, tensor in self.tensors.items()}
        for group in optimizer.param_groups:
            group["params"] = [self.optimizer_parameters[names[tensor]] for tensor in group["params"]]
        for tensor, slots in [*optimizer.state.items()]:
            del optimizer.state[tensor]
            own_slots = {slot: self.own_slot_part(names[tensor], slot, value) for slot, value in slots.items()}
            optimizer.state[self.optimizer_parameters[names[tensor]]] = own_slots
        return optimizer

    def own_slot_part(self, name: str, slot: str, value: Any) -> Any:
        """Return this rank's part of a value in an optimiser's state for a whole parameter."""
        share = self.shards[name][1]
        if share is None or slot == "step" or not isinstance(value, torch.Tensor):
            return value
        if value.shape != self.tensors[name].shape:
            return value
        return self.own_part(share, value).clone(memory_format=torch.contiguous_format)

    def optimizer_slots(self, optimizer: torch.optim.Optimizer) -> list[tuple[ParameterShard, Any]]:
        """Return an optimiser's state: this rank's parts of slots shaped like parameters, and other slots whole."""
        slots = []
        for full_name, tensor in optimizer_state_tensors(self.optimizer_parameters, optimizer).items():
            name, _, slot = full_name.rpartition("/")
            shard, share = self.shards[name]
            array = as_array(tensor)
            if tensor.shape == self.optimizer_parameters[name].shape:
                slots.append((shard.slot_shard(slot, share), array))
            else:
                slots.append((ParameterShard(MODULE_KEY, full_name, Parameter(array.shape), self.grid), array))
        return slots

    def _copy_and_mark_ready(self, name: str, span: tuple[int, int], tensor: torch.Tensor) -> None:
        """Move a complete gradient into the flat buffer, and mark its span as ready to be summed."""
        self._copy_gradient_to_buffer(name)
        self.sync.mark_ready(span)

    def _copy_gradient_to_buffer(self, name: str) -> None:
        tensor, view = self.tensors[name], self._gradient_views[name]
        if tensor.grad is not None and (tensor.grad.is_sparse or tensor.grad.data_ptr() != view.data_ptr()):
            if tensor.dtype != view.dtype:
                self._check_unconverted(name)
            view.copy_(tensor.grad.to_dense())
            tensor.grad = view

    def own_part(self, share: OwnerBoxes, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of a whole tensor, such as a gradient, that this rank owns."""
        return tensor.reshape(share.shape)[share.boxes[self.grid.rank].slices]


def _copy_if_separate(source: torch.Tensor | None, target: torch.Tensor) -> None:
    if source is not None and source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _is_synchronised(tensor: nn.Parameter) -> bool:
    hooks = (tensor._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(getattr(getattr(hook, "func", None), "__self__", None), ModuleParameters) for hook in hooks)
