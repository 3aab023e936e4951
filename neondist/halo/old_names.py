"""What border schemes written for neondist 0.1 call; all of it goes with the release after the next."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np


def _told(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now (docs/adding_a_scheme.md)", DeprecationWarning, stacklevel=3)


def old_bytes(policy: Any, direction: str) -> Any:
    """Return `forward_bytes`, or `backward_bytes`, of a policy that has them."""
    found = getattr(policy, f"{direction}_bytes", None) or getattr(policy, "forward_bytes", None)
    if found is not None:
        _told(f"{type(policy).__name__}.{found.__name__}(messages, itemsize)", "message_bytes, and exchanges,")
    return found


class OldHaloNames:
    """Of HaloExchange."""

    def courier(self: Any, shape: Any = None, dtype: Any = None) -> Any:
        """Return `packed(shape, dtype)`."""
        _told("courier", "packed")
        return self.packed(shape, dtype)

    def place(self: Any, arrived: Sequence[Any]) -> None:
        """Call `unpack`."""
        _told("place", "unpack")
        self.unpack(arrived)

    def joined(self: Any, arrays: Sequence[Any]) -> Any:
        """Return arrays as one flat array."""
        _told("joined(arrays)", "PackedExchange.outgoing, or incoming")
        return np.concatenate([np.empty(0, self.array.dtype), *(array.ravel() for array in arrays)])

    def parted(self: Any, flat: Any, regions: Sequence[Any]) -> list[Any]:
        """Return the arrays (n, *cells, C) that were joined, those of `sends` or of `receives`."""
        _told("parted(flat, ...)", "PackedExchange.sends, or receives")
        cells = [self.array[where] for _, where in regions]
        parts = np.split(flat, [*accumulate(each.size for each in cells)][:-1])
        return [part.reshape(each.shape) for part, each in zip(parts, cells, strict=False)]


class OldPackedNames:
    """Of PackedExchange."""

    def finish(self: Any) -> list[Any]:
        """Return `wait()`."""
        _told("finish", "wait")
        return list(self.wait())
