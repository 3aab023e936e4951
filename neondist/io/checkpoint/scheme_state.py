"""State of border schemes from earlier steps; it is local to each rank, so only the same grid can restore it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from ...arrays.namespace import to_host
from ...comm import Transport, raise_if_any_failed
from ...errors import DataError, ShapeError
from ...geometry import Box
from ...halo import GlobalArray
from .pieces import ArrayPart
from .read import CheckpointReader
from .texts import parse_json, require_json_integer, require_json_type

SCHEME_STATE_TEXT_NAME, SCHEME_STATE_GROUP = "scheme_state", "borders"
"""Names in the file of the text and of the group of arrays."""
MAX_BATCH_SIZE = 1 << 20  # limit on samples per batch
SchemeStateEntry: TypeAlias = "tuple[int, int, str, int, int]"
"""Index of the array in its layer, batch size, direction, number of state arrays, and their total size."""


ExchangedArrays: TypeAlias = Mapping[str, Sequence[GlobalArray]]
"""Arrays that exchange halos, by layer."""


@dataclass(frozen=True)
class SchemeState:
    """State of border schemes on all ranks, as written to a checkpoint.

    Attributes
    ----------
    json_text : the compatibility key and, by layer and rank, the entries; empty if there is no state
    pieces : one flat array per layer, concatenated over ranks
    """

    json_text: str
    pieces: list[ArrayPart]


def collect_scheme_state(exchanged_arrays: ExchangedArrays, compatibility_key: str, world: Transport) -> SchemeState:
    """Return the state of the schemes of layers. Collective.

    Parameters
    ----------
    exchanged_arrays : mapping of str to sequence of GlobalArray
        The arrays of each layer of a built model.
    compatibility_key : str
        Text that must be the same in a run that restores the state.
    """
    own_entries: dict[str, list[SchemeStateEntry]] = {}
    own_values: dict[str, Any] = {}
    for name, layer in exchanged_arrays.items():
        entries, arrays = [], []  # type: list[SchemeStateEntry], list[np.ndarray]
        for array_index, array in enumerate(layer):
            for (samples, direction), kept in sorted(array.scheme_state().items()):
                if kept:
                    entries.append((array_index, samples, direction, len(kept), sum(map(len, kept))))
                    arrays += map(to_host, kept)
        own_entries[name] = entries
        own_values[name] = np.concatenate([np.empty(0, layer[0].dtype if layer else np.float32), *arrays])
    entries_of_ranks = world.allgather(own_entries)
    entries_by_layer = {name: [ranks[name] for ranks in entries_of_ranks] for name in own_entries}
    entries_by_layer = {name: ranks for name, ranks in entries_by_layer.items() if any(map(_total_size, ranks))}
    if not entries_by_layer:
        return SchemeState("", [])
    pieces = [_create_scheme_state_part(name, ranks, own_values[name]) for name, ranks in entries_by_layer.items()]
    return SchemeState(json.dumps({"of": compatibility_key, "layers": entries_by_layer}), pieces)


def restore_scheme_state(
    file: CheckpointReader, exchanged_arrays: ExchangedArrays, compatibility_key: str, world: Transport
) -> str:
    """Restore the state of border schemes from a checkpoint. Collective.

    Return a message for the user: '', or that the state is discarded because the file's `compatibility_key` differs.

    Raises
    ------
    DataError
        On every rank, if the state in the file is invalid.
    """
    json_text = file.contents.texts.get(SCHEME_STATE_TEXT_NAME)
    if json_text is None:
        return ""
    try:
        saved_state = parse_json(json_text, dict)
        saved_key = require_json_type("'of'", saved_state["of"], str)
        entries_by_layer = require_json_type("'layers'", saved_state["layers"], dict)
        if saved_key != compatibility_key:
            return (
                "border schemes start without the cells of earlier steps, since the checkpoint was written with"
                f" {saved_key}, but this run has {compatibility_key}"
            )
        pieces = []
        for name, ranks in entries_by_layer.items():
            for entries in require_json_type(name, ranks, list):
                for entry in require_json_type(name, entries, list):
                    _check_scheme_state_entry(name, entry, len(exchanged_arrays[name]))
            sizes_by_rank = [_total_size(entries) for entries in ranks]
            if file.contents.group(SCHEME_STATE_GROUP).get(name) != (sum(sizes_by_rank),) or len(ranks) != world.size:
                raise ValueError(name)
            dtype = exchanged_arrays[name][0].dtype
            pieces.append(_create_scheme_state_part(name, ranks, np.empty(sizes_by_rank[world.rank], dtype)))
    except (KeyError, TypeError, ValueError, AttributeError, MemoryError) as problem:
        raise DataError(
            f"{file.contents.path}: has invalid data on border schemes ({problem!r}); specify another checkpoint"
        ) from None
    file.fill_parts(pieces)
    error: Exception | None = None
    try:
        for (name, ranks), piece in zip(entries_by_layer.items(), pieces, strict=True):
            for array_index, state in _split_scheme_state(ranks[world.rank], piece.local_array).items():
                array = exchanged_arrays[name][array_index]
                array.restore_scheme_state({key: [*map(array.backend.from_host, flat)] for key, flat in state.items()})
    except (ShapeError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError, MemoryError) as problem:
        error = DataError(
            f"{file.contents.path}: its border schemes do not match the model ({problem}); specify another checkpoint"
        )
    raise_if_any_failed(world, error)
    return ""


def _split_scheme_state(
    entries: list[SchemeStateEntry], flat_values: Any
) -> dict[int, dict[tuple[int, str], list[Any]]]:
    ends, states = accumulate(num_elements for *_, num_elements in entries), defaultdict(dict)  # type: Any, Any
    for (array_index, num_samples, direction, num_arrays, num_elements), end in zip(entries, ends, strict=True):
        states[array_index][num_samples, direction] = np.split(flat_values[end - num_elements : end], num_arrays)
    return states


def _check_scheme_state_entry(name: str, entry: Any, array_count: int) -> None:
    """Raise ValueError unless the entry is valid for one of a layer's arrays."""
    array_index, num_samples, direction, num_arrays, num_elements = require_json_type(name, entry, list)
    for number, least in ((array_index, 0), (num_samples, 1), (num_arrays, 1), (num_elements, 0)):
        require_json_integer(name, number, least)
    if array_index >= array_count or direction not in ("forward", "backward") or num_samples > MAX_BATCH_SIZE:
        raise ValueError(name)


def _total_size(entries: list[SchemeStateEntry]) -> int:
    return sum(elements for *_, elements in entries)


def _create_scheme_state_part(name: str, entries_by_rank: list[list[SchemeStateEntry]], own_values: Any) -> ArrayPart:
    ends = list(accumulate(map(_total_size, entries_by_rank), initial=0))
    boxes = [Box((lo,), (hi,)) for lo, hi in pairwise(ends)]
    return ArrayPart(f"{SCHEME_STATE_GROUP}/{name}", (ends[-1],), own_values, boxes)
