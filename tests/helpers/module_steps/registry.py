"""Registry of the steps of random modules.

`step(gen, name, tensor)` takes the name and the value of a tensor and returns a PyTorch expression, or None if it does
not apply. In a statement, `$` is the name of the result: '$ = x.clone(); $[0] = 1'. Expressions that fail are drawn
again, so that steps need not check all conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STEPS: dict[str, tuple[float, Callable[[Any, str, Any], str | None]]] = {}


def register_step(weight: float = 1.0):
    """Return a decorator that registers a step with a relative frequency."""

    def add(function):
        STEPS[function.__name__] = weight, function
        return function

    return add


def image_step(function):
    """Restrict a step to images (N, C, *spatial) and, less often, other tensors of 3 to 5 dimensions."""

    def checked(gen, x, t):
        n = t.dim() - 2
        return function(gen, x, t, n) if n == gen.spatial or (1 <= n <= 3 and gen.chance(0.4)) else None

    checked.__name__ = function.__name__
    return checked


def draw_tuple(n, draw):
    return tuple(draw() for _ in range(n))


def draw_divisor(gen, n):
    return gen.pick(*[k for k in range(1, n + 1) if n % k == 0])


def draw_dims(gen, t):
    """Return one or several dimensions of a tensor."""
    rank, kind = t.dim(), gen.int(0, 5)
    if kind == 0:
        return gen.int(-rank, rank - 1)
    if kind == 1 and rank > 2:
        return tuple(range(2, rank))
    if kind == 2:
        return tuple(range(rank))
    if kind == 3:
        return gen.int(1, rank - 1) if rank > 1 else 0
    return tuple(sorted(gen.rng.sample(range(rank), gen.int(1, rank))))
