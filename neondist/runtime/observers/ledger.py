"""Ledger of the halo messages that this rank has sent, and of its reductions and redistributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ...comm import Reductions
from ...layers import Layer


class MessageLedgerKey(NamedTuple):
    """Key under which messages are recorded.

    Attributes
    ----------
    kind : 'halo', 'sum' or 'redistribution'; for PyTorch modules also 'ring'
    layer : name of the layer; for sums also 'loss' or 'gradients', for redistributions also 'gradients'
    direction : 'forward' or 'backward'
    peer : the world rank to which a halo or part of a vector was sent; for a sum its group, one of `comm.GROUP_NAMES`
    nbytes : bytes of one message; for a sum, the bytes of the array, whatever the algorithm
    """

    kind: str
    layer: str
    direction: str
    peer: int | str
    nbytes: int


Ledger: TypeAlias = "Counter[MessageLedgerKey]"
"""Number of messages, reductions and redistributions by key."""


def collect_message_counts(
    layers: Sequence[Layer], reductions: Iterable[tuple[str, Reductions]], first_rank: int
) -> Ledger:
    """Return the number of messages, reductions and redistributions of this rank since its layers were built, by key.

    Parameters
    ----------
    reductions : iterable of (str, Reductions)
        Reductions by name, including those of the layers' arrays.
    first_rank : int
        The first rank of this replica.

    Notes
    -----
    Nothing is recorded during a step: an exchange counts its runs, and its messages are fixed.
    """
    counts: Ledger = Counter()
    for layer in layers:
        for array in layer.arrays:
            for direction, exchange in array.recorded_exchanges:
                for message in exchange.sends if exchange.run_count else ():
                    key = MessageLedgerKey(
                        "halo", str(layer.name), direction, first_rank + message.peer, message.nbytes
                    )
                    counts[key] += exchange.run_count
    for name, sums in reductions:
        for (direction, group, nbytes), count in sums.reduction_counts.items():
            counts[MessageLedgerKey("sum", name, direction, group, nbytes)] += count
        for (direction, group, peer, nbytes), count in sums.redistribution_counts.items():
            rank = peer if group == "world" else first_rank + peer
            counts[MessageLedgerKey("redistribution", name, direction, rank, nbytes)] += count
    return counts
