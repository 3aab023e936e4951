"""Files of weights and optimiser state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...comm import SingleTransport, all_or_none, raise_if_any_failed
from ...comm.agreement import CALL_KEY, check_equal_on_ranks
from ...errors import ConfigError, DataError
from ...geometry import Box
from ...io.checkpoint import ArrayPart, WeightMatch, scatter_from_root
from ...io.checkpoint.weights import MAX_LISTED_NAMES
from ...io.files import atomic_replacement
from .module import DistributedModule
from .weights_file import import_safetensors, open_weights

OPTIMIZER_PREFIX = "optimizer/"
"""Prefix of the names of an optimiser's tensors."""
_STORAGE_DTYPES = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # dtypes that NumPy or HDF5 lack


class PartitionedOptimizer(torch.optim.Optimizer):
    """Optimiser whose state is partitioned over the ranks."""

    def gather_slots(self, slot_names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
        """Return whole state tensors by 'PARAMETER/SLOT'; first create the slots in `slot_names`. Collective."""
        raise NotImplementedError

    def load_slots(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `gather_slots`."""
        raise NotImplementedError


def save_weights(
    model: nn.Module, path: str | Path, optimizer: torch.optim.Optimizer | None = None, **metadata: int | float | str
) -> None:
    """Write a model's `state_dict` to a safetensors file atomically, on rank 0. Collective.

    Parameters
    ----------
    model : DistributedModule or torch.nn.Module
    path : path
        The file can be read on any number of ranks, and by any program that reads safetensors.
    optimizer : torch.optim.Optimizer, optional
        Optimiser of the model's parameters, or its DistributedOptimizer; its state is also written, as
        'optimizer/PARAMETER/NAME', but not learning rates and other settings, which the script sets, and not the error
        feedback of compressors.
    **metadata
        Numbers and strings for `load_weights` to return, such as step=100.

    Raises
    ------
    UserError
        On every rank: OutputError if the file cannot be written; ConfigError if an entry is not a tensor.
    """
    world = _world_of(model)
    check_equal_on_ranks(world, {CALL_KEY: "save_weights", "path": path, "optimizer": optimizer is not None})
    with all_or_none(world):
        tensors = state_tensors(model, optimizer)
        if world.rank == 0:
            copied_tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
            metadata_texts = {name: json.dumps(value) for name, value in metadata.items()}
            content = import_safetensors().torch.save(copied_tensors, metadata_texts or None)
            with atomic_replacement(Path(path)) as file:
                file.write(content)


def load_weights(model: nn.Module, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load weights written by `save_weights` or another program, and return the metadata stored with them. Collective.

    Parameters
    ----------
    model : DistributedModule or torch.nn.Module
    path : path
        File in safetensors format, or from torch.save (.pt, .pth, .ckpt, .bin) with a state_dict, at top level or
        under a key such as 'model' or 'state_dict'. Rank 0 reads the file, which must contain all of the model's
        state; values of another precision are converted.
    optimizer : torch.optim.Optimizer, optional
        Optimiser whose state is also restored from the file.

    Raises
    ------
    DataError
        On every rank, with the model unchanged: the file is missing or damaged, or names or shapes differ.
    """
    world, path = _world_of(model), Path(path)
    check_equal_on_ranks(world, {CALL_KEY: "load_weights", "path": path, "optimizer": optimizer is not None})
    with ExitStack() as stack:
        weights_file = header = None
        with all_or_none(world):
            if world.rank == 0:
                weights_file = stack.enter_context(open_weights(path))
                header = weights_file.shapes, weights_file.metadata
        shapes, metadata = world.bcast(header)
        if optimizer is None:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(OPTIMIZER_PREFIX)}
        with all_or_none(world):
            if optimizer is not None:
                slot_names = (name[len(OPTIMIZER_PREFIX) :] for name in shapes if name.startswith(OPTIMIZER_PREFIX))
                if isinstance(optimizer, PartitionedOptimizer):
                    optimizer.gather_slots(slot_names)
                else:
                    create_optimizer_state(dict(model.named_parameters()), optimizer, slot_names)
            tensors = state_tensors(model, optimizer)
            check_names_and_shapes(path, shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        loaded_tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        arrays = {name: as_array(tensor) for name, tensor in loaded_tensors.items()}
        array_parts = [ArrayPart(name, array.shape, array, [Box.of(array.shape)]) for name, array in arrays.items()]

        @lru_cache(1)
        def read_array(name: str) -> np.ndarray:
            assert weights_file is not None
            tensor = weights_file.read_tensor(name)
            if loaded_tensors[name].is_floating_point() and not (tensor.is_floating_point() or tensor.is_complex()):
                raise DataError(
                    f"{path}: {name} contains {tensor.dtype} values, but the module's are {loaded_tensors[name].dtype};"
                    " write floating-point weights"
                )
            return as_array(tensor.to(loaded_tensors[name].dtype))

        error: Exception | None = None
        try:
            scatter_from_root(world, array_parts, lambda part, place: read_array(part.name)[place])
        except DataError as problem:
            error = problem
        except Exception as problem:  # the file has changed since it was opened
            error = DataError(f"{path}: cannot be read ({problem}); restore it from a copy, or specify another file")
        raise_if_any_failed(world, error)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(loaded_tensors[name])
    if isinstance(optimizer, PartitionedOptimizer):
        loaded_slot_names = (name for name in loaded_tensors if name.startswith(OPTIMIZER_PREFIX))
        optimizer.load_slots({name[len(OPTIMIZER_PREFIX) :]: loaded_tensors[name] for name in loaded_slot_names})
    return dict(metadata)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's and an optimiser's state by name; only partitioned state is copied."""
    tensors = dict(model.state_dict())
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"the state {name!r} is a {type(value).__name__}, not a tensor; remove it")
    slots: dict[str, torch.Tensor] = {}
    if isinstance(optimizer, PartitionedOptimizer):
        slots = optimizer.gather_slots()
    elif optimizer is not None:
        slots = optimizer_state_tensors(dict(model.named_parameters()), optimizer)
    return tensors | {OPTIMIZER_PREFIX + name: value for name, value in slots.items()}


def optimizer_state_tensors(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return an optimiser's state tensors by 'PARAMETER/SLOT', without copying."""
    slots: dict[str, torch.Tensor] = {}
    name_by_parameter: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    for parameter, state in optimizer.state.items():
        if parameter not in name_by_parameter:
            raise ConfigError(
                "optimizer: has a parameter that is not the model's; create the optimiser from model.parameters()"
            )
        for slot, value in state.items():
            if value is not None and not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__} keeps {slot!r} as a {type(value).__name__}, but files"
                    " contain only tensors; use another optimiser"
                )
            if value is not None:
                slots[f"{name_by_parameter[parameter]}/{slot}"] = value
    return slots


def create_optimizer_state(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, slot_names: Iterable[str]
) -> None:
    """Make an optimiser create its per-parameter state by taking a step; the parameters are restored.

    Parameters
    ----------
    slot_names : iterable of str
        Slots as named by `optimizer_state_tensors`; the caller must overwrite their values.
    """
    parameter_names = {name.rpartition("/")[0] for name in slot_names}
    if not parameter_names:
        return
    saved_parameters = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters.values()]
    for name, parameter in parameters.items():
        needs_state = name in parameter_names and parameter.requires_grad and not optimizer.state.get(parameter)
        parameter.grad = torch.zeros_like(parameter) if needs_state else None
    with torch.no_grad():
        optimizer.step()
        for parameter, value, gradient in saved_parameters:
            parameter.copy_(value)
            parameter.grad = gradient


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as a NumPy array; for dtypes that NumPy lacks, as integers with the same bits."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(_STORAGE_DTYPES.get(tensor.dtype, tensor.dtype)).numpy()


def check_names_and_shapes(
    path: Path, stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise DataError, listing the first differences, unless a file has the names and shapes of a model."""
    common_names = [name for name in expected if name in stored]
    misfits = [(name, stored[name], expected[name]) for name in common_names if stored[name] != expected[name]]
    missing_names = [name for name in expected if name not in stored]
    unused_names = [name for name in stored if name not in expected]
    result = WeightMatch(common_names, missing_names, sorted(unused_names), misfits)
    if result.unused or not result.is_fully_loaded:
        differences = result.describe_differences(MAX_LISTED_NAMES)
        remedy = "specify a file with this module's state_dict"
        prefix = ""
        if missing_names:
            suffix = missing_names[0]
            prefix = next((name.removesuffix(suffix) for name in unused_names if name.endswith(suffix)), "")
        if prefix and {*stored} == {prefix + name for name in expected}:
            remedy = f"remove the prefix '{prefix}', which a wrapper of the module added, from the names"
        raise DataError(f"{path}: does not fit the module: {differences}; {remedy}")


def _world_of(model: nn.Module) -> Any:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return model.grid.world if isinstance(model, DistributedModule) else SingleTransport()
