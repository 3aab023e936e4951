"""Bytes sent equal the formula, for every scheme, layer and grid."""

from collections import Counter

import numpy as np
import pytest
from scheme_runs import GRIDS, LAYERS, SCHEMES, build, noise, on_ranks, step
from turns import EVERY, SEED

import neondist as nd
from neondist.geometry import grid_shape
from neondist.halo import Phase, as_scheme

UNEVEN = [(7, 7)]
MORE = ["deep_halo", "overlap_tile", "auto", "stale(steps=3)", "every(j=3)", "every(j=1)"]


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        (layer, name)
        for k, layer in enumerate(LAYERS)
        for n, name in enumerate(SCHEMES)
        if name == "halo" or EVERY or not (k + n + SEED) % 4
    ],
)
@pytest.mark.long
def test_bytes_are_those_of_the_formula(layer, scheme):
    shape, make = LAYERS[layer]
    for ranks, rows in GRIDS[list(LAYERS).index(layer) % 6 :: 6] if scheme == "halo" else UNEVEN:

        def job(comm, rows=rows):
            model = build(comm, make(scheme=scheme), shape, rows)
            x, dy = noise(model)
            for number in range(2):  # the first steps of a scheme with a memory are others
                step(model, number, x, dy)
            before = model.bytes_sent
            for number in range(2, 4):
                step(model, number, x, dy)
            return model.bytes_sent - before

        plan = nd.ConvnetDist(make(scheme=scheme)).plan(shape, grid_shape(ranks, rows=rows))[0]
        expected = [2 * sent for sent in plan.sent_bytes(samples=3, itemsize=8)]
        assert on_ranks(ranks, job) == expected, (ranks, rows)


@pytest.mark.parametrize("reverse", [False, True], ids=["gathers", "adds"])
@pytest.mark.parametrize("text", [*SCHEMES, *MORE])
@pytest.mark.long
def test_every_exchange_and_message_is_what_the_scheme_says(text, reverse):
    """In training and evaluation, step after step; the mean is that of the steps after the first."""
    scheme, cycle = as_scheme(text), 6

    def sent(ga, call, *given):
        """How often a call sent all messages, each as (peer, bytes)."""
        before = [exchange.runs for _, exchange in ga.recorded]
        call(*given)
        before += [0] * (len(ga.recorded) - len(before))
        return [
            (direction, [(message.peer, message.nbytes) for message in exchange.sends])
            for (direction, exchange), runs in zip(ga.recorded, before, strict=True)
            for _ in range(exchange.runs - runs)
        ]

    def job(comm):
        ga = nd.GlobalArray(
            nd.ProcessGrid(comm, rows=2), (3, 9, 8, 2), nd.Window(4, 2, ((1, 2), (2, 0))), dtype="float32"
        )
        ga.policy, ga.reverse = scheme, reverse
        rng, counts = np.random.default_rng(comm.rank), Counter()
        view, tile = rng.normal(size=ga.view_shape), rng.normal(size=ga.local_shape)
        for number in range(2 * cycle):
            for training in (True, False):
                for gathers, call, array in ((True, ga.get_fprop_view, tile), (False, ga.get_bprop_view, view)):
                    direction = "forward" if gathers != reverse else "backward"
                    pieces = ga.plan.sends if gathers else ga.plan.receives
                    numbers = [(piece.peer, 3 * 2 * piece.source.size) for piece in pieces]
                    messages = [(peer, scheme.message_bytes(n, 4, direction)) for peer, n in numbers]
                    least, _, most = scheme.exchanges(direction)
                    found = sent(ga, call, array, Phase(training, number))
                    assert least <= len(found) <= most
                    assert found == [(direction, messages)] * len(found)
                    counts[direction] += len(found) * (training and number >= cycle)
        assert counts == {way: cycle * scheme.exchanges(way)[1] for way in ("forward", "backward")}

    on_ranks(4, job)


def test_the_formula_of_an_inner_tile():
    """H = n c (2 O (h + w) + 4 O²) numbers, here n = 2, c = 3, O = 2, h x w = 5 x 7."""
    model = nd.ConvnetDist([nd.ConvLayerDist(1, 5, padding=2)])
    plan = model.plan((15, 21, 3), nd.GridShape(rows=3, cols=3))[0]
    assert 2 * plan.sent_words[4] == 2 * 3 * (2 * 2 * (5 + 7) + 4 * 2**2)


def test_a_tower_sends_nothing_until_the_towers_meet():
    def job(comm):
        layers = [
            nd.ConvLayerDist(4, 5, padding=2),
            nd.MaxPoolingLayerDist(3, 2),
            nd.ConvLayerDist(4, 3, scheme=nd.schemes.Tower(merge=True)),
            nd.ConvLayerDist(4, 3),
            nd.FCLayerDist(10),
        ]
        model = build(comm, layers, (20, 19, 3), scheme="tower")
        model.train_batch(model.scatter(noise(model)[0]), np.zeros(3, int))
        return [layer.bytes_sent > 0 for layer in model.leaves]

    assert on_ranks(6, job) == [[False, False, True, False, False]] * 6
