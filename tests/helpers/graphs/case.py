"""Generated case: a network and its run, as plain data that prints as Python."""

from __future__ import annotations

import dataclasses
import pprint
from dataclasses import dataclass, fields
from math import prod
from typing import Any

Grid = tuple[int, int, int, int]
"""(replicas, planes, rows, columns)"""

PROGRAM_TEMPLATE = """\
import sys

sys.path.insert(0, "tests/helpers")  # from the top folder of the repository
from graphs.case import Case
from graphs.check import check_case

check_case({case})
"""


@dataclass(frozen=True)
class Case:
    """Network that is trained on one grid, and continued on another.

    Attributes
    ----------
    shape : (*spatial, C)
    network : list
        Layers ("Conv", arguments), containers ("Sum", branches) and lists, which are a Sequential; a branch is any of
        these.
    batch, last_batch : int
        Samples of a batch, and of the last, smaller one.
    steps : int
        Training steps with full batches on the first grid.
    grid, second_grid : Grid
        Grids of the first part and of its continuation.
    twin : bool
        Whether `nd.distribute` creates the distributed model, instead of Dist classes.
    layout : str
        Memory layout of images and gradients, one of `layouts.LAYOUTS`.
    strips, memory, recompute, accumulate, strategy, sync
        Execution options of the distributed model.
    perturbation : float
        Magnitude of a perturbation of the images, to measure the conditioning of a case.
    """

    shape: tuple[int, ...]
    network: list[Any]
    batch: int = 2
    last_batch: int = 1
    steps: int = 2
    grid: Grid = (1, 1, 1, 1)
    second_grid: Grid = (1, 1, 1, 1)
    scheme: str = "halo"
    backend: str = "numpy"
    dtype: str = "float64"
    twin: bool = False
    cost: tuple[str, dict[str, Any]] = ("SumSquared", {})
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"learning_rate": 0.01})
    layout: str = "plain"
    seed: int = 0
    strips: int | str | None = None
    memory: str | None = None
    recompute: bool = False
    accumulate: int = 1
    strategy: str | None = None
    sync: str = "allreduce"
    perturbation: float = 0.0

    def program(self) -> str:
        """Return a program that checks this case."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        lines = [f"{name}={pprint.pformat(value, width=100, sort_dicts=False)}" for name, value in arguments.items()]
        body = "".join("    " + line.replace("\n", "\n    ") + ",\n" for line in lines)
        return PROGRAM_TEMPLATE.format(case=f"Case(\n{body})")

    def replace(self, **changes: Any) -> Case:
        """Return a copy of the case with changed fields."""
        return dataclasses.replace(self, **changes)


def count_ranks(grid: Grid) -> int:
    """Return the number of ranks of a grid."""
    return prod(grid)


def list_leaves(network: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return all layers of a network in order."""
    if isinstance(network, list):
        return [leaf for node in network for leaf in list_leaves(node)]
    return list_leaves(network[1]) if isinstance(network[1], list) else [network]
