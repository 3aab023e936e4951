"""From a case that fails to a small one that fails in the same way: greedily, one thing at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from .build import CONTAINERS, refusal
from .case import Case

ALONE = (1, 1, 1, 1)
NEEDED = ("name", "out_channels", "kernel_size", "out_features", "factor", "cropping")
"""Arguments that a layer cannot be without ."""


def shrink(case: Case, fails: Callable[[Case], Any], seconds: float = 60.0) -> Case:
    """Return the smallest case found in this time that fails as the given one does."""
    kind, end, seen = how(fails, case), time.monotonic() + seconds, {repr(case)}
    shrunk = kind is not None
    while shrunk:
        shrunk = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                return case
            if repr(smaller) in seen:
                continue
            seen.add(repr(smaller))
            if refusal(smaller) is None and how(fails, smaller) == kind:
                case, shrunk = smaller, True
                break
    return case


def how(fails: Callable[[Case], Any], case: Case) -> str | None:
    """Return in which way a case fails: the error and where it came, without numbers and names."""
    try:
        fails(case)
    except Exception as error:
        where = str(error).partition(":")[0] if isinstance(error, AssertionError) else ""
        return type(error).__name__ + re.sub(r"\(.*\)|\w*\d\w*", "", where)
    return None


def smaller_cases(case: Case) -> Iterator[Case]:
    """Yield cases that are a little smaller, those that promise most first."""
    for nodes in _smaller_list(case.network):
        yield case.changed(network=nodes)
    for field in ("grid", "other"):
        for grid in _smaller_grids(getattr(case, field)):
            yield case.changed(**{field: grid})
    plain = {
        "dtype": "float64",
        "twin": False,
        "layout": "plain",
        "backend": "numpy",
        "scheme": "halo",
        "cost": "SumSquared",
        "seed": 0,
        "strips": None,
        "memory": None,
        "recompute": False,
        "accumulate": 1,
    }
    plain["optimizer"] = ("SGD", {"learning_rate": 0.01})
    for field, value in plain.items():
        if getattr(case, field) != value:
            yield case.changed(**{field: value})
    for field in ("steps", "rest", "batch"):
        count = getattr(case, field)
        for fewer in sorted({1, count - 1}):
            if 0 < fewer < count:
                yield case.changed(**{field: fewer}).changed(
                    rest=min(case.rest, fewer if field == "batch" else case.rest)
                )
    for axis, n in enumerate(case.shape):
        for fewer in sorted({1, n // 2, n - 1}):
            if 0 < fewer < n:
                yield case.changed(shape=(*case.shape[:axis], fewer, *case.shape[axis + 1 :]))


def _smaller_grids(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if grid != ALONE:
        yield ALONE
    for at, n in enumerate(grid):
        for fewer in sorted({1, n - 1}):
            if 0 < fewer < n:
                yield (*grid[:at], fewer, *grid[at + 1 :])


def _smaller_list(nodes: list[Any]) -> Iterator[list[Any]]:
    for at, one in enumerate(nodes):
        yield nodes[:at] + nodes[at + 1 :]
        for inside in _branches(one):
            yield [*nodes[:at], *inside, *nodes[at + 1 :]]
    for at, one in enumerate(nodes):
        for smaller in _smaller_node(one):
            yield [*nodes[:at], smaller, *nodes[at + 1 :]]


def _branches(node: Any) -> Iterator[list[Any]]:
    """Yield what could stand in place of a container."""
    if isinstance(node, list):
        yield node
    elif node[0] in CONTAINERS:
        for branch in node[1]:
            yield branch if isinstance(branch, list) else [branch]


def _smaller_node(node: Any) -> Iterator[Any]:
    if isinstance(node, list):
        yield from _smaller_list(node)
        return
    kind, given = node
    if kind in CONTAINERS:
        yield from ((kind, branches) for branches in _smaller_list(given) if branches or kind == "Sequential")
        return
    for name, value in given.items():
        if name not in NEEDED and (kind, name) not in (("Pad", "padding"), ("Activation", "activation")):
            yield kind, {key: kept for key, kept in given.items() if key != name}
        for smaller in _smaller_value(value) if name != "name" else ():
            yield kind, given | {name: smaller}


def _smaller_value(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or not isinstance(value, (int, tuple)):
        return
    if isinstance(value, int):
        yield from sorted({v for v in (0, 1, value - 1, -1) if abs(v) < abs(value)}, key=abs)
        return
    if len(set(value)) == 1:
        yield value[0]
    for at, one in enumerate(value):
        for smaller in _smaller_value(one):
            yield (*value[:at], smaller, *value[at + 1 :])
