"""State of border schemes from earlier steps. It is local to each rank, so only the same grid can restore it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from ...arrays.namespace import to_host
from ...comm import Transport, agree
from ...errors import DataError, ShapeError
from ...geometry import Box
from ...halo import GlobalArray
from .pieces import Piece
from .read import Opened
from .texts import of_kind, plain_json, whole

REMEMBERED, GROUP = "remembered", "borders"
"""Names in the file: the text, and the group of the arrays."""
MOST = 1 << 20  # samples of a batch
Remembered: TypeAlias = "tuple[int, int, str, int, int]"
"""Number of the array in its layer, samples of its batches, direction, arrays remembered, numbers in all of them."""


Exchanged: TypeAlias = Mapping[str, Sequence[GlobalArray]]
"""The arrays that exchange halos, by layer."""


@dataclass(frozen=True)
class Memory:
    """State of border schemes on all ranks, as written to a checkpoint.

    Attributes
    ----------
    text : JSON: what it belongs to, and for each layer and rank its entries; empty if nothing is remembered
    pieces : for each layer, one flat array, the ranks' numbers one after the other
    """

    text: str
    pieces: list[Piece]


def memory_of(exchanged: Exchanged, owner: str, world: Transport) -> Memory:
    """Return what the schemes of layers remember; collective.

    Parameters
    ----------
    exchanged : mapping of str to sequence of GlobalArray
        The arrays of each layer of a built model.
    owner : what has to be the same for a run that goes on with it
    """
    mine: dict[str, list[Remembered]] = {}
    values: dict[str, Any] = {}
    for name, those in exchanged.items():
        entries, arrays = [], []  # type: list[Remembered], list[np.ndarray]
        for at, array in enumerate(those):
            for (samples, direction), kept in sorted(array.remembered().items()):
                if kept:
                    entries.append((at, samples, direction, len(kept), sum(map(len, kept))))
                    arrays += map(to_host, kept)
        mine[name] = entries
        values[name] = np.concatenate([np.empty(0, those[0].dtype if those else np.float32), *arrays])
    everyone = world.allgather(mine)
    layers = {name: [ranks[name] for ranks in everyone] for name in mine}
    layers = {name: ranks for name, ranks in layers.items() if any(map(_numbers, ranks))}
    if not layers:
        return Memory("", [])
    pieces = [_piece(name, ranks, values[name]) for name, ranks in layers.items()]
    return Memory(json.dumps({"of": owner, "layers": layers}), pieces)


def remind(file: Opened, exchanged: Exchanged, owner: str, world: Transport) -> str:
    """Let schemes go on with what a checkpoint says that they remembered; collective.

    Returns a message for the user: nothing, or that they are reset because the file's `owner` is another.

    Raises
    ------
    DataError
        On every rank: what the file says cannot be.
    """
    text = file.facts.texts.get(REMEMBERED)
    if text is None:
        return ""
    try:
        told = plain_json(text, dict)
        before, layers = of_kind("'of'", told["of"], str), of_kind("'layers'", told["layers"], dict)
        if before != owner:
            return (
                f"border schemes discard the cells of earlier steps: the checkpoint is of {before}, this run has"
                f" {owner}"
            )
        pieces = []
        for name, ranks in layers.items():
            for entries in of_kind(name, ranks, list):
                for entry in of_kind(name, entries, list):
                    _check(name, entry, len(exchanged[name]))
            numbers = [_numbers(entries) for entries in ranks]
            if file.facts.group(GROUP).get(name) != (sum(numbers),) or len(ranks) != world.size:
                raise ValueError(name)
            dtype = exchanged[name][0].dtype
            pieces.append(_piece(name, ranks, np.empty(numbers[world.rank], dtype)))
    except (KeyError, TypeError, ValueError, AttributeError, MemoryError) as problem:
        raise DataError(
            f"{file.facts.path}: has invalid data on border schemes ({problem!r}); name another checkpoint"
        ) from None
    file.fill(pieces)
    error: Exception | None = None
    try:
        for (name, ranks), piece in zip(layers.items(), pieces, strict=True):
            for at, memory in _cut(ranks[world.rank], piece.array).items():
                array = exchanged[name][at]
                array.remember({key: [*map(array.backend.from_host, flat)] for key, flat in memory.items()})
    except (ShapeError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError, MemoryError) as problem:
        error = DataError(f"{file.facts.path}: the saved state of border schemes does not match the model ({problem})")
    agree(world, error)
    return ""


def _cut(entries: list[Remembered], flat: Any) -> dict[int, dict[tuple[int, str], list[Any]]]:
    """Return what each array of one layer remembers."""
    ends, found = accumulate(numbers for *_, numbers in entries), defaultdict(dict)  # type: Any, Any
    for (at, samples, direction, count, numbers), end in zip(entries, ends, strict=True):
        found[at][samples, direction] = np.split(flat[end - numbers : end], count)
    return found


def _check(name: str, entry: Any, arrays: int) -> None:
    """Raise ValueError unless this belongs to one of a layer's arrays."""
    at, samples, direction, count, numbers = of_kind(name, entry, list)
    for number, least in ((at, 0), (samples, 1), (count, 1), (numbers, 0)):
        whole(name, number, least)
    if at >= arrays or direction not in ("forward", "backward") or samples > MOST:
        raise ValueError(name)


def _numbers(entries: list[Remembered]) -> int:
    return sum(numbers for *_, numbers in entries)


def _piece(name: str, ranks: list[list[Remembered]], mine: Any) -> Piece:
    ends = list(accumulate(map(_numbers, ranks), initial=0))
    boxes = [Box((lo,), (hi,)) for lo, hi in pairwise(ends)]
    return Piece(f"{GROUP}/{name}", (ends[-1],), mine, boxes)
