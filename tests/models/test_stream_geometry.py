"""Cells that the strips of a streamed image read."""

from hypothesis import given, reject
from hypothesis import strategies as st

import neondist as nd
from neondist.geometry import StripGrid
from neondist.plan import Stream


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    st.integers(1, 6),
)
def test_strips_make_up_each_tile(extent, parts, count):
    grid = nd.GridShape(1, *parts)
    strips = StripGrid(1, *parts, strips=count)
    tiles, cut = grid.partition(extent), strips.partition(extent)
    seen = []
    for tile in range(grid.tiles):
        numbers, box = strips.strips_of(tile, len(extent)), tiles.box(tile)
        boxes = [cut.box(number) for number in numbers]
        assert sum(one.size for one in boxes) == box.size
        assert all(one.empty or one.intersect(box) == one for one in boxes)
        seen += numbers
    assert sorted(seen) == list(range(strips.tiles))


sliding = st.fixed_dictionaries(
    {"kernel_size": st.integers(1, 5), "stride": st.integers(1, 3), "padding": st.integers(0, 2)}
)


@given(st.integers(3, 24), st.integers(1, 3), st.integers(1, 12), st.booleans(), sliding, sliding)
def test_strips_below_a_cut_read_no_more_of_the_image_than_the_tile_has(extent, tiles, count, grows, first, second):
    """Strips that need nothing have a cell nevertheless, which may lie outside of the tile."""
    layers = [
        (nd.DeconvLayerDist if grows else nd.ConvLayerDist)(1, bias=False, **first),
        nd.GroupNormLayerDist(1),
        nd.ConvLayerDist(1, bias=False, **second),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(nd.Tanh()),
    ]
    try:
        plan = nd.ConvnetDist(layers).plan((extent, 2), nd.GridShape(1, tiles))
    except nd.UserError:
        reject()
    stream = Stream.of(plan.graph, len(layers), plan.grid, count)
    stream = stream.checkpoint(count, tuple(stream.possible_cuts()))
    for part in stream.parts:
        for tile in range(tiles):
            image = stream.tiles[0].box(tile)
            assert all(part.cells[0].box(at).intersect(image) == part.cells[0].box(at) for at in part.strips(tile))
