"""Cells read by the strips of a streamed image."""

from hypothesis import given, reject
from hypothesis import strategies as st

import neondist as nd
from neondist.geometry import TileStripGrid
from neondist.plan import StripwisePlan


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    st.integers(1, 6),
)
def test_strips_partition_each_tile(extent, parts, count):
    grid = nd.GridShape(1, *parts)
    strips = TileStripGrid(1, *parts, strips=count)
    tiles, cut = grid.partition(extent), strips.partition(extent)
    all_strips = []
    for tile in range(grid.tiles):
        numbers, box = strips.strip_numbers_of(tile, len(extent)), tiles.box(tile)
        boxes = [cut.box(number) for number in numbers]
        assert sum(strip_box.size for strip_box in boxes) == box.size
        assert all(strip_box.empty or strip_box.intersect(box) == strip_box for strip_box in boxes)
        all_strips += numbers
    assert sorted(all_strips) == list(range(strips.tiles))


window_arguments = st.fixed_dictionaries(
    {"kernel_size": st.integers(1, 5), "stride": st.integers(1, 3), "padding": st.integers(0, 2)}
)


@given(st.integers(3, 24), st.integers(1, 3), st.integers(1, 12), st.booleans(), window_arguments, window_arguments)
def test_strips_below_a_cut_read_only_their_tile(extent, tiles, count, transposed, first, second):
    """Empty strips still have a cell, which may lie outside the tile."""
    layers = [
        (nd.DeconvLayerDist if transposed else nd.ConvLayerDist)(1, bias=False, **first),
        nd.GroupNormLayerDist(1),
        nd.ConvLayerDist(1, bias=False, **second),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(nd.Tanh()),
    ]
    try:
        plan = nd.ConvnetDist(layers).plan((extent, 2), nd.GridShape(1, tiles))
    except nd.UserError:
        reject()
    stream = StripwisePlan.of(plan.graph, len(layers), plan.grid, count)
    stream = stream.with_checkpoints(count, tuple(stream.possible_cuts()))
    for part in stream.parts:
        for tile in range(tiles):
            image = stream.tile_cells[0].box(tile)
            assert all(
                part.strip_partitions[0].box(strip).intersect(image) == part.strip_partitions[0].box(strip)
                for strip in part.strips(tile)
            )
