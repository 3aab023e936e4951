"""Costs of gradients sent compressed, or as rows of sparse parameters."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..geometry import GridShape
from ..layers import Parameter
from ..parallel import ROWS_COMPRESSOR, compressed_bytes_if_smaller, row_message_bytes
from ..strategies import Strategy
from ..strategies.shares import OwnerBoxes

SPARSE_HEADER_BYTES = 16  # bytes per rank of the header with the numbers of rows and elements that follow


def gradient_encodings(strategy: Strategy, parameters: Mapping[str, Parameter], itemsize: int) -> dict[str, str]:
    """Return the encodings of gradients sent compressed or sparse; parameters with owners are omitted."""
    compressors = {}
    for name, parameter in parameters.items():
        rule = strategy.parameters[name]
        if rule.owners:
            continue
        if parameter.max_rows_per_sample:
            compressors[name] = ROWS_COMPRESSOR
        elif rule.compressor and compressed_bytes_if_smaller(rule.compressor, parameter.shape, itemsize) is not None:
            compressors[name] = rule.compressor
    return compressors


def compressed_reduction_bytes(
    compressors: Mapping[str, str], parameters: Mapping[str, Parameter], itemsize: int
) -> int:
    """Return the bytes that a rank contributes to reductions of compressed gradients."""
    chosen = [(kind, parameters[name].shape) for name, kind in compressors.items() if kind != ROWS_COMPRESSOR]
    return sum(compressed_bytes_if_smaller(kind, shape, itemsize) or 0 for kind, shape in chosen)


def max_sparse_bytes_sent(
    parameter: Parameter, share: OwnerBoxes | None, rank: int, grid: GridShape, samples: int, itemsize: int
) -> int:
    """Return an upper bound on the bytes that a rank sends in a step for a sparse parameter.

    Parameters
    ----------
    share : OwnerBoxes or None
        Parts of the owners; None: all ranks receive all rows.
    samples : int
        Samples of the rank's replica.
    """
    rows, width, others = parameter.shape[0], prod(parameter.shape[1:]), grid.size - 1
    used = min(rows, parameter.max_rows_per_sample * samples)
    if not others:
        return 0
    if share is None:
        return others * (SPARSE_HEADER_BYTES + row_message_bytes(used, width, itemsize))
    own = min(rows, -(-share.boxes[rank].size // width) + 1)  # + 1: a part may begin and end within rows
    gradients, values = (
        row_message_bytes(used + others, width, itemsize),
        others * row_message_bytes(own, width, itemsize),
    )
    return 2 * others * SPARSE_HEADER_BYTES + gradients + values
