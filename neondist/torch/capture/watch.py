"""Detection of changes to values that were read when a module or a criterion was captured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .consistency import as_bytes_tensor
from .constants import ValueReads
from .module_state import ReachableState, content_key, plain_key
from .value_container import MISSING


@dataclass(frozen=True)
class StateKey:
    """Snapshot of watched values, usable as a key; `numbers`: contents of the tensors from which numbers were read."""

    key_by_path: dict[str, Any]
    numbers: tuple[bytes, ...] = ()

    def __hash__(self) -> int:
        return hash(tuple(self.key_by_path))


class StateWatch:
    """Values on which the computation of a module or a criterion may depend, beyond parameters and buffers.

    An exported program is valid only for the values at the time of export.

    Parameters
    ----------
    root : nn.Module or callable
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._last_values: list[Any] = []
        self._names: set[str] = set()
        self._excluded: set[str] = set()
        self._reads_by_state: dict[StateKey, ValueReads] = {}
        self._inspect_reachable_state()

    def retarget(self, root: Any) -> None:
        """Watch another function with the same code."""
        self._root = root
        self._inspect_reachable_state()

    def key(self) -> StateKey:
        """Return a key of the current values of closures, containers and objects, and of the dtypes of tensors.

        Keys are equal if nothing has changed, including the contents of tensors from which a pass has read numbers.
        """
        state_key = self._current_state_key()
        reads = self._reads_by_state.get(state_key) if self._reads_by_state else None
        if reads is None:
            return state_key
        buffers = self.named_parameters_and_buffers()[1]
        tensors = (*(buffers.get(name) for name in sorted(reads.buffer_names)), *reads.tensors)
        contents = (b"" if tensor is None else as_bytes_tensor(tensor).cpu().numpy().tobytes() for tensor in tensors)
        return StateKey(state_key.key_by_path, tuple(contents))

    def _current_state_key(self) -> StateKey:
        try:
            is_unchanged = self._is_unchanged()
        except (KeyError, ValueError, IndexError, RuntimeError, AttributeError):  # something was deleted
            is_unchanged = False
        if not is_unchanged:
            self._inspect_reachable_state()
        return self._key

    def named_parameters_and_buffers(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the parameters and buffers by name, including duplicates but not deleted tensors."""
        parameters = {name: p for name, where, at in self._parameters if (p := where.get(at)) is not None}
        return parameters, {name: b for name, where, at in self._buffers if (b := where.get(at)) is not None}

    def exclude_changed_values(self, before: StateKey, reads: ValueReads | None = None) -> StateKey:
        """Exclude values that a forward pass has changed, such as a call counter, from all keys; return the new key.

        Parameters
        ----------
        reads : ValueReads, optional
            Tensors from which this pass has read numbers; their values are part of later keys.
        """
        old, new = before.key_by_path, self._current_state_key().key_by_path
        self._excluded.update(path for path in {**old, **new} if old.get(path, MISSING) != new.get(path, MISSING))
        self._inspect_reachable_state()
        if reads is not None and any(reads):
            recorded = self._reads_by_state.setdefault(self._key, ValueReads(set(), []))
            recorded.buffer_names.update(reads.buffer_names)
            recorded.tensors.extend(t for t in reads.tensors if all(t is not other for other in recorded.tensors))
        return self.key()

    def _is_unchanged(self) -> bool:
        """Return whether nothing has changed since the last inspection, in about a microsecond for dozens of values."""
        if (
            list(map(len, self._size_watched_containers)),
            self._dtypes_and_devices(),
        ) != self._known_sizes_and_properties:
            return False
        values = self._current_values()
        if len(values) != len(self._last_values):
            return False
        if not all(map(is_, values, self._last_values)):
            for value, before in zip(values, self._last_values, strict=True):
                if value is not before and ((key := plain_key(value)) is None or key != plain_key(before)):
                    return False
            self._last_values = values
        return [content_key(array) for array in self._arrays] == self._array_contents

    def _current_values(self) -> list[Any]:
        return [
            *chain.from_iterable(self._views),
            *chain.from_iterable(map(map, self._value_getters, self._value_names)),
        ]

    def _dtypes_and_devices(self) -> list[Any]:
        """Return the tensors' dtypes and devices and, if the code depends on the gradient mode, `requires_grad`."""
        tensors = [where[at] for _, where, at in self._registered_tensors]
        tensors += self._reachable_tensors
        properties: list[Any] = [[tensor.dtype for tensor in tensors], [tensor.device for tensor in tensors]]
        return [*properties, [tensor.requires_grad for tensor in tensors]] if self._depends_on_grad_mode else properties

    def _inspect_reachable_state(self) -> None:
        reachable = ReachableState(self._root, self._names, self._excluded)
        self._key, self._arrays = StateKey(reachable.key_by_path), list(reachable.arrays.values())
        self._array_contents = [content_key(array) for array in self._arrays]
        self._reachable_tensors, self._depends_on_grad_mode = reachable.tensors, reachable.depends_on_grad_mode
        self._views: list[Any] = []
        self._value_getters: list[Callable[[Any], Any]] = []
        self._value_names: list[Collection[Any]] = []
        self._size_watched_containers: list[Any] = []
        for container in reachable.containers:
            if not container.is_watched:
                continue
            if container.value_of_name is not None and container.names is not None:
                self._value_getters.append(container.value_of_name)
                self._value_names.append(container.names)
            elif not len(container.object):
                pass  # only the container's size is compared
            elif isinstance(container.object, dict):
                self._views += [container.object] * (not container.in_nn_module) + [container.object.values()]
            else:
                self._views.append(container.object)
            sized_object = vars(container.object) if isinstance(container.object, type) else container.object
            if container.value_of_name is None or isinstance(sized_object, (dict, MappingProxyType)):
                self._size_watched_containers.append(sized_object)
        self._last_values = self._current_values()
        self._parameters: list[tuple[str, dict[str, Any], str]] = []
        self._buffers: list[tuple[str, dict[str, Any], str]] = []
        if isinstance(self._root, nn.Module):
            for path, module in self._root.named_modules(remove_duplicate=False):
                prefix = f"{path}." if path else ""
                for entries, held in ((self._parameters, module._parameters), (self._buffers, module._buffers)):
                    entries += [(prefix + name, held, name) for name, tensor in held.items() if tensor is not None]
        self._registered_tensors = [*self._parameters, *self._buffers]
        self._known_sizes_and_properties = list(map(len, self._size_watched_containers)), self._dtypes_and_devices()
