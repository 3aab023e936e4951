"""Local contrast normalisation against PyTorch's autograd, on tiles, and its choice of exchange method."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from layer_runs import check_on_grids, make_factory, rotate_grids, run_layer

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError
from neondist.geometry import GridShape, HaloPlan

SHAPES_BY_NDIM = {1: (17, 3), 2: (9, 11, 2), 3: (5, 6, 7, 2)}
KERNEL_SIZES_BY_NDIM = {1: 5, 2: (3, 7), 3: 3}
LCN_OPTIONS = [
    {"window": "gaussian", "padding_mode": "zeros", "min_deviation": 1.0},
    {"window": "gaussian", "padding_mode": "reflect", "min_deviation": "mean", "sigma": 0.7},
    {"window": "uniform", "padding_mode": "zeros", "min_deviation": "mean"},
    {"window": "uniform", "padding_mode": "reflect", "min_deviation": 1.4},
]


def compute_with_torch(x, dy, kernel_size, window="gaussian", sigma=None, padding_mode="zeros", min_deviation=1.0):
    """Return output and input gradient of the formula, with dense convolutions over window and channels."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    pad, ndim = torch.nn.functional.pad, x.ndim - 2
    conv = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[ndim]
    kernel = (kernel_size,) * ndim if isinstance(kernel_size, int) else kernel_size
    squared = 0
    for axis, k in enumerate(kernel):
        shape = [1] * ndim
        shape[axis] = k
        squared = squared + ((torch.arange(k, dtype=torch.float64) - k // 2) / (sigma or k / 4)).reshape(shape) ** 2
    weights = torch.exp(-squared / 2) if window == "gaussian" else torch.ones(kernel, dtype=torch.float64)
    weights = weights / weights.sum() / x.shape[-1]
    weights = weights.expand(1, x.shape[-1], *kernel)
    sides = [k // 2 for k in reversed(kernel) for _ in range(2)]

    def compute_mean(z):
        z = pad(z, sides, mode="constant" if padding_mode == "zeros" else "reflect")
        return conv(z, weights)

    xt = torch.tensor(np.moveaxis(x, -1, 1).copy(), requires_grad=True)
    v = xt - compute_mean(xt)
    deviation = compute_mean(v * v).sqrt()
    spatial = tuple(range(1, ndim + 2))
    c = deviation.mean(spatial, keepdim=True) if min_deviation == "mean" else xt.new_tensor(min_deviation)
    yt = v / torch.maximum(deviation, c)
    yt.backward(torch.tensor(np.moveaxis(dy, -1, 1).copy()))
    used = float((deviation > c).double().mean())
    return np.moveaxis(yt.detach().numpy(), 1, -1), np.moveaxis(xt.grad.numpy(), 1, -1), used


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("halo", ["twice", "wide"])
@pytest.mark.parametrize("options", LCN_OPTIONS)
def test_matches_the_formula(ndim, halo, options):
    arrays = run_layer(make_factory("LCN", KERNEL_SIZES_BY_NDIM[ndim], halo=halo, **options), SHAPES_BY_NDIM[ndim])
    y, dx, used = compute_with_torch(arrays["x"], arrays["dy"], KERNEL_SIZES_BY_NDIM[ndim], **options)
    assert 0.02 < used < 0.98  # both branches of max(c, deviation) are taken
    np.testing.assert_allclose(arrays["y"], y, rtol=0, atol=1e-10)
    np.testing.assert_allclose(arrays["dx"], dx, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(("options", "halo"), [*zip(LCN_OPTIONS, ["twice", "wide", "wide", "twice"], strict=True)])
@pytest.mark.long
def test_every_grid_matches_one_process(ndim, halo, options):
    grids = rotate_grids(ndim + LCN_OPTIONS.index(options))
    check_on_grids(make_factory("LCN", KERNEL_SIZES_BY_NDIM[ndim], halo=halo, **options), SHAPES_BY_NDIM[ndim], grids)


@pytest.mark.parametrize("halo", ["twice", "wide"])
@pytest.mark.parametrize("shape", [(2, 3, 1), (5, 1, 3), (1, 1, 1)])
@pytest.mark.long
def test_windows_wider_than_the_image(shape, halo):
    make = make_factory("LCN", 9, halo=halo)
    check_on_grids(make, shape, [(2, 1, 2, 1), (4, 1, 2, 1), (6, 1, 3, 1)])
    arrays = run_layer(make, shape)
    y, dx, _ = compute_with_torch(arrays["x"], arrays["dy"], 9)
    assert max_relative_difference({"y": arrays["y"], "dx": arrays["dx"]}, {"y": y, "dx": dx}) < 1e-10


def test_unit_kernel_sends_nothing():
    make = make_factory("LCN", 1)
    check_on_grids(make, (4, 5, 3), [(4, 1, 2, 1)])
    assert not any(
        arrays["sent"] for arrays in loopback.run(4, lambda comm: run_layer(make, (4, 5, 3), nd.ProcessGrid(comm)))
    )


def test_reflect_padding_of_small_images():
    make = make_factory("LCN", 5, padding_mode="reflect")
    check_on_grids(make, (4, 3, 1), [(2, 1, 2, 1), (4, 1, 2, 1)])


def count_planned_halo_values(halos, grid):
    """Return the number of values that all tiles send per sample in fprop, according to the plans."""
    return sum(
        shape[-1] * HaloPlan.of(grid.partition(shape[:-1]), window, tile).sent_cells
        for shape, window in halos
        for tile in range(grid.tiles)
    )


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.long
def test_auto_selects_the_cheapest_method(mode):
    rng, methods = np.random.default_rng(2), []
    for _ in range(100):
        ndim = int(rng.integers(1, 4))
        shape = (*map(int, rng.integers(1, 40 if ndim < 3 else 12, ndim)), int(rng.integers(1, 4)))
        kernel = tuple(int(k) for k in rng.choice([1, 3, 5, 9], ndim))
        if mode == "reflect" and any(k // 2 >= n for k, n in zip(kernel, shape, strict=False)):
            continue
        grid = GridShape(1, *map(int, rng.integers(1, 4, 3)))
        lcn = nd.LCNLayer(kernel, padding_mode=mode)
        costs = {
            method: count_planned_halo_values(halos, grid)
            for method, halos in lcn.local_window.halos_by_method(shape).items()
        }
        method = lcn.local_window.least_sending_method(shape, grid)
        assert costs[method] == min(costs.values()) == count_planned_halo_values(lcn.halos_for(shape, grid), grid)
        assert method == "twice" or (shape[-1] == 1 and costs["wide"] < costs["twice"])
        methods.append(method)
    assert methods.count("wide") >= 3
    assert methods.count("twice") >= 3


@pytest.mark.parametrize(("shape", "method"), [((24, 25, 1), "twice"), ((6, 5, 1), "wide"), ((6, 5, 2), "twice")])
def test_traffic_matches_the_plan(shape, method):
    grid = GridShape(1, 2, 2)
    assert nd.LCNLayer(9).local_window.least_sending_method(shape, grid) == method
    sent = {}
    for halo in ("auto", "twice", "wide"):
        make = make_factory("LCN", 9, halo=halo)
        results = loopback.run(4, lambda comm, make=make: run_layer(make, shape, nd.ProcessGrid(comm)))
        (plan,) = nd.ConvnetDist([make(True)]).plan(shape, grid)
        for arrays, forward, backward in zip(
            results, plan.forward_elements_sent, plan.backward_elements_sent, strict=True
        ):
            assert arrays["sent"] == (forward + backward) * 3 * 2 * 8  # samples, rounds, bytes
        sent[halo] = sum(int(arrays["sent"]) for arrays in results)
    assert sent["auto"] == sent[method] == min(sent.values())


@pytest.mark.parametrize("value", [0.0, 0.1, 255.0])
@pytest.mark.parametrize("halo", ["twice", "wide"])
def test_constant_images_give_zeros(halo, value):
    """Rounding errors of constant images are not amplified."""
    mode = "reflect" if value else "zeros"
    for dtype in ("float32", "float64"):
        model = nd.Convnet([nd.LCNLayer(3, min_deviation="mean", halo=halo, padding_mode=mode)], dtype=dtype)
        model.build((6, 5, 2), 2)
        assert not model.fprop(np.full((2, 6, 5, 2), value, dtype)).any()
        assert not model.bprop(np.ones((2, 6, 5, 2), dtype)).any()


@pytest.mark.parametrize("halo", ["twice", "wide"])
def test_float32_and_empty_batches(halo):
    model = nd.Convnet([nd.LCNLayer(3, min_deviation="mean", halo=halo)])
    model.build((6, 5, 2), 2)
    for samples in (2, 0):
        x = np.ones((samples, 6, 5, 2), np.float32)
        y = model.fprop(x)
        dx = model.bprop(y)
        assert y.dtype == dx.dtype == np.float32
        assert y.shape == dx.shape == x.shape


def test_first_layer_sends_no_gradient():
    make = make_factory("LCN", 3)

    def job(comm):
        model = nd.ConvnetDist([make(True), nd.FCLayerDist(2)])
        model.build((6, 6, 1), 2, nd.ProcessGrid(comm))
        x = model.scatter(np.ones((2, 6, 6, 1)))
        model.train_batch(x, np.array([0, 1]))
        return model.layers[0].bytes_sent

    (plan, _) = nd.Convnet([make(False), nd.FCLayer(2)]).plan((6, 6, 1), GridShape(1, 2, 2))
    assert loopback.run(4, job) == [words * 2 * 4 for words in plan.forward_elements_sent]


MISTAKES = {
    "even": (lambda: nd.LCNLayer((9, 4)), ConfigError, r"kernel_size \(9, 4\): expected odd integers"),
    "negative": (lambda: nd.LCNLayer(-1), ConfigError, "kernel_size -1"),
    "window": (lambda: nd.LCNLayer(window="gauss"), ConfigError, "window: .*'gauss'; did you mean 'gaussian'"),
    "mode": (lambda: nd.LCNLayer(padding_mode="wrap"), ConfigError, "padding_mode: expected 'zeros' or 'reflect'"),
    "halo": (lambda: nd.LCNLayer(halo="three"), ConfigError, "halo: expected 'auto' or 'twice' or 'wide'"),
    "sigma": (lambda: nd.LCNLayer(sigma=0.0), ConfigError, "sigma: expected a number above 0"),
    "sigma of a box": (lambda: nd.LCNLayer(window="uniform", sigma=1.0), ConfigError, "sigma 1.0.*window 'gaussian'"),
    "min_deviation": (
        lambda: nd.LCNLayer(min_deviation=0.0),
        ConfigError,
        "min_deviation: expected a number above 0 or .mean., got 0.0",
    ),
    "text min_deviation": (
        lambda: nd.LCNLayer(min_deviation="median"),
        ConfigError,
        "got the text .median.; did you mean .mean.",
    ),
    "vector": (
        lambda: nd.Convnet([nd.GlobalAvgPoolingLayer(), nd.LCNLayer()]).build((5, 5, 1), 1),
        ShapeError,
        "layer 1 'lcn1'.*needs an image",
    ),
    "axes": (
        lambda: build_lcn_model(nd.LCNLayer((3, 3)), (5, 5, 5, 1)),
        ConfigError,
        "layer 0 'lcn1'.*number of spatial axes",
    ),
    "reflect": (
        lambda: build_lcn_model(nd.LCNLayer(9, padding_mode="reflect"), (9, 4, 1)),
        ConfigError,
        r"layer 0 'lcn1' .*kernel_size 9.*more than 4 cells on axis 1, but it has 4.*padding_mode 'zeros'",
    ),
    "wide reflect": (
        lambda: build_lcn_model(nd.LCNLayer(9, padding_mode="reflect", halo="wide"), (9, 8, 1)),
        ConfigError,
        r"more than 8 cells on axis 1, but it has 8.*halo 'auto'",
    ),
}


def build_lcn_model(lcn, shape):
    nd.Convnet([lcn]).build(shape, 1)


@pytest.mark.parametrize(("make", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()
