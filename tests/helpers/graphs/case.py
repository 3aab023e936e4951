"""A generated case: a network and all that is done with it, as plain data that prints as Python."""

from __future__ import annotations

import pprint
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

Grid = tuple[int, int, int, int]
"""Replicas, planes, rows, columns."""

PROGRAM = """\
import sys

sys.path.insert(0, "tests/helpers")  # from the top folder of the repository
from graphs.case import Case
from graphs.check import check

check({case})
"""


@dataclass(frozen=True)
class Case:
    """One network on one grid, and then on another.

    Attributes
    ----------
    shape : (*spatial, C)
    network : list
        Of layers ("Conv", arguments), containers ("Sum", branches) and lists, which stand for a Sequential; a branch is
        any of these.
    batch, rest : int
        Samples of a batch, and of the smaller one that comes last.
    steps : int
        Training steps of whole batches, on the first grid.
    grid, other : Grid
        Where it is trained, and where it goes on.
    twin : bool
        Whether the distributed model is made by `nd.distribute` from the serial one, and not from Dist classes.
    layout : str
        Of images and gradients, one of `layouts.LAYOUTS`.
    strips, memory, recompute, accumulate
        How the distributed model executes a step.
    nudge : float
        How far images are moved, to see how well conditioned a case is.
    """

    shape: tuple[int, ...]
    network: list[Any]
    batch: int = 2
    rest: int = 1
    steps: int = 2
    grid: Grid = (1, 1, 1, 1)
    other: Grid = (1, 1, 1, 1)
    scheme: str = "halo"
    backend: str = "numpy"
    dtype: str = "float64"
    twin: bool = False
    cost: str = "SumSquared"
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"learning_rate": 0.01})
    layout: str = "plain"
    seed: int = 0
    strips: int | str | None = None
    memory: str | None = None
    recompute: bool = False
    accumulate: int = 1
    nudge: float = 0.0

    def program(self) -> str:
        """Return a program that checks this case."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        lines = [f"{name}={pprint.pformat(value, width=100, sort_dicts=False)}" for name, value in given.items()]
        inside = "".join("    " + line.replace("\n", "\n    ") + ",\n" for line in lines)
        return PROGRAM.format(case=f"Case(\n{inside})")

    def changed(self, **fields_: Any) -> Case:
        """Return the case with other fields."""
        return replace(self, **fields_)


def ranks_of(grid: Grid) -> int:
    """Return how many ranks a grid has."""
    return prod(grid)


def leaves(network: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return all single layers of a network, in order."""
    if isinstance(network, list):
        return [leaf for node in network for leaf in leaves(node)]
    return leaves(network[1]) if isinstance(network[1], list) else [network]
