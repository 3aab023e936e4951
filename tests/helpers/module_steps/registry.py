"""The steps that random modules are made of: each writes an expression of PyTorch, or returns None if none fits.

`step(pen, name, tensor)` is given the name and the value of a tensor. A statement is told by `$`, the name of what it
makes: '$ = x.clone(); $[0] = 1'. Whatever fails is drawn again, so that a step need not look at all conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STEPS: dict[str, tuple[float, Callable[[Any, str, Any], str | None]]] = {}


def step(weight: float = 1.0):
    """Return a decorator that adds a step, which is drawn so often."""

    def add(function):
        STEPS[function.__name__] = weight, function
        return function

    return add


def image(function):
    """Make a step one of images (N, C, *spatial), and sometimes of other tensors, such as tokens, taken for some."""

    def checked(pen, x, t):
        n = t.dim() - 2
        return function(pen, x, t, n) if n == pen.spatial or (1 <= n <= 3 and pen.chance(0.4)) else None

    checked.__name__ = function.__name__
    return checked


def each(n, draw):
    return tuple(draw() for _ in range(n))


def divisor(pen, n):
    return pen.one(*[k for k in range(1, n + 1) if n % k == 0])


def dims(pen, t):
    """Return one or several dimensions of a tensor, or one of the usual sets."""
    rank, kind = t.dim(), pen.int(0, 5)
    if kind == 0:
        return pen.int(-rank, rank - 1)
    if kind == 1 and rank > 2:
        return tuple(range(2, rank))
    if kind == 2:
        return tuple(range(rank))
    if kind == 3:
        return pen.int(1, rank - 1) if rank > 1 else 0
    return tuple(sorted(pen.rng.sample(range(rank), pen.int(1, rank))))
