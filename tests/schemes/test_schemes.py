"""Cells of other tiles and their gradients under each scheme."""

from itertools import product

import numpy as np
import pytest
from case_selection import select_cases
from common_checks import window_fits
from device import Device
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scheme_runs import GRIDS, LAYERS, SCHEMES, build_model, draw_inputs, run_on_ranks, run_step
from window_strategies import windows

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.errors import ConfigError
from neondist.halo import as_scheme

FILLS = "zeros", "reflect", "replicate"


EXACT = [name for name in SCHEMES if as_scheme(name).exact]


@pytest.mark.parametrize(("layer", "scheme"), select_cases(product(LAYERS, EXACT)))
@pytest.mark.long
def test_exact_schemes_match_one_process(layer, scheme):
    """Run each pair on a third of the grids, varied by layer and scheme."""
    shape, make = LAYERS[layer]
    first = (list(LAYERS).index(layer) + list(SCHEMES).index(scheme)) % 3

    def job(comm, rows=None):
        model = build_model(comm, make(scheme=scheme), shape, rows)
        y, dx = run_step(model, 0, *draw_inputs(model))
        return [y, dx, *model.gradients().values()]

    expected = run_on_ranks(1, job)[0]
    for ranks, rows in GRIDS[first::3]:
        for actual in run_on_ranks(ranks, lambda comm, rows=rows: job(comm, rows)):
            for actual_array, expected_array in zip(actual, expected, strict=True):
                np.testing.assert_allclose(actual_array, expected_array, rtol=1e-10, atol=1e-10)


def compute_dot_error(scheme, layers, shape, ranks, rows=None):
    """Return the relative difference of <F x, y> and <x, F' y>."""

    def job(comm):
        model = build_model(comm, layers(), shape, rows, scheme=scheme)
        model.load_state({k: 0 * v if k.endswith("bias") else v for k, v in model.state().items()})
        x, dy = draw_inputs(model)
        y, dx = run_step(model, 0, x, dy)
        return np.sum(y * dy), np.sum(x * dx), np.abs(y * dy).sum()

    left, right, scale = run_on_ranks(ranks, job)[0]
    return abs(left - right) / scale


LINEAR = {
    "conv": lambda: [nd.ConvLayerDist(2, 5, 2, "same"), nd.ConvLayerDist(3, 3, padding=1, padding_mode="wrap")],
    "deconv": lambda: [nd.DeconvLayerDist(2, 4, 2, 1)],
    "bilinear": lambda: [nd.UpsampleLayerDist(2, "bilinear"), nd.AvgPoolingLayerDist(3, 2)],
}


@pytest.mark.parametrize("layers", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("scheme", ["halo", "tower", "tower(fill=reflect)", "tower(fill=replicate)"])
@pytest.mark.long
def test_gradients_are_adjoint_under_the_scheme(scheme, layers):
    for ranks, rows in [(4, 2), (6, 3), (12, 2)]:
        assert compute_dot_error(scheme, layers, (9, 8, 2), ranks, rows) < 1e-12


@pytest.mark.parametrize("layers", LINEAR.values(), ids=LINEAR)
def test_halo_oneway_fails_the_dot_test(layers):
    assert compute_dot_error("halo_oneway", layers, (9, 8, 2), 4) > 1e-4


@example(((6, 3), nd.Window(5, padding=2)), (2, 1), "replicate")
@given(windows(), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from(sorted(FILLS)))
@settings(max_examples=30, deadline=None)
def test_towers_pass_the_dot_test(case, parts, fill):
    shape, window = case
    assume(window_fits(shape, window))
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

    for left, right in run_on_ranks(parts[0] * parts[1], job):  # holds on each tile, without messages
        assert left == pytest.approx(right, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("fill", FILLS)
def test_towers_equal_networks_on_single_tiles(fill):
    """Compare each tile with one process on an image of the tile alone."""
    layers = [(nd.ConvLayer, 3, 5, 2), (nd.ConvLayer, 2, 3, 1)]

    def run_on_tiles(comm):
        model = build_model(
            comm,
            [nd.ConvLayerDist(c, k, padding=p, padding_mode=fill) for _, c, k, p in layers],
            (12, 8, 2),
            scheme=nd.schemes.Tower(fill=fill),
        )
        y, dx = run_step(model, 0, *draw_inputs(model))
        return model.state(), y, dx, model.gradients()

    state, y, dx, gradients = run_on_ranks(4, run_on_tiles)[0]
    total = dict.fromkeys(gradients, 0)
    for rows in (slice(0, 6), slice(6, 12)):
        for cols in (slice(0, 4), slice(4, 8)):
            tile_model = nd.Convnet(
                [layer_class(c, k, padding=p, padding_mode=fill) for layer_class, c, k, p in layers], dtype="float64"
            )
            tile_model.build((6, 4, 2), 3)
            tile_model.load_state(state)
            model_x, model_dy = _random_arrays((12, 8, 2), (12, 8, 2))
            np.testing.assert_allclose(
                tile_model.fprop(model_x[:, rows, cols]), y[:, rows, cols], rtol=1e-10, atol=1e-12
            )
            np.testing.assert_allclose(
                tile_model.bprop(model_dy[:, rows, cols]), dx[:, rows, cols], rtol=1e-10, atol=1e-12
            )
            total = {name: total[name] + array for name, array in tile_model.gradients().items()}
    for name, array in gradients.items():
        np.testing.assert_allclose(array, total[name], rtol=1e-10)


def _random_arrays(*shapes, batch=3):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(batch, *shape)) for shape in shapes]


def test_max_pooling_over_towers_stays_finite():
    """Include windows entirely in another tile."""

    def job(comm):
        model = build_model(comm, [nd.MaxPoolingLayerDist(2, 3, padding=1)], (7, 5, 1), rows=5, scheme="tower")
        return np.isfinite(model.gather(model.fprop(model.scatter(draw_inputs(model)[0])))).all()

    assert all(run_on_ranks(5, job))


def run_steps(scheme, steps, training=True, backend="numpy"):
    """Return views and input gradients of one array on 4 tiles, for consecutive steps."""

    def job(comm):
        grid = nd.ProcessGrid(comm)
        ga = nd.GlobalArray(grid, (2, 8, 7, 2), nd.Window(5, padding=2), dtype="float64", backend=backend)
        ga.policy = as_scheme(scheme)
        outputs = []
        for number in range(steps):
            phase = nd.halo.Phase(training, number)
            rng = np.random.default_rng(number)
            x, dview = rng.normal(size=ga.global_shape), rng.normal(size=ga.view_shape)
            outputs.append((to_host(ga.get_fprop_view(ga.scatter(x), phase)), to_host(ga.get_bprop_view(dview, phase))))
        own = ga.own.relative_to(ga.need).slices
        own_cells = np.zeros(ga.view_shape, bool)
        own_cells[(slice(None), *own)] = True
        return outputs, own_cells, own

    return run_on_ranks(4, job)


@pytest.mark.parametrize(
    ("scheme", "source"),
    [
        ("stale", [0, 0, 1, 2, 3]),
        ("stale(steps=2)", [0, 1, 0, 1, 2]),
        ("every(j=2)", [0, 0, 2, 2, 4]),
        ("every(j=3)", [0, 0, 0, 3, 3]),
    ],
)
def test_stale_cells_and_gradients(scheme, source):
    """Remote cells and returned gradients of step t are those of step source[t]."""
    exact, one_way = run_steps("halo", 5), run_steps("halo_oneway", 5)
    for (actual, own_cells, _), (expected, _, _), (local, _, _) in zip(
        run_steps(scheme, 5), exact, one_way, strict=True
    ):
        for step, step_used in enumerate(source):
            np.testing.assert_array_equal(
                actual[step][0], np.where(own_cells, expected[step][0], expected[step_used][0])
            )
            returned = actual[step][1] - local[step][1]
            np.testing.assert_allclose(returned, expected[step_used][1] - local[step_used][1], atol=1e-12)


@pytest.mark.parametrize("scheme", ["stale", "every(j=2)", "every(j=2, between=zeros)"])
def test_evaluation_is_exact(scheme):
    for (actual, *_), (expected, *_) in zip(run_steps(scheme, 3, False), run_steps("halo", 3, False), strict=True):
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_array[0], expected_array[0])


@pytest.mark.parametrize("scheme", ["stale", "stale(steps=2)", "every(j=3)", "quantised(bits=8, feedback=true)"])
def test_evaluation_between_steps_does_not_affect_training(scheme):
    """Evaluation does not affect the state of the scheme."""

    def job(comm, evaluates):
        shape, layers = LAYERS["conv"]
        model, outputs = build_model(comm, layers(), shape, scheme=scheme), []
        for number in range(5):
            outputs += run_step(model, number, *draw_inputs(model, seed=number))
            if evaluates:
                model.fprop(model.scatter(draw_inputs(model, seed=9)[0]), training=False)
        return outputs

    expected = run_on_ranks(4, lambda comm: job(comm, False))[0]
    for actual in run_on_ranks(4, lambda comm: job(comm, True)):
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_array, expected_array)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_device_results_match_the_host(scheme):
    for (actual, *_), (expected, *_) in zip(
        run_steps(scheme, 3, backend=Device().backend), run_steps(scheme, 3), strict=True
    ):
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_array[0], expected_array[0])
            np.testing.assert_array_equal(actual_array[1], expected_array[1])


@pytest.mark.parametrize(("bits", "error"), [(16, 4.0 / 2**16), (8, 4.0 / 2**8)])
def test_quantisation_error_bound(bits, error):
    largest = 0
    for (actual, own_cells, _), (expected, *_) in zip(
        run_steps(f"quantised(bits={bits})", 2), run_steps("halo", 2), strict=True
    ):
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_array[0][own_cells], expected_array[0][own_cells])
            largest = max(largest, np.abs(actual_array[0] - expected_array[0]).max())
            assert np.abs(actual_array[1] - expected_array[1]).max() < 4 * error
    assert error / 16 < largest < error


def test_feedback_compensates_rounding_errors():
    """Check that feedback makes the mean of a repeated gradient converge."""

    def job(comm, feedback, steps=64):
        ga = nd.GlobalArray(nd.ProcessGrid(comm), (1, 6, 6, 1), nd.Window(3, padding=1), dtype="float64")
        dview = np.random.default_rng(1).normal(size=(1, 6, 6, 1))[:, : ga.view_shape[1], : ga.view_shape[2]]
        exact = ga.get_bprop_view(dview)
        ga.policy = nd.schemes.Quantised(8, feedback=feedback)
        return np.abs(sum(ga.get_bprop_view(dview) - exact for _ in range(steps))).max() / steps

    with_feedback, without_feedback = (max(run_on_ranks(4, lambda comm, f=f: job(comm, f))) for f in (True, False))
    assert with_feedback < without_feedback / 10


def test_feedback_applies_only_to_gradients():
    """Cells of different batches are independent."""
    x, dy = (np.random.default_rng(2).normal(size=(3, 9, 8, n)) for n in (2, 1))

    def job(comm):
        layers = [nd.ConvLayerDist(1, 3, padding=1)]
        model = build_model(comm, layers, (9, 8, 2), scheme="quantised(bits=8, feedback=true)")
        return [run_step(model, number, x, dy) for number in range(2)]

    for first, second in run_on_ranks(2, job):
        np.testing.assert_array_equal(first[0], second[0])
        assert not np.array_equal(first[1], second[1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.long
def test_empty_batches_and_empty_tiles(scheme):
    def job(comm):
        layers = [nd.ConvLayerDist(2, 5, padding=2), nd.MaxPoolingLayerDist(3, 2, 1), nd.DeconvLayerDist(1, 3, 2)]
        model = build_model(comm, layers, (3, 2, 1), rows=6, batch=1, scheme=scheme)
        for batch in (0, 1, 2):
            y, dx = run_step(model, 0, *draw_inputs(model, batch))
            assert len(y) == len(dx) == batch
            assert np.isfinite(y).all()
            assert np.isfinite(dx).all()

    run_on_ranks(6, job)


def test_layer_scheme_overrides_the_model():
    model = nd.ConvnetDist(
        [nd.ConvLayerDist(1, 3, scheme="halo"), nd.ConvLayerDist(1, 3)], scheme=nd.schemes.Tower(fill="reflect")
    )
    assert [type(layer.scheme) for layer in model.leaves] == [nd.schemes.Halo, nd.schemes.Tower]
    assert model.leaves[1].scheme.fill == "reflect"
    assert type(nd.distribute(nd.Convnet([nd.ConvLayer(1, 3)], scheme="tower")).leaves[0].scheme) is nd.schemes.Tower


@given(windows(), st.tuples(st.integers(1, 4), st.integers(1, 3)))
@settings(max_examples=30, deadline=None)
@pytest.mark.long
def test_gather_and_scatter_gradients_agree(case, parts):
    shape, window = case
    assume(window_fits(shape, window) and len(shape) < 3)

    def job(comm, scheme, rows=None):
        conv = nd.ConvLayerDist(
            2,
            window.kernel,
            window.stride,
            window.padding,
            dilation=window.dilation,
            scheme=nd.schemes.Halo(backward=scheme),
        )
        model = build_model(comm, [conv], (*shape, 1), rows)
        return run_step(model, 0, *draw_inputs(model))[1]

    expected = run_on_ranks(1, lambda comm: job(comm, "scatter"))[0]
    actual = run_on_ranks(parts[0] * parts[1], lambda comm: job(comm, "gather", parts[0]))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def test_gather_requires_zero_padded_convolutions():
    for layer in (nd.MaxPoolingLayerDist(3), nd.ConvLayerDist(1, 3, padding=1, padding_mode="wrap")):
        with pytest.raises(ConfigError, match="backward 'gather' needs a convolution padded with zeros"):
            nd.ConvnetDist([layer], scheme="halo(backward=gather)").plan((9, 9, 1))


def test_auto_gathers_when_it_sends_fewer_bytes():
    layers = [
        nd.ConvLayerDist(8, 3),
        nd.ConvLayerDist(2, 3),
        nd.ConvLayerDist(2, 3, 2),
        nd.ConvLayerDist(2, 3, padding=1),
    ]
    model = nd.ConvnetDist([*layers, nd.MaxPoolingLayerDist(3)], scheme="halo(backward=auto)")
    grid = nd.GridShape(1, 2, 2)
    plans = model.plan((32, 32, 3), grid)[:4]
    gathers = [
        layer.gathered_gradient_shape_and_window(p.input_shape, grid) is not None
        for layer, p in zip(layers, plans, strict=True)
    ]
    assert gathers == [False, True, True, False]
