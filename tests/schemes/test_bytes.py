"""Bytes sent match the plan for every scheme, layer and grid."""

from collections import Counter

import numpy as np
import pytest
from case_selection import ALL_CASES, SEED
from scheme_runs import GRIDS, LAYERS, SCHEMES, build_model, draw_inputs, run_on_ranks, run_step

import neondist as nd
from neondist.geometry import grid_shape
from neondist.halo import Phase, as_scheme

UNEVEN_GRIDS = [(7, 7)]
EXTRA_SCHEMES = ["deep_halo", "overlap_tile", "auto", "stale(steps=3)", "every(j=3)", "every(j=1)"]


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        (layer, name)
        for k, layer in enumerate(LAYERS)
        for n, name in enumerate(SCHEMES)
        if name == "halo" or ALL_CASES or not (k + n + SEED) % 4
    ],
)
@pytest.mark.long
def test_bytes_match_the_plan(layer, scheme):
    shape, make = LAYERS[layer]
    for ranks, rows in GRIDS[list(LAYERS).index(layer) % 6 :: 6] if scheme == "halo" else UNEVEN_GRIDS:

        def job(comm, rows=rows):
            model = build_model(comm, make(scheme=scheme), shape, rows)
            x, dy = draw_inputs(model)
            for number in range(2):  # schemes with state differ in their first steps
                run_step(model, number, x, dy)
            before = model.bytes_sent
            for number in range(2, 4):
                run_step(model, number, x, dy)
            return model.bytes_sent - before

        plan = nd.ConvnetDist(make(scheme=scheme)).plan(shape, grid_shape(ranks, rows=rows))[0]
        expected = [2 * sent for sent in plan.halo_bytes_by_tile(samples=3, itemsize=8)]
        assert run_on_ranks(ranks, job) == expected, (ranks, rows)


@pytest.mark.parametrize("reverse", [False, True], ids=["gather", "scatter_add"])
@pytest.mark.parametrize("text", [*SCHEMES, *EXTRA_SCHEMES])
@pytest.mark.long
def test_exchanges_and_messages_match_the_scheme(text, reverse):
    """Check training and evaluation steps; the mean is that of the second cycle."""
    scheme, cycle = as_scheme(text), 6

    def record_exchanges(ga, call, *arguments):
        """Return the exchanges of a call, with each message as (peer, bytes)."""
        before = [exchange.run_count for _, exchange in ga.recorded_exchanges]
        call(*arguments)
        before += [0] * (len(ga.recorded_exchanges) - len(before))
        return [
            (direction, [(message.peer, message.nbytes) for message in exchange.sends])
            for (direction, exchange), runs in zip(ga.recorded_exchanges, before, strict=True)
            for _ in range(exchange.run_count - runs)
        ]

    def job(comm):
        ga = nd.GlobalArray(
            nd.ProcessGrid(comm, rows=2), (3, 9, 8, 2), nd.Window(4, 2, ((1, 2), (2, 0))), dtype="float32"
        )
        ga.policy, ga.swaps_directions = scheme, reverse
        rng, counts = np.random.default_rng(comm.rank), Counter()
        view, tile = rng.normal(size=ga.view_shape), rng.normal(size=ga.local_shape)
        for number in range(2 * cycle):
            for training in (True, False):
                for gathers, call, array in ((True, ga.get_fprop_view, tile), (False, ga.get_bprop_view, view)):
                    direction = "forward" if gathers != reverse else "backward"
                    pieces = ga.plan.sends if gathers else ga.plan.receives
                    sizes = [(piece.peer, 3 * 2 * piece.source.size) for piece in pieces]
                    messages = [(peer, scheme.message_bytes(n, 4, direction)) for peer, n in sizes]
                    minimum, _, maximum = scheme.exchanges_per_call(direction)
                    exchanges = record_exchanges(ga, call, array, Phase(training, number))
                    assert minimum <= len(exchanges) <= maximum
                    assert exchanges == [(direction, messages)] * len(exchanges)
                    counts[direction] += len(exchanges) * (training and number >= cycle)
        assert counts == {
            direction: cycle * scheme.exchanges_per_call(direction)[1] for direction in ("forward", "backward")
        }

    run_on_ranks(4, job)


def test_inner_tile_formula():
    """H = n c (2 O (h + w) + 4 O²) values, with n = 2, c = 3, O = 2, h x w = 5 x 7."""
    model = nd.ConvnetDist([nd.ConvLayerDist(1, 5, padding=2)])
    plan = model.plan((15, 21, 3), nd.GridShape(rows=3, cols=3))[0]
    assert 2 * plan.forward_elements_sent[4] == 2 * 3 * (2 * 2 * (5 + 7) + 4 * 2**2)


def test_towers_send_nothing_before_merging():
    def job(comm):
        layers = [
            nd.ConvLayerDist(4, 5, padding=2),
            nd.MaxPoolingLayerDist(3, 2),
            nd.ConvLayerDist(4, 3, scheme=nd.schemes.Tower(merge=True)),
            nd.ConvLayerDist(4, 3),
            nd.FCLayerDist(10),
        ]
        model = build_model(comm, layers, (20, 19, 3), scheme="tower")
        model.train_batch(model.scatter(draw_inputs(model)[0]), np.zeros(3, int))
        return [layer.bytes_sent > 0 for layer in model.leaves]

    assert run_on_ranks(6, job) == [[False, False, True, False, False]] * 6
