"""Tiles whose parts are of the same kinds have plans that are alike."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.geometry import HaloPlan, Partition, Window

axes = st.tuples(st.integers(1, 23), st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))


def messages(plan):
    return [[piece.source.size for piece in pieces] for pieces in (plan.receives, plan.sends)]


def extents(plan):
    boxes = plan.own, plan.need, plan.buffer
    return [box.shape for box in boxes], plan.need == plan.own, plan.need == plan.buffer, plan.trivial


def shape(plan):
    first = [-lo for lo in plan.own.lo]
    pieces = [[piece.source.shift(first) for piece in pieces] for pieces in (plan.receives, plan.sends, plan.local)]
    return [box.shift(first) for box in (plan.own, plan.need, plan.buffer)], pieces


@settings(max_examples=150)
@given(st.lists(axes, min_size=1, max_size=2), st.sampled_from(["zeros", "zeros", "reflect", "wrap"]))
def test_tiles_of_a_kind_are_alike(axes, mode):
    extent, parts, kernel, stride, padding = map(tuple, zip(*axes, strict=True))
    if mode != "zeros":  # cells of the image are seen beyond its borders
        padding = tuple(min(p, n - 1) for p, n in zip(padding, extent, strict=True))
        kernel = tuple(2 * p + 1 for p in padding)
        stride = (1,) * len(extent)
    extent = tuple(map(max, extent, kernel))
    cells, window = Partition(extent, parts), Window(kernel, stride, padding, mode=mode, ndim=len(extent))
    plans = [HaloPlan.of(cells, window, tile) for tile in range(cells.tiles)]
    for level, found in ("messages", messages), ("extents", extents), ("all", shape):
        kinds, alike = HaloPlan.kinds(cells, window, None, level), {}
        assert kinds.parts == parts
        for tile, plan in enumerate(plans):
            kind = tuple(axis[part] for axis, part in zip(kinds.axes, cells.coords(tile), strict=True))
            assert alike.setdefault(kind, found(plan)) == found(plan)
        of_cross = {axis: {kinds.axes[axis][cells.coords(t)[axis]] for t in kinds.cross} for axis in range(len(parts))}
        assert of_cross == {axis: set(kinds.axes[axis]) for axis in range(len(parts))}
        assert len(kinds.cross) <= 1 + sum(parts) <= 1 + len(parts) * prod(parts)
