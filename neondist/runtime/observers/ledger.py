"""The byte ledger: every message of halos that this rank has sent, and every sum over ranks that it took part in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ...comm import Reductions
from ...layers import Layer


class Account(NamedTuple):
    """Key under which messages are recorded.

    Attributes
    ----------
    kind : 'halo', 'sum' or 'redistribution'; of PyTorch's modules also 'ring'
    layer : its name; of sums also 'loss' and 'gradients'
    direction : 'forward' or 'backward'
    peer : the rank, among all, that a halo or a part of a vector went to; of a sum its group, one of `comm.GROUPS`
    nbytes : of one message; of a sum those of the array, once, however the library adds it up
    """

    kind: str
    layer: str
    direction: str
    peer: int | str
    nbytes: int


Ledger: TypeAlias = "Counter[Account]"
"""How many messages were sent, by account."""


def ledger(layers: Sequence[Layer], reductions: Iterable[tuple[str, Reductions]], first: int) -> Ledger:
    """Return what this rank has sent and summed since its layers were built, by account.

    Parameters
    ----------
    reductions : iterable of (str, Reductions)
        By name, those of the layers' arrays too.
    first : int
        The first rank of this replica.

    Notes
    -----
    Nothing is written down while a step runs: an exchange counts its runs, and its messages are fixed.
    """
    found: Ledger = Counter()
    for layer in layers:
        for array in layer.arrays:
            for direction, exchange in array.recorded:
                for message in exchange.sends if exchange.runs else ():
                    account = Account("halo", str(layer.name), direction, first + message.peer, message.nbytes)
                    found[account] += exchange.runs
    for name, one in reductions:
        for (direction, group, nbytes), count in one.recorded.items():
            found[Account("sum", name, direction, group, nbytes)] += count
        for (direction, group, peer, nbytes), count in one.moved.items():
            rank = peer if group == "world" else first + peer
            found[Account("redistribution", name, direction, rank, nbytes)] += count
    return found
