"""Plans computed for one tile of each class equal those computed for all tiles."""

import os

import pytest

pytest.importorskip("torch", reason="some of the generated networks need PyTorch")

from graphs.build import build_model
from graphs.draw import draw_case
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.plan import report

SEED = int(os.environ["NEONDIST_SEED"])
side_lengths = st.integers(1, 7)


@settings(max_examples=12)
@given(
    st.integers(0, 10**6),
    st.builds(nd.GridShape, st.integers(1, 2), side_lengths, side_lengths, st.sampled_from([1, 1, 2])),
    st.sampled_from([None, None, "ShardedOptimizer", "PSLoadBalancing"]),
)
def test_tile_classes_represent_all_tiles(number, grid, strategy):
    case = draw_case(SEED, number)
    model = build_model(case.replace(memory=None, accumulate=1), dist=True)
    try:
        model.configure_execution(memory=case.memory and grid.size << 40, strategy=strategy)
        plan = model.plan(case.shape, grid, max(case.batch, grid.replicas))
        plan.parameters.strategy.check_needs_no_servers()
    except nd.UserError:
        reject()
    tiles, size = range(grid.tiles), plan.itemsize
    assert plan.peak_arena_bytes == max(plan.arena_bytes(0, tile) for tile in tiles)
    assert plan.needed_bytes == max(plan.memory(tile) for tile in tiles)
    assert plan.needed_bytes_with(None) == max(
        plan._bytes_outside_stream(0, tile) + plan.parameters.memory(tile) for tile in tiles
    )
    for index, (layer, costs) in enumerate(zip(plan, plan.costs(), strict=True)):
        views, outputs = [layer.view(tile) for tile in tiles], [layer.tile(tile) for tile in tiles]
        assert layer.num_parameters_by_tile == [layer.num_parameters_on(tile) for tile in tiles]
        assert layer.halo_cells_by_tile == [
            sum(exchange.plan(tile).halo_volume for exchange in layer._exchanges) for tile in tiles
        ]
        sent = [
            [
                piece.source.size * exchange.channels
                for exchange in layer._exchanges
                for piece in exchange.plan(tile).sends
            ]
            for tile in tiles
        ]
        assert [sorted(layer._message_sizes_of_gather(tile)) for tile in tiles] == list(map(sorted, sent))
        arrays = (1 + (index > 0)) * max(view.buffer.size for view in views) * layer.input_shape[-1] * size
        held = max(layer.num_parameters_by_tile) * size * (2 + len(model.optimizer.all_slot_names))
        assert costs.memory == arrays * plan.max_live_samples(0) + held
        for box, boxes in (
            ((lambda tile, layer=layer: layer.view(tile).need), [view.need for view in views]),
            (layer.tile, outputs),
        ):
            assert report._format_extents(map(box, layer.representative_tiles), 1) == report._format_extents(boxes, 1)
