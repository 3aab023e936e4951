"""Tiles of the same key have equivalent plans."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.geometry import HaloPlan, Partition, Window

axis_parameters = st.tuples(
    st.integers(1, 23), st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2)
)


def list_message_sizes(plan):
    return [[piece.source.size for piece in pieces] for pieces in (plan.receives, plan.sends)]


def list_box_shapes(plan):
    boxes = plan.own, plan.need, plan.buffer
    return [box.shape for box in boxes], plan.need == plan.own, plan.need == plan.buffer, plan.trivial


def list_relative_boxes(plan):
    origin = [-lo for lo in plan.own.lo]
    pieces = [[piece.source.shift(origin) for piece in pieces] for pieces in (plan.receives, plan.sends, plan.local)]
    return [box.shift(origin) for box in (plan.own, plan.need, plan.buffer)], pieces


@settings(max_examples=150)
@given(st.lists(axis_parameters, min_size=1, max_size=2), st.sampled_from(["zeros", "zeros", "reflect", "wrap"]))
def test_tiles_of_a_class_have_equivalent_plans(axes, mode):
    extent, parts, kernel, stride, padding = map(tuple, zip(*axes, strict=True))
    if mode != "zeros":  # padding reads cells of the image
        padding = tuple(min(p, n - 1) for p, n in zip(padding, extent, strict=True))
        kernel = tuple(2 * p + 1 for p in padding)
        stride = (1,) * len(extent)
    extent = tuple(map(max, extent, kernel))
    partition, window = Partition(extent, parts), Window(kernel, stride, padding, mode=mode, ndim=len(extent))
    plans = [HaloPlan.of(partition, window, tile) for tile in range(partition.tiles)]
    for level, signature in (
        ("messages", list_message_sizes),
        ("extents", list_box_shapes),
        ("all", list_relative_boxes),
    ):
        keys, signatures = HaloPlan.part_class_keys(partition, window, None, level), {}
        assert keys.parts == parts
        for tile, plan in enumerate(plans):
            key = tuple(axis[part] for axis, part in zip(keys.by_axis, partition.coords(tile), strict=True))
            assert signatures.setdefault(key, signature(plan)) == signature(plan)
        covered = {
            axis: {keys.by_axis[axis][partition.coords(t)[axis]] for t in keys.representative_tiles}
            for axis in range(len(parts))
        }
        assert covered == {axis: set(keys.by_axis[axis]) for axis in range(len(parts))}
        assert len(keys.representative_tiles) <= 1 + sum(parts) <= 1 + len(parts) * prod(parts)
