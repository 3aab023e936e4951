"""That all ranks are about to do the same: one small message before each pass, so that none waits for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from ..comm.agree import agree
from ..comm.transport import Transport
from ..errors import ConfigError
from .constants import Reads

_PLAIN = (bool, int, float, str, type(None))
_PLAIN_ALWAYS = "_is_full_backward_hook"
"""An attribute that all modules have, those of torch.compile too."""


def check_alike(
    world: Transport, facts: Mapping[str, Any], error: Exception | None = None, versions: Sequence[int] = ()
) -> bool:
    """Raise on all ranks if any has an error, or if one says other facts than rank 0; collective.

    Parameters
    ----------
    facts : dict of name to value
        What all ranks must say alike; values are compared as text.
    error : Exception, optional
        Of this rank.
    versions : sequence of int
        Numbers that may differ: whether all have the same is returned.
    """
    if world.size == 1:
        if error is not None:
            raise error
        return True
    said = {name: str(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr((said, tuple(versions))).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    ends = np.array([number, -number] if error is None else [2**62, 2**62])
    world.allreduce(ends, "max")
    if ends[0] == -ends[1]:
        return True
    agree(world, error)
    every = world.allgather(said)
    for rank, other in enumerate(every):
        for name in (*every[0], *other):
            if every[0].get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank}: {name} is {_short(other.get(name))}, but {_short(every[0].get(name))} on rank 0;"
                    " every rank has to do the same"
                ).on_all_ranks()
    return False


def _short(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) < 120 else f"{value[:50]}...{value[-50:]}"


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
        self._reads: dict[tuple[Any, ...], Reads] = {}
        self._look()

    def key(self) -> tuple[Any, ...]:
        """Return the values, the modules, tensors' dtypes and devices, and which tensors no buffer has.

        Keys are equal if nothing has changed, values of tensors from which a forward has read numbers included.
        """
        plain = self._plain()
        return (*plain, self._values(self._reads[plain])) if plain in self._reads else plain

    def _values(self, reads: Reads) -> tuple[bytes, ...]:
        """Return the values of tensors that were read."""
        buffers = self.tensors()[1]
        return tuple(map(_bytes, (*(buffers.get(name) for name in sorted(reads.buffers)), *reads.others)))

    def _plain(self) -> tuple[Any, ...]:
        try:
            found = [(values(attributes), *map(id, inner.values())) for attributes, values, inner in self._watched]
            tensors = [where[at] for _, where, at in (*self._parameters, *self._buffers)]
            kinds = [(tensor.dtype, tensor.device) for tensor in tensors if tensor is not None]
            loose = tuple(_Itself(attributes[name]) for _, attributes, name in self._loose)
        except KeyError:  # something was deleted
            self._look()
            return self._plain()
        return tuple(found), tuple(kinds), loose

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the parameters and the buffers by name, without those that are gone; duplicates included."""
        parameters = {name: p for name, where, at in self._parameters if (p := where.get(at)) is not None}
        return parameters, {name: b for name, where, at in self._buffers if (b := where.get(at)) is not None}

    def settled(self, before: tuple[Any, ...], reads: Reads | None = None) -> tuple[Any, ...]:
        """Return the key after a forward; what that has changed itself, such as a counter of calls, is left out.

        Parameters
        ----------
        reads : Reads, optional
            Tensors from which it has read numbers: their values are part of the key from now on.
        """
        after = self._plain()
        for at, (names, old, new) in enumerate(zip(self._names, before[0], after[0], strict=False)):
            self._changing.update((at, name) for name, a, b in zip(names, old[0], new[0], strict=False) if a != b)
        loose = zip(self._loose, before[2], after[2], strict=False)
        self._changing.update((at, name) for (at, _, name), old, new in loose if old != new)
        self._look()
        if reads is not None and any(reads):
            known = self._reads.setdefault(self._plain(), Reads(set(), []))
            known.buffers.update(reads.buffers)
            known.others.extend(t for t in reads.others if all(t is not other for other in known.others))
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


def _bytes(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


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
