"""When the arrays of a step live: from it follows which of them may share memory.

A step of L layers has 2 L moments: layer i works forward at moment i, and backward at moment 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from ..arrays import Arena, Room, Span
from ..layers import Branches, Context, Layer


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
        early = before and layer.preceding is not None and layer.preceding.writes_early
        found.append(Lifetimes((min(before) if early else max(0, at - 1), last), (back, read) if at else None))
    return found


def join_lifetimes(layers: Sequence[Layer], joins: Sequence[Branches]) -> list[list[tuple[int, int] | None]]:
    """Return first and last moment of what lives in the rooms of containers with branches; None: it is not planned.

    Nobody writes there, or what writes has no layers inside and so no moments: it makes memory of its own.

    All branches see the input, and their first layers may keep it. The output lives here only where nothing follows,
    and is then taken on at once, as what a branch gives is - but its last layer may look at it again on the way back.
    """
    index, end = {id(layer): at for at, layer in enumerate(layers)}, 2 * len(layers) - 1
    found: list[list[tuple[int, int] | None]] = []
    for join in joins:
        inside = [index[id(leaf)] for leaf in join.leaves]
        before = [index[id(leaf)] for leaf in join.preceding.leaves] if join.preceding else []
        if not inside:
            found.append([None] * (Branches.ENDS + len(join.layers)))
            continue
        first, last = inside[0], inside[-1]
        early = before and join.preceding is not None and join.preceding.writes_early
        read = end - min(before, default=max(0, first - 1))
        lives: list[tuple[int, int] | None] = [
            (min(before) if early else max(0, first - 1), read) if join.preceding else None,
            (first, last) if join.following is None else None,
            (end - last, read),
        ]
        for branch in join.layers:
            if not branch.leaves:
                lives.append(None)
                continue
            begin, done = index[id(branch.leaves[0])], index[id(branch.leaves[-1])]
            looked_at = not branch.writes_early and branch.leaves[-1].activation is not None
            lives.append((begin if branch.writes_early else done, end - done if looked_at else done))
        found.append(lives)
    return found


def spans(
    layers: Sequence[Layer], joins: Sequence[Branches], numbers: Sequence[int], held: Sequence[Sequence[int]]
) -> list[Span]:
    """Return the spans of an arena: views of all layers, gradients of all but the first, and rooms of `joins`.

    Parameters
    ----------
    numbers : of each layer's view with the tile in it, for one sample
    held : of what lives in the rooms of each join
    """
    lives = lifetimes(layers)
    views = [Span(count, *life.view) for count, life in zip(numbers, lives, strict=True)]
    gradients = [Span(count, *life.gradient) for count, life in zip(numbers, lives, strict=True) if life.gradient]
    rooms = [
        Span(count, *life) if life else Span(0, 0, 0)
        for counts, all_of_join in zip(held, join_lifetimes(layers, joins), strict=True)
        for count, life in zip(counts, all_of_join, strict=True)
    ]
    return views + gradients + rooms


def arena_of(layers: Sequence[Layer], joins: Sequence[Branches], context: Context) -> Arena:
    """Return the memory of what built layers and containers keep, which are given their rooms in it."""
    lo, hi = context.grid.sample_range(context.batch_size)
    held = [[prod(shape) for shape in join.local_shapes] for join in joins]
    planned = spans(layers, joins, [layer.input.held for layer in layers], held)
    arena = Arena(planned, hi - lo, context.dtype, context.backend, turn=len(layers))
    rooms = iter([Room(arena, span) for span in range(len(planned))])
    views = list(islice(rooms, len(layers)))
    for at, (layer, view) in enumerate(zip(layers, views, strict=True)):
        layer.input.rooms = view, next(rooms) if at else None
    for join in joins:
        join.rooms = [room if planned[room.span].numbers else None for room in islice(rooms, len(join.local_shapes))]
    return arena
