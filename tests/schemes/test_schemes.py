"""Cells of other tiles under each scheme, and their gradients."""

from itertools import product

import numpy as np
import pytest
from device import Device
from drawn import windows
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scheme_runs import GRIDS, LAYERS, SCHEMES, build, noise, on_ranks, step
from support import slides
from turns import some

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.errors import ConfigError
from neondist.halo import as_scheme

FILLS = {"zeros": "zeros", "reflect": "reflect", "replicate": "replicate"}


EXACT = [name for name in SCHEMES if as_scheme(name).exact]


@pytest.mark.parametrize(("layer", "scheme"), some(product(LAYERS, EXACT)))
@pytest.mark.long
def test_exact_schemes_compute_what_one_process_does(layer, scheme):
    """Each pair on every third grid, other schemes on others."""
    shape, make = LAYERS[layer]
    first = (list(LAYERS).index(layer) + list(SCHEMES).index(scheme)) % 3

    def job(comm, rows=None):
        model = build(comm, make(scheme=scheme), shape, rows)
        y, dx = step(model, 0, *noise(model))
        return [y, dx, *model.gradients().values()]

    expected = on_ranks(1, job)[0]
    for ranks, rows in GRIDS[first::3]:
        for found in on_ranks(ranks, lambda comm, rows=rows: job(comm, rows)):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def dots(scheme, layers, shape, ranks, rows=None):
    """<F x, y>, <x, F' y> and what they are made of."""

    def job(comm):
        model = build(comm, layers(), shape, rows, scheme=scheme)
        model.load_state({k: 0 * v if k.endswith("bias") else v for k, v in model.state().items()})
        x, dy = noise(model)
        y, dx = step(model, 0, x, dy)
        return np.sum(y * dy), np.sum(x * dx), np.abs(y * dy).sum()

    left, right, scale = on_ranks(ranks, job)[0]
    return abs(left - right) / scale


LINEAR = {
    "conv": lambda: [nd.ConvLayerDist(2, 5, 2, "same"), nd.ConvLayerDist(3, 3, padding=1, padding_mode="wrap")],
    "deconv": lambda: [nd.DeconvLayerDist(2, 4, 2, 1)],
    "bilinear": lambda: [nd.UpsampleLayerDist(2, "bilinear"), nd.AvgPoolingLayerDist(3, 2)],
}


@pytest.mark.parametrize("layers", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("scheme", ["halo", "tower", "tower(fill=reflect)", "tower(fill=replicate)"])
@pytest.mark.long
def test_gradients_are_those_of_the_network_that_the_scheme_makes(scheme, layers):
    for ranks, rows in [(4, 2), (6, 3), (12, 2)]:
        assert dots(scheme, layers, (9, 8, 2), ranks, rows) < 1e-12


@pytest.mark.parametrize("layers", LINEAR.values(), ids=LINEAR)
def test_halo_oneway_fails_the_dot_test(layers):
    assert dots("halo_oneway", layers, (9, 8, 2), 4) > 1e-4


@example(((6, 3), nd.Window(5, padding=2)), (2, 1), "replicate")
@given(windows(), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from(sorted(FILLS)))
@settings(max_examples=30, deadline=None)
def test_towers_of_any_window_pass_the_dot_test(drawn, parts, fill):
    shape, window = drawn
    assume(slides(shape, window))
    fill = "reflect" if fill == "zeros" and window.fill else fill  # a constant is not linear

    def job(comm):
        grid = nd.ProcessGrid(comm, rows=parts[0], cols=parts[1])
        ga = nd.GlobalArray(grid, (2, *shape, 1), window, dtype="float64")
        ga.policy = nd.schemes.Tower(fill=fill)
        x = ga.scatter(np.random.default_rng(7).normal(size=ga.global_shape))
        dview = np.random.default_rng(grid.rank).normal(size=ga.view_shape)
        view = ga.get_fprop_view(x) - ga.get_fprop_view(0 * x)
        assert not ga.bytes_sent
        return np.sum(view * dview), np.sum(x * ga.get_bprop_view(dview))

    for left, right in on_ranks(parts[0] * parts[1], job):  # on each tile by itself: nobody talks
        assert left == pytest.approx(right, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("fill", FILLS)
def test_a_tower_is_a_network_on_the_tile_alone(fill):
    """A tile filled like its padding computes what one process does on an image that is the tile."""
    layers = [(nd.ConvLayer, 3, 5, 2), (nd.ConvLayer, 2, 3, 1)]

    def on_tiles(comm):
        model = build(comm, [nd.ConvLayerDist(c, k, padding=p, padding_mode=fill) for _, c, k, p in layers], (12, 8, 2),
                      scheme=nd.schemes.Tower(fill=fill))  # fmt: skip
        y, dx = step(model, 0, *noise(model))
        return model.state(), y, dx, model.gradients()

    state, y, dx, gradients = on_ranks(4, on_tiles)[0]
    total = dict.fromkeys(gradients, 0)
    for rows in (slice(0, 6), slice(6, 12)):
        for cols in (slice(0, 4), slice(4, 8)):
            alone = nd.Convnet([cls(c, k, padding=p, padding_mode=fill) for cls, c, k, p in layers], dtype="float64")
            alone.build((6, 4, 2), 3)
            alone.load_state(state)
            model_x, model_dy = _noise_of((12, 8, 2), (12, 8, 2))
            np.testing.assert_allclose(alone.fprop(model_x[:, rows, cols]), y[:, rows, cols], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(alone.bprop(model_dy[:, rows, cols]), dx[:, rows, cols], rtol=1e-10, atol=1e-12)
            total = {name: total[name] + array for name, array in alone.gradients().items()}
    for name, array in gradients.items():
        np.testing.assert_allclose(array, total[name], rtol=1e-10)


def _noise_of(*shapes, batch=3):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(batch, *shape)) for shape in shapes]


def test_max_pooling_over_towers_stays_finite():
    """Even where a window lies wholly in another tile."""

    def job(comm):
        model = build(comm, [nd.MaxPoolingLayerDist(2, 3, padding=1)], (7, 5, 1), rows=5, scheme="tower")
        return np.isfinite(model.gather(model.fprop(model.scatter(noise(model)[0])))).all()

    assert all(on_ranks(5, job))


def series(scheme, steps, training=True, backend="numpy"):
    """Views and input gradients of one array on 4 tiles, for step after step of other images."""

    def job(comm):
        grid = nd.ProcessGrid(comm)
        ga = nd.GlobalArray(grid, (2, 8, 7, 2), nd.Window(5, padding=2), dtype="float64", backend=backend)
        ga.policy = as_scheme(scheme)
        found = []
        for number in range(steps):
            phase = nd.halo.Phase(training, number)
            rng = np.random.default_rng(number)
            x, dview = rng.normal(size=ga.global_shape), rng.normal(size=ga.view_shape)
            found.append((to_host(ga.get_fprop_view(ga.scatter(x), phase)), to_host(ga.get_bprop_view(dview, phase))))
        own = ga.own.relative_to(ga.need).slices
        mine = np.zeros(ga.view_shape, bool)
        mine[(slice(None), *own)] = True
        return found, mine, own

    return on_ranks(4, job)


@pytest.mark.parametrize(
    ("scheme", "source"),
    [
        ("stale", [0, 0, 1, 2, 3]),
        ("stale(steps=2)", [0, 1, 0, 1, 2]),
        ("every(j=2)", [0, 0, 2, 2, 4]),
        ("every(j=3)", [0, 0, 0, 3, 3]),
    ],
)
def test_cells_and_gradients_of_earlier_steps(scheme, source):
    """In step t the remote cells are those of step source[t], and so is what returns."""
    exact, nothing = series("halo", 5), series("halo_oneway", 5)
    for (found, mine, _), (wanted, _, _), (alone, _, _) in zip(series(scheme, 5), exact, nothing, strict=True):
        for t, old in enumerate(source):
            np.testing.assert_array_equal(found[t][0], np.where(mine, wanted[t][0], wanted[old][0]))
            returned = found[t][1] - alone[t][1]
            np.testing.assert_allclose(returned, wanted[old][1] - alone[old][1], atol=1e-12)


@pytest.mark.parametrize("scheme", ["stale", "every(j=2)", "every(j=2, between=zeros)"])
def test_evaluation_is_exact(scheme):
    for (found, *_), (wanted, *_) in zip(series(scheme, 3, False), series("halo", 3, False), strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("scheme", ["stale", "stale(steps=2)", "every(j=3)", "quantised(bits=8, feedback=true)"])
def test_an_evaluation_between_steps_changes_none_of_them(scheme):
    """Its cells are no earlier step's."""

    def job(comm, evaluates):
        shape, layers = LAYERS["conv"]
        model, found = build(comm, layers(), shape, scheme=scheme), []
        for number in range(5):
            found += step(model, number, *noise(model, seed=number))
            if evaluates:
                model.fprop(model.scatter(noise(model, seed=9)[0]), training=False)
        return found

    wanted = on_ranks(4, lambda comm: job(comm, False))[0]
    for found in on_ranks(4, lambda comm: job(comm, True)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_device_has_the_same_numbers(scheme):
    for (found, *_), (wanted, *_) in zip(series(scheme, 3, backend=Device().backend), series(scheme, 3), strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(("bits", "error"), [(16, 4.0 / 2**16), (8, 4.0 / 2**8)])
def test_quantised_cells_are_off_by_half_a_unit_at_most(bits, error):
    largest = 0
    for (found, mine, _), (wanted, *_) in zip(series(f"quantised(bits={bits})", 2), series("halo", 2), strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one[0][mine], other[0][mine])
            largest = max(largest, np.abs(one[0] - other[0]).max())
            assert np.abs(one[1] - other[1]).max() < 4 * error
    assert error / 16 < largest < error


def test_feedback_returns_what_rounding_took():
    """Of the same gradient again and again, the mean arrives ever better; without feedback it does not."""

    def job(comm, feedback, steps=64):
        ga = nd.GlobalArray(nd.ProcessGrid(comm), (1, 6, 6, 1), nd.Window(3, padding=1), dtype="float64")
        dview = np.random.default_rng(1).normal(size=(1, 6, 6, 1))[:, : ga.view_shape[1], : ga.view_shape[2]]
        exact = ga.get_bprop_view(dview)
        ga.policy = nd.schemes.Quantised(8, feedback=feedback)
        return np.abs(sum(ga.get_bprop_view(dview) - exact for _ in range(steps))).max() / steps

    with_it, without = (max(on_ranks(4, lambda comm, f=f: job(comm, f))) for f in (True, False))
    assert with_it < without / 10


def test_feedback_is_for_gradients():
    """Cells of the next batch have nothing to do with those of this one."""
    x, dy = (np.random.default_rng(2).normal(size=(3, 9, 8, n)) for n in (2, 1))

    def job(comm):
        layers = [nd.ConvLayerDist(1, 3, padding=1)]
        model = build(comm, layers, (9, 8, 2), scheme="quantised(bits=8, feedback=true)")
        return [step(model, number, x, dy) for number in range(2)]

    for one, other in on_ranks(2, job):
        np.testing.assert_array_equal(one[0], other[0])
        assert not np.array_equal(one[1], other[1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.long
def test_empty_batches_and_empty_tiles(scheme):
    def job(comm):
        layers = [nd.ConvLayerDist(2, 5, padding=2), nd.MaxPoolingLayerDist(3, 2, 1), nd.DeconvLayerDist(1, 3, 2)]
        model = build(comm, layers, (3, 2, 1), rows=6, batch=1, scheme=scheme)
        for batch in (0, 1, 2):
            y, dx = step(model, 0, *noise(model, batch))
            assert len(y) == len(dx) == batch
            assert np.isfinite(y).all()
            assert np.isfinite(dx).all()

    on_ranks(6, job)


def test_a_layer_before_the_model():
    model = nd.ConvnetDist(
        [nd.ConvLayerDist(1, 3, scheme="halo"), nd.ConvLayerDist(1, 3)], scheme=nd.schemes.Tower(fill="reflect")
    )
    assert [type(layer.scheme) for layer in model.leaves] == [nd.schemes.Halo, nd.schemes.Tower]
    assert model.leaves[1].scheme.fill == "reflect"
    assert type(nd.distribute(nd.Convnet([nd.ConvLayer(1, 3)], scheme="tower")).leaves[0].scheme) is nd.schemes.Tower


@given(windows(), st.tuples(st.integers(1, 4), st.integers(1, 3)))
@settings(max_examples=30, deadline=None)
@pytest.mark.long
def test_gathering_gives_the_gradient_that_scattering_gives(drawn, parts):
    shape, window = drawn
    assume(slides(shape, window) and len(shape) < 3)

    def job(comm, scheme, rows=None):
        conv = nd.ConvLayerDist(
            2,
            window.kernel,
            window.stride,
            window.padding,
            dilation=window.dilation,
            scheme=nd.schemes.Halo(backward=scheme),
        )
        model = build(comm, [conv], (*shape, 1), rows)
        return step(model, 0, *noise(model))[1]

    expected = on_ranks(1, lambda comm: job(comm, "scatter"))[0]
    found = on_ranks(parts[0] * parts[1], lambda comm: job(comm, "gather", parts[0]))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_gathering_is_for_convolutions_padded_with_zeros():
    for layer in (nd.MaxPoolingLayerDist(3), nd.ConvLayerDist(1, 3, padding=1, padding_mode="wrap")):
        with pytest.raises(ConfigError, match="backward 'gather' needs a convolution padded with zeros"):
            nd.ConvnetDist([layer], scheme="halo(backward=gather)").plan((9, 9, 1))


def test_auto_gathers_where_that_is_fewer_bytes():
    layers = [
        nd.ConvLayerDist(8, 3),
        nd.ConvLayerDist(2, 3),
        nd.ConvLayerDist(2, 3, 2),
        nd.ConvLayerDist(2, 3, padding=1),
    ]
    model = nd.ConvnetDist([*layers, nd.MaxPoolingLayerDist(3)], scheme="halo(backward=auto)")
    grid = nd.GridShape(1, 2, 2)
    plans = model.plan((32, 32, 3), grid)[:4]
    gathers = [layer.gathers_for(p.input_shape, grid) is not None for layer, p in zip(layers, plans, strict=True)]
    assert gathers == [False, True, True, False]
