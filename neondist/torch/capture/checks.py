"""Validation of user arguments, with error messages."""

from __future__ import annotations

import difflib
import inspect
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from ...comm import ProcessGrid
from ...comm.agreement import ROW_BYTES, ROWS_PER_CHECKSUM
from ...errors import ConfigError, ShapeError
from ..lowering.plan import TorchPlan
from .consistency import as_bytes_tensor


def check_gather_at_paths(module: nn.Module, gather_at: Sequence[str]) -> None:
    """Raise ConfigError, with suggestions, unless all of `gather_at` are paths of submodules."""
    if isinstance(gather_at, str):
        raise ConfigError(f"gather_at: expected a list of module paths, got a string; use [{gather_at!r}]")
    paths = [path for path, _ in module.named_modules()]
    for path in gather_at:
        if path not in paths:
            suggestions = difflib.get_close_matches(path, paths, 3, 0.4)
            hint = f"; did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
            raise ConfigError(f"gather_at: the module has no submodule named {path!r}{hint or '; see named_modules()'}")


_UNWRAP_REMEDY = "pass model.module, not its {} wrapper; distribute itself sums gradients over all ranks"
_WRAPPER_REMEDIES = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _UNWRAP_REMEDY.format("DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"): _UNWRAP_REMEDY.format("DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): _UNWRAP_REMEDY.format("FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"): "call distribute instead of fully_shard",
}
"""Remedies for wrappers, by module and class name, since importing the classes is slow."""


def check_module(module: nn.Module) -> None:
    """Raise ConfigError for modules that cannot be captured or would behave differently than in a single process."""
    for path, part in module.named_modules():
        name = f"the module {path!r}" if path else "the module"
        for kind in type(part).__mro__:
            if remedy := _WRAPPER_REMEDIES.get((kind.__module__.partition("._")[0], kind.__name__)):
                raise ConfigError(f"{name} is wrapped in {kind.__name__}, which communicates tensors itself; {remedy}")
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name} was created by torch.jit and cannot be captured; pass the nn.Module from which it was created"
            )
        if part._backward_hooks or part._backward_pre_hooks:
            raise ConfigError(
                f"{name} has a backward hook, which would not be called; remove the hook, or register it on the module"
                " that distribute returns"
            )
        if any(nn.parameter.is_lazy(p) for p in part._parameters.values()):
            raise ConfigError(f"{name} is lazy and has no weights yet; call the module once on a small image first")


def check_tensor(name: str, value: Any) -> None:
    """Raise ShapeError unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        hint = "; use torch.from_numpy to convert an array" if hasattr(value, "__array__") else ""
        raise ShapeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}{hint}")


REMEDY_FOR_ARGUMENTS = "wrap it in a module whose forward passes the other arguments"


def bind_inputs(module: nn.Module, tiles: Sequence[Any], named_tiles: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return tiles in the order of a module's arguments; raise ConfigError if they are not its first arguments."""
    name = type(module).__name__
    try:
        bound = inspect.signature(module.forward).bind(*tiles, **named_tiles)
    except TypeError as error:
        raise ConfigError(f"{name}.forward: {error}") from None
    if bound.kwargs:
        raise ConfigError(
            f"{name}.forward: a distributed module takes a tile of each input, in the order of example_shape, but not"
            f" {', '.join(bound.kwargs)}; {REMEDY_FOR_ARGUMENTS}"
        )
    return bound.args


def check_not_traced(tiles: Sequence[Any]) -> None:
    """Raise ConfigError if a distributed module is being captured or transformed: its messages would be lost."""
    tensors = [tile for tile in tiles if isinstance(tile, torch.Tensor)]
    is_transformed = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    is_transformed |= any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    is_exported = torch.compiler.is_exporting() or any(isinstance(tensor, FakeTensor) for tensor in tensors)
    if is_transformed or is_exported or torch.jit.is_tracing():
        raise ConfigError(
            "a distributed module exchanges messages, and cannot be traced or transformed, such as by torch.jit.trace,"
            " torch.export, torch.onnx, torch.func or forward_ad; apply them to the original module, model.module,"
            " which has the same weights"
        )


def check_parameter_shapes(
    plan: TorchPlan, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Raise ConfigError if a tensor of the module has changed shape or was removed since the capture."""
    for kind, ids, tensors in (("parameter", plan.parameters, parameters), ("buffer", plan.buffers, buffers)):
        for name, value in ids.items():
            shape = plan.values[value].shape
            if name not in tensors or tensors[name].shape != shape:
                change = f"now has shape {tuple(tensors[name].shape)}" if name in tensors else "was removed"
                raise ConfigError(f"the module's {kind} {name!r}, of shape {shape}, {change}; call distribute again")


def requires_grad_flags(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the `requires_grad` flag of each tensor; these flags determine the messages of the backward pass."""
    return {f"requires_grad of {name} {index}": tensor.requires_grad for index, tensor in enumerate(tensors)}


def checksum_of(tensor: torch.Tensor) -> int:
    """Return the checksum of `comm.agreement.checksum_of` for a tensor, computed on the tensor's device."""
    seed = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.is_meta or not tensor.numel():
        return seed
    tensor_bytes = as_bytes_tensor(tensor)
    chunked_end = tensor_bytes.numel() // (ROWS_PER_CHECKSUM * ROW_BYTES) * (ROWS_PER_CHECKSUM * ROW_BYTES)
    if tensor_bytes.storage_offset() % 8:
        chunked_end = 0
    chunk_sums = tensor_bytes[:chunked_end].view(torch.int64).view(-1, ROWS_PER_CHECKSUM, ROW_BYTES // 8).sum(1)
    return zlib.crc32(tensor_bytes[chunked_end:].cpu().numpy().data, zlib.crc32(chunk_sums.cpu().numpy().data, seed))


class _BackwardPass:
    """State of the current backward pass, shared by the models of a grid."""

    def __init__(self) -> None:
        self.task_id = -1
        self.output_versions = WeakIdKeyDictionary()
        # gradients that losses and downstream models have sent to outputs in this pass, by the output's id;
        # the key None is present if they have sent any to tensors computed from outputs
        self.sent_gradients: dict[int | None, list[torch.Tensor]] = {}


class BackwardEntryCheck:
    """Check that all ranks begin a backward pass together, and warn about losses not computed by `model.loss`.

    A gradient of a model's output is correct if it comes entirely from `model.loss`. Any other gradient is treated
    as the gradient of this rank's part of a sum over ranks, which is wrong for a mean over a tile.

    Parameters
    ----------
    values : mapping
        Values that must be equal on all ranks whenever a backward pass begins.
    """

    def __init__(self, grid: ProcessGrid, values: Mapping[str, Any]) -> None:
        self._grid, self._values = grid, values
        self._has_warned, self._loss_count = False, 0
        self._pass: _BackwardPass = grid.cached_objects.setdefault(_BackwardPass, _BackwardPass())

    def alias_of_output(self, output: Any) -> Any:
        """Return an alias of an output; its gradient excludes contributions from uses inside the module."""
        return output.view_as(output) if isinstance(output, torch.Tensor) and output.requires_grad else output

    def check_gradient_of_output(self, output: torch.Tensor, is_scattered_target: Callable[..., Any]) -> None:
        """Check the gradient of an output; `is_scattered_target` recognises results of `scatter_target`."""
        if self._grid.size > 1 and output.requires_grad:
            output_id = id(output)
            output.register_hook(lambda gradient: self._check_output_gradient(gradient, output_id, is_scattered_target))
            self._pass.output_versions[output] = output._version

    def alias_for_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a model to read, an alias unless it is a leaf; the model's gradients cause no warning."""
        return tensor if tensor.is_leaf else self.alias_for_loss(tensor)

    def check_backward_of_loss(self, loss: torch.Tensor) -> None:
        """Compare `values` over all ranks when the backward pass of a loss begins."""
        if self._grid.size > 1 and loss.requires_grad:
            self._loss_count += 1
            loss.register_hook(partial(self._check_loss_backward_begins, f"backward of loss {self._loss_count}"))

    def alias_for_loss(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor for a loss to read, and record the gradient that the loss sends back."""
        if self._grid.size == 1 or not tensor.requires_grad:
            return tensor
        output_id = id(tensor) if self._pass.output_versions.get(tensor) == tensor._version else None
        alias = tensor.view_as(tensor)
        alias.register_hook(lambda gradient: self._record_loss_gradient(gradient, output_id))
        return alias

    def _check_loss_backward_begins(self, event: str, gradient: torch.Tensor) -> None:
        on_host = gradient.device.type == "cpu"  # reading the gradient would synchronise a GPU
        self._check_backward_begins(event, {"gradient of the loss": f"{gradient.item():.5g}"} if on_host else {})

    def _check_backward_begins(self, event: str, values: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._grid.check(event, {**self._values, **values})
        task_id = torch._C._current_graph_task_id()
        if self._pass.task_id != task_id:
            self._pass.task_id = task_id
            self._pass.sent_gradients.clear()

    def _record_loss_gradient(self, gradient: torch.Tensor, output_id: int | None) -> None:
        if self._pass.task_id != torch._C._current_graph_task_id():  # the pass begins here, not at a loss
            self._check_backward_begins("backward of an output")
        sent_gradients = self._pass.sent_gradients.setdefault(output_id, [])
        if output_id is not None:
            sent_gradients.append(gradient)

    def _check_output_gradient(
        self, gradient: torch.Tensor, output_id: int, is_scattered_target: Callable[..., Any]
    ) -> None:
        if self._pass.task_id != torch._C._current_graph_task_id():
            self._check_backward_begins("backward of an output")
        sent_gradients = self._pass.sent_gradients.pop(output_id, [])
        if self._has_warned or None in self._pass.sent_gradients or is_scattered_target(gradient):
            return
        if not sent_gradients or not _is_sum_of(gradient, sent_gradients):
            self._has_warned = True
            warnings.warn(_FOREIGN_GRADIENT_WARNING, stacklevel=2)


_FOREIGN_GRADIENT_WARNING = (
    "an output of a distributed module received a gradient that does not come from model.loss: it is treated as the"
    " gradient of this rank's part of a sum over all ranks, so a mean over a tile counts once per rank. Use"
    " model.loss(criterion, output, model.scatter_target(target)); or divide sums by the sizes of the whole images,"
    " and ignore this warning"
)


def _is_sum_of(gradient: torch.Tensor, addends: Sequence[torch.Tensor]) -> bool:
    if len(addends) == 1:
        return gradient.data_ptr() == addends[0].data_ptr() or torch.equal(gradient, addends[0])
    return torch.allclose(gradient, torch.stack(tuple(addends)).sum(0), equal_nan=True)
