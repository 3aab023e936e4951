"""When the arrays of a step live: from it follows which of them may share memory.

A step of L layers has 2 L moments: layer i works forward at moment i, and backward at moment 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..arrays import Arena, Room, Span
from ..layers import Context, Layer


class Lifetimes(NamedTuple):
    """First and last moment of a layer's view of its input, and of the view's gradient (None: it is not planned)."""

    view: tuple[int, int]
    gradient: tuple[int, int] | None


def lifetimes(layers: Sequence[Layer]) -> list[Lifetimes]:
    """Return the lifetimes of every layer's arrays; `layers` are in the order of the forward pass, and connected."""
    index = {id(layer): at for at, layer in enumerate(layers)}
    found = []
    for at, layer in enumerate(layers):
        back = 2 * len(layers) - 1 - at
        before = [index[id(leaf)] for leaf in layer.preceding.leaves] if layer.preceding else []
        wrote = layers[before[-1]] if before else None  # may have put its output into the view, and look at it again
        looked_at = wrote is not None and wrote.activation is not None
        read = 2 * len(layers) - 1 - min(before, default=at - 1)  # by whom the gradient is for
        last = read if looked_at else back if layer.keeps_view else at
        found.append(Lifetimes((max(0, at - 1), last), (back, read) if at else None))
    return found


def spans(layers: Sequence[Layer], numbers: Sequence[int]) -> list[Span]:
    """Return the spans of an arena: the views of all layers, then the gradients of all but the first.

    Parameters
    ----------
    numbers : of each layer's view with the tile in it, for one sample
    """
    lives = lifetimes(layers)
    views = [Span(count, *life.view) for count, life in zip(numbers, lives, strict=True)]
    gradients = [Span(count, *life.gradient) for count, life in zip(numbers, lives, strict=True) if life.gradient]
    return views + gradients


def arena_of(layers: Sequence[Layer], context: Context) -> Arena:
    """Return the memory of the views and gradients of built layers, which are given their rooms in it."""
    lo, hi = context.grid.sample_range(context.batch_size)
    numbers = [layer.input.held for layer in layers]
    arena = Arena(spans(layers, numbers), hi - lo, context.dtype, context.backend)
    rooms = [Room(arena, span) for span in range(max(0, 2 * len(layers) - 1))]
    for layer, view, gradient in zip(layers, rooms, [None, *rooms[len(layers) :]], strict=False):
        layer.input.rooms = view, gradient
    return arena
