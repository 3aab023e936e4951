"""The byte ledger: every message of halos that this rank has sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .model import Model


class Account(NamedTuple):
    """What messages are booked under.

    Attributes
    ----------
    layer : its name
    direction : 'forward' or 'backward'
    peer : the rank that they went to, among all ranks
    nbytes : of one message
    """

    layer: str
    direction: str
    peer: int
    nbytes: int


Ledger: TypeAlias = "Counter[Account]"
"""How many messages were sent, by account."""


def ledger(model: Model) -> Ledger:
    """Return the messages that this rank has sent since the model's build.

    Nothing is written down while a step runs: an exchange counts its runs, and its messages are fixed.
    """
    first = model.grid.replica * model.grid.shape.tiles
    found: Ledger = Counter()
    for layer in model.leaves:
        for array in layer.arrays:
            for direction, exchange in array.border.booked:
                for message in exchange.sends if exchange.runs else ():
                    account = Account(str(layer.name), direction, first + message.peer, message.nbytes)
                    found[account] += exchange.runs
    return found
