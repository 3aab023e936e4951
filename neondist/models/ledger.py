"""The byte ledger: every message of halos that this rank has sent, and every sum over ranks that it took part in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..comm import Reductions
from ..plan import GRADIENTS, LOSS

if TYPE_CHECKING:
    from .model import Model


class Account(NamedTuple):
    """What messages are recorded under.

    Attributes
    ----------
    kind : 'halo', 'sum' or 'redistribution'
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


def ledger(model: Model) -> Ledger:
    """Return what this rank has sent and summed since the model's build, by account.

    Nothing is written down while a step runs: an exchange counts its runs, and its messages are fixed.
    """
    first = model.grid.replica * model.grid.shape.tiles
    found: Ledger = Counter()
    for layer in model.leaves:
        for array in layer.arrays:
            for direction, exchange in array.recorded:
                for message in exchange.sends if exchange.runs else ():
                    account = Account("halo", str(layer.name), direction, first + message.peer, message.nbytes)
                    found[account] += exchange.runs
    for name, reductions in accounts(model):
        for (direction, group, nbytes), count in reductions.recorded.items():
            found[Account("sum", name, direction, group, nbytes)] += count
        for (direction, _, peer, nbytes), count in reductions.moved.items():  # all of them within a replica
            found[Account("redistribution", name, direction, first + peer, nbytes)] += count
    return found


def accounts(model: Model) -> list[tuple[str, Reductions]]:
    """Return the recorded reductions, by name."""
    layers = [(str(layer.name), array.reductions) for layer in model.leaves for array in layer.arrays]
    whole = [(GRADIENTS, model.parameters.reductions)] if model.parameters is not None else []
    return [*layers, (LOSS, model.output.reductions), *whole]
