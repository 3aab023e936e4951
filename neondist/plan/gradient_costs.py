"""Costs of gradients that do not travel as they are: compressed, or as the rows of sparse parameters."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..geometry import GridShape
from ..layers import Parameter
from ..parallel import ROWS, compressed_bytes, message_bytes
from ..strategies import Strategy
from ..strategies.shares import Share

COUNTS = 16
"""Bytes to each rank that say how many rows and numbers of a parameter follow."""


def compressors_of(strategy: Strategy, parameters: Mapping[str, Parameter], itemsize: int) -> dict[str, str]:
    """Return how gradients travel that are not sent as they are, of parameters without owners."""
    found = {}
    for name, parameter in parameters.items():
        one = strategy.parameters[name]
        if one.owners:
            continue
        if parameter.sparse:
            found[name] = ROWS
        elif one.compressor and compressed_bytes(one.compressor, parameter.shape, itemsize) is not None:
            found[name] = one.compressor
    return found


def bytes_reduced(compressors: Mapping[str, str], parameters: Mapping[str, Parameter], itemsize: int) -> int:
    """Return the bytes that a rank gives into sums of compressed gradients."""
    chosen = [(how, parameters[name].shape) for name, how in compressors.items() if how != ROWS]
    return sum(compressed_bytes(how, shape, itemsize) or 0 for how, shape in chosen)


def most_rows_sent(
    parameter: Parameter, share: Share | None, rank: int, grid: GridShape, samples: int, itemsize: int
) -> int:
    """Return the most bytes that a rank sends in a step for a sparse parameter, whose rows are not known before.

    Parameters
    ----------
    share : Share or None
        The parts of owners; None: all ranks get all rows.
    samples : int
        Of the rank's replica.
    """
    rows, width, others = parameter.shape[0], prod(parameter.shape[1:]), grid.size - 1
    used = min(rows, parameter.sparse * samples)
    if not others:
        return 0
    if share is None:
        return others * (COUNTS + message_bytes(used, width, itemsize))
    own = min(rows, -(-share.boxes[rank].size // width) + 1)  # an end may lie within a row
    gradients, values = message_bytes(used + others, width, itemsize), others * message_bytes(own, width, itemsize)
    return 2 * others * COUNTS + gradients + values
