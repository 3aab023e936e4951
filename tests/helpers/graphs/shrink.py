"""Greedy minimisation of a failing case, by one change at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from .build import CONTAINERS, find_refusal
from .case import Case

ONE_RANK = (1, 1, 1, 1)
REQUIRED = ("name", "out_channels", "kernel_size", "out_features", "factor", "cropping", "extent")
"""required arguments of layers"""


def shrink(case: Case, fails: Callable[[Case], Any], seconds: float = 60.0) -> Case:
    """Return the smallest case, within a time limit, that fails like the given one."""
    kind, deadline, tried = describe_failure(fails, case), time.monotonic() + seconds, {repr(case)}
    shrunk = kind is not None
    while shrunk:
        shrunk = False
        for smaller in generate_smaller(case):
            if time.monotonic() > deadline:
                return case
            if repr(smaller) in tried:
                continue
            tried.add(repr(smaller))
            if find_refusal(smaller) is None and describe_failure(fails, smaller) == kind:
                case, shrunk = smaller, True
                break
    return case


def describe_failure(fails: Callable[[Case], Any], case: Case) -> str | None:
    """Return the type of the error of a case and its location, without numbers and names."""
    try:
        fails(case)
    except Exception as error:
        location = str(error).partition(":")[0] if isinstance(error, AssertionError) else ""
        return type(error).__name__ + re.sub(r"\(.*\)|\w*\d\w*", "", location)
    return None


def generate_smaller(case: Case) -> Iterator[Case]:
    """Yield slightly smaller cases, the most promising first."""
    for nodes in _smaller_list(case.network):
        yield case.replace(network=nodes)
    for field in ("grid", "second_grid"):
        for grid in _smaller_grids(getattr(case, field)):
            yield case.replace(**{field: grid})
    defaults = {
        "dtype": "float64",
        "twin": False,
        "layout": "plain",
        "backend": "numpy",
        "scheme": "halo",
        "cost": ("SumSquared", {}),
        "seed": 0,
        "strips": None,
        "memory": None,
        "recompute": False,
        "accumulate": 1,
        "strategy": None,
        "sync": "allreduce",
    }
    defaults["optimizer"] = ("SGD", {"learning_rate": 0.01})
    for field, value in defaults.items():
        if getattr(case, field) != value:
            yield case.replace(**{field: value})
    for field in ("steps", "last_batch", "batch"):
        count = getattr(case, field)
        for fewer in sorted({1, count - 1}):
            if 0 < fewer < count:
                yield case.replace(**{field: fewer}).replace(
                    last_batch=min(case.last_batch, fewer if field == "batch" else case.last_batch)
                )
    for axis, n in enumerate(case.shape):
        for fewer in sorted({1, n // 2, n - 1}):
            if 0 < fewer < n:
                yield case.replace(shape=(*case.shape[:axis], fewer, *case.shape[axis + 1 :]))


def _smaller_grids(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if grid != ONE_RANK:
        yield ONE_RANK
    for axis, n in enumerate(grid):
        for fewer in sorted({1, n - 1}):
            if 0 < fewer < n:
                yield (*grid[:axis], fewer, *grid[axis + 1 :])


def _smaller_list(nodes: list[Any]) -> Iterator[list[Any]]:
    for index, node in enumerate(nodes):
        yield nodes[:index] + nodes[index + 1 :]
        for branch in _branches(node):
            yield [*nodes[:index], *branch, *nodes[index + 1 :]]
    for index, node in enumerate(nodes):
        for smaller in _smaller_node(node):
            yield [*nodes[:index], smaller, *nodes[index + 1 :]]


def _branches(node: Any) -> Iterator[list[Any]]:
    """Yield the branches that may replace a container."""
    if isinstance(node, list):
        yield node
    elif node[0] in CONTAINERS:
        for branch in node[1]:
            yield branch if isinstance(branch, list) else [branch]


def _smaller_node(node: Any) -> Iterator[Any]:
    if isinstance(node, list):
        yield from _smaller_list(node)
        return
    kind, arguments = node
    if kind in CONTAINERS:
        yield from ((kind, branches) for branches in _smaller_list(arguments) if branches or kind == "Sequential")
        return
    for name, value in arguments.items():
        if name not in REQUIRED and (kind, name) not in (("Pad", "padding"), ("Activation", "activation")):
            yield kind, {key: other_value for key, other_value in arguments.items() if key != name}
        for smaller in _smaller_value(value) if name != "name" else ():
            yield kind, arguments | {name: smaller}


def _smaller_value(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or not isinstance(value, (int, tuple)):
        return
    if isinstance(value, int):
        yield from sorted({v for v in (0, 1, value - 1, -1) if abs(v) < abs(value)}, key=abs)
        return
    if len(set(value)) == 1:
        yield value[0]
    for index, item in enumerate(value):
        for smaller in _smaller_value(item):
            yield (*value[:index], smaller, *value[index + 1 :])
