"""Changes of a module between its passes, as far as what its steps are depends on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_PLAIN_ALWAYS = "_is_full_backward_hook"
"""An attribute that all modules have, those of torch.compile too."""


def digest_of(plan: Any, program: Any) -> str:
    """Return a hash of what is computed, constants included, and of the steps."""
    found = hashlib.sha256(plan.digest.encode())
    found.update(program.graph_module.code.encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, torch.Tensor):
            found.update(name.encode() + repr(value.tolist() if value.numel() < 1000 else tuple(value.shape)).encode())
    return found.hexdigest()[:16]


class Watch:
    """The plain attributes of a module and of those in it, on which what its forward computes may depend.

    What torch.export finds holds for their values at that time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._changing: set[tuple[int, str]] = set()
        self._look()

    def key(self) -> tuple[Any, ...]:
        """Return the values, the modules, tensors' dtypes and devices, and which tensors no buffer has.

        Keys are equal if nothing has changed.
        """
        try:
            found = [(values(attributes), *map(id, inner.values())) for attributes, values, inner in self._watched]
            tensors = [where[at] for _, where, at in (*self._parameters, *self._buffers)]
            kinds = [(tensor.dtype, tensor.device) for tensor in tensors if tensor is not None]
            loose = tuple(_Itself(attributes[name]) for _, attributes, name in self._loose)
        except KeyError:  # something was deleted
            self._look()
            return self.key()
        return tuple(found), tuple(kinds), loose

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the parameters and the buffers by name, without those that are gone; duplicates included."""
        parameters = {name: p for name, where, at in self._parameters if (p := where.get(at)) is not None}
        return parameters, {name: b for name, where, at in self._buffers if (b := where.get(at)) is not None}

    def settled(self, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key after a forward; what that has changed itself, such as a counter of calls, is left out."""
        after = self.key()
        for at, (names, old, new) in enumerate(zip(self._names, before[0], after[0], strict=False)):
            self._changing.update((at, name) for name, a, b in zip(names, old[0], new[0], strict=False) if a != b)
        loose = zip(self._loose, before[2], after[2], strict=False)
        self._changing.update((at, name) for (at, _, name), old, new in loose if old != new)
        self._look()
        return self.key()

    def _look(self) -> None:
        self._names: list[list[str]] = []
        self._watched: list[tuple[dict[str, Any], Callable[[Any], Any], dict[str, Any]]] = []
        self._loose: list[tuple[int, dict[str, Any], str]] = []
        self._parameters: list[tuple[str, dict[str, Any], str]] = []
        self._buffers: list[tuple[str, dict[str, Any], str]] = []
        for at, module in enumerate(self.module.modules()):
            attributes = vars(module)
            plain = [name for name, value in attributes.items() if isinstance(value, _PLAIN)]
            names = [_PLAIN_ALWAYS, *(name for name in plain if (at, name) not in self._changing)]
            tensors = [name for name, value in attributes.items() if isinstance(value, torch.Tensor)]
            self._loose += [(at, attributes, name) for name in tensors if (at, name) not in self._changing]
            # at least two: of several names, an itemgetter returns a tuple
            self._watched.append((attributes, itemgetter(_PLAIN_ALWAYS, *names), attributes["_modules"]))
            self._names.append([_PLAIN_ALWAYS, *names])
        for path, module in self.module.named_modules(remove_duplicate=False):
            start = f"{path}." if path else ""
            for found, held in ((self._parameters, module._parameters), (self._buffers, module._buffers)):
                found += [(start + name, held, name) for name, tensor in held.items() if tensor is not None]


class _Itself:
    """A tensor, equal to itself alone."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was written to, and which those are that cannot tell."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
