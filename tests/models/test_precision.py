"""16-bit products: rounding, loss scaling, and steps that all ranks skip."""

import json
import re
from functools import partial

import numpy as np
import pytest
from cli_runs import EXPERIMENT, run_in_process
from common_checks import max_relative_difference
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import neondist as nd
from neondist.arrays import precision as precisions
from neondist.arrays.precision import ComputePrecision, LossScaler
from neondist.backends import Kernels, get_backend
from neondist.comm import loopback
from neondist.errors import ConfigError, NonFiniteError

ROUNDING_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""relative rounding errors"""
SHAPE, BATCH = (12, 8, 2), 4


@pytest.mark.parametrize("name", ROUNDING_UNITS)
@given(bits=arrays(np.uint32, 64))
def test_rounding_matches_pytorch(name, bits):
    """Include midpoints between two representable values."""
    torch, precision = pytest.importorskip("torch"), ComputePrecision(name)
    midpoints = {"bfloat16": (0xFFFF, 0x8000), "float16": (0x1FFF, 0x1000)}[name]
    bits = np.concatenate([bits, bits & ~np.uint32(midpoints[0]) | np.uint32(midpoints[1])])
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):  # some of these are signalling NaNs
        expected = torch.from_numpy(x.copy()).to(getattr(torch, name)).float().numpy()
        rounded = precision.round_to_operands(x)
        np.testing.assert_array_equal(rounded, expected)
        np.testing.assert_array_equal(precision.decode(precision.encode(x)), expected)
    assert (np.signbit(rounded) == np.signbit(expected))[~np.isnan(x)].all()


@given(st.lists(st.integers(0, 2 * precisions.GROWTH_INTERVAL_STEPS + 3), max_size=5))
def test_loss_scale_matches_pytorch(run_lengths):
    """Run sequences of finite steps, each followed by an overflow."""
    torch = pytest.importorskip("torch")
    scaler, scale, finite_steps = LossScaler(), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    overflow_flags = torch.tensor(0.0), torch.tensor(1.0)
    for count in run_lengths:
        for overflow in [False] * count + [True]:
            scaler.update(overflow)
            torch._amp_update_scale_(
                scale, finite_steps, overflow_flags[overflow], 2.0, 0.5, precisions.GROWTH_INTERVAL_STEPS
            )
        assert (scaler.scale, scaler.finite_steps) == (float(scale), int(finite_steps))
    assert scaler.skipped_steps == len(run_lengths)
    resumed = LossScaler()
    resumed.load_state(json.loads(json.dumps(scaler.state())))
    assert resumed == scaler


def test_loss_scale_bounds():
    scaler = LossScaler(scale=precisions.MAX_LOSS_SCALE, finite_steps=precisions.GROWTH_INTERVAL_STEPS - 1)
    scaler.update(overflow=False)
    assert (scaler.scale, scaler.finite_steps) == (precisions.MAX_LOSS_SCALE, 0)
    scaler = LossScaler(scale=1.0)
    with pytest.raises(NonFiniteError, match=r"fallen below 1.*precision: bfloat16") as caught:
        scaler.update(overflow=True)
    assert caught.value.raised_on_all_ranks


@pytest.mark.parametrize(
    "state",
    [{}, {"scale": 3.0}, {"scale": 0.5}, {"scale": float("inf")}, {"scale": "1"}, {"good": -1}, {"skipped": 1.5}],
)
def test_invalid_loss_scale_states_are_rejected(state):
    with pytest.raises(ValueError, match="loss_scale"):
        LossScaler().load_state(LossScaler().state() | state if state else state)


class GradientSpike(nd.Activation):
    """Identity whose gradient, if `large`, overflows float16 but not float32."""

    large = False

    def fprop(self, z):
        return z

    def bprop(self, y, dy):
        return dy * np.float32(1e12) if self.large else dy


def make_layers():
    conv = nd.ConvLayerDist
    return [
        conv(4, 3, padding=1, activation=nd.ReLU()),
        nd.Sum([[conv(4, 3, padding=1, bias=False), nd.BatchNormLayerDist()], []]),
        nd.MaxPoolingLayerDist(2),
        conv(6, 5, padding="same", groups=2, activation=nd.ReLU()),
        nd.DeconvLayerDist(4, 2, stride=2, activation=GradientSpike()),
        conv(3, 1, stride=2),
        nd.FCLayerDist(3),
    ]


def build_model(transport, precision, **options):
    grid = nd.ProcessGrid(transport, **{name: options.pop(name) for name in ("replicas",) if name in options})
    options = {"optimizer": nd.SGD(0.05, momentum=0.9), "backend": "numpy"} | options
    model = nd.ConvnetDist(make_layers(), precision=precision, **options)
    model.build(SHAPE, BATCH, grid)
    return model


def train_step(model, number=0):
    rng = np.random.default_rng(number)
    images, targets = rng.normal(size=(BATCH, *SHAPE)), rng.integers(0, 3, BATCH)
    return model.train_batch(model.scatter(images), targets, BATCH)


def run_first_step(transport, precision, **options):
    model = build_model(transport, precision, **options)
    loss, planned = train_step(model), model.compiled.bytes(model.grid.rank)
    assert model.bytes_sent == planned
    return {"loss": np.array(loss), **model.gradients()}, planned


def compute_difference(actual, expected):
    """Return the largest difference of arrays relative to their maxima."""
    return max(abs(actual[name] - array).max() / abs(array).max() for name, array in expected.items())


@pytest.mark.parametrize("name", ROUNDING_UNITS)
def test_ranks_agree_within_rounding(name):
    (exact, _), (single, _) = (loopback.run(1, lambda c, p=p: run_first_step(c, p))[0] for p in ("float32", name))
    assert 0.1 * ROUNDING_UNITS[name] < compute_difference(single, exact) < 100 * ROUNDING_UNITS[name]
    cases = [(2, {}), (4, {"strips": 3}), (6, {"recompute": True}), (4, {"replicas": 2, "sync": "bucketed"})]
    for ranks, options in cases:
        for (actual, sent), (_, full_sent) in zip(
            loopback.run(ranks, lambda c, options=options: run_first_step(c, name, **options)),
            loopback.run(ranks, lambda c, options=options: run_first_step(c, "float32", **options)),
            strict=True,
        ):
            assert compute_difference(actual, single) < 8 * ROUNDING_UNITS[name]
            assert abs(actual["loss"] - single["loss"]) < 1e-3 * ROUNDING_UNITS[name]  # forward halos are exact
            assert 2 * sent == full_sent > 0


def test_tf32_is_float32_on_a_cpu():
    results = [loopback.run(2, lambda c, p=p: run_first_step(c, p)) for p in ("float32", "tf32")]
    assert max_relative_difference(results[1][0][0], results[0][0][0]) == 0


@pytest.mark.parametrize("name", ROUNDING_UNITS)
def test_native_16_bit_kernels_agree(name):
    """Compare kernels on 16-bit processor instructions with those in float32."""
    pytest.importorskip("torch")
    from neondist.backends import torch_narrow

    rng = np.random.default_rng(0)
    slow, fast = (get_backend("torch").in_precision(ComputePrecision(name)).kernels for _ in range(2))
    slow.half_precision_calls, fast.half_precision_calls = None, torch_narrow
    x, weights, bias = (rng.normal(size=shape).astype("f4") for shape in [(2, 9, 8, 4), (3, 3, 2, 6), (6,)])
    conv_args = (2, 1), (1, 2), 2
    actual, expected = ({"y": kernels.conv_forward(x, weights, *conv_args, bias)} for kernels in (fast, slow))
    assert compute_difference(actual, expected) < 4 * ROUNDING_UNITS[name]
    crop = ((1, 1), (0, 2))
    dx, expected = (
        {"dx": kernels.conv_backward_input(actual["y"], weights, (9, 8), *conv_args, crop)} for kernels in (fast, slow)
    )
    assert compute_difference(dx, expected) < 4 * ROUNDING_UNITS[name]


def test_gradients_are_cleared_at_zero_operands():
    """Halo cells rounded to zero receive the same gradient as their owner."""
    kernels = get_backend("numpy").in_precision(ComputePrecision("float16")).kernels
    x, weights = np.array([1e-9, 1.0], "f4").reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1), "f4")
    dx, dy = np.empty_like(x), np.ones_like(x)
    kernels.conv_backward_into(dx, x, dy, weights, (1, 1), (1, 1), 1, lambda part: dy[part], None, True, True)
    assert dx.ravel().tolist() == [0, 1]


@pytest.mark.parametrize("name", ROUNDING_UNITS)
def test_other_layers_compute_in_float32(name):
    """Check sums over cells, and filters of cells and blocks."""

    def compute_gradients(precision):
        layers = [nd.LocalFilteringLayer(3, 3, shared=(2, 3)), nd.LocalFilteringLayer(2, 3), nd.BatchNormLayer()]
        model = nd.Convnet([*layers, nd.LCNLayer(3), nd.GroupNormLayer(1)], cost=nd.SumSquared(), precision=precision)
        model.build((9, 8, 2), 2)
        y = model.fprop(np.random.default_rng(0).normal(size=(2, 9, 8, 2)))
        model.bprop(y)
        return {"y": y, **model.gradients()}

    assert max_relative_difference(compute_gradients(name), compute_gradients("float32")) == 0


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (3, {}), (4, {"replicas": 2, "sync": "bucketed"})])
def test_overflow_on_one_rank_skips_the_step_on_all(ranks, options):
    """Steps 1, 2 (an overflow) and 3 equal steps 1 and 3 of a model whose step count is advanced."""

    def body(transport):
        model, other = (build_model(transport, "float16", **options) for _ in range(2))
        for number in range(3):
            if number == 1:
                model.layers[4].activation.large = model.grid.rank == ranks - 1
                assert np.isnan(train_step(model, number))
                model.layers[4].activation.large = False
                other.step, other.steps_without_optimizer, other.loss_scaler = 2, 1, LossScaler(2.0**15)
                assert "the loss scale is 32768" in model.nonfinite_monitor.nonfinite_value
            else:
                assert train_step(model, number) == train_step(other, number)
        assert (model.loss_scaler.scale, model.loss_scaler.finite_steps, model.loss_scaler.skipped_steps) == (
            2.0**15,
            1,
            1,
        )
        return [{**each.state(), **each.optimizer_state()} for each in (model, other)]

    for actual, expected in loopback.run(ranks, body):
        assert max_relative_difference(actual, expected) == 0


def test_updates_do_not_depend_on_the_loss_scale():
    """Scales are powers of two, so that updates are bit-identical, with compressors too."""

    def body(transport, scale=1.0):
        model = build_model(transport, "float16", strategy=nd.strategies.AllReduce(compressor="bf16"))
        model.loss_scaler = LossScaler(scale)
        for number in range(2):
            train_step(model, number)
        return model.state()

    first, second = (loopback.run(2, partial(body, scale=scale))[0] for scale in (2.0**8, 2.0**10))
    assert max_relative_difference(first, second) == 0


def test_non_finite_loss_is_not_an_overflow():
    def body(transport):
        model = build_model(transport, "float16")
        model.layers[-1].params["weights"][...] = np.inf
        with pytest.raises(NonFiniteError, match=r"first non-finite value: the weights of layer 'fc1'"):
            train_step(model)
        return model.loss_scaler

    assert loopback.run(2, body) == [LossScaler()] * 2


def make_experiment(epochs, **fields):
    model = nd.ConvnetDist(make_layers(), optimizer=nd.SGD(1e-4, momentum=0.9), backend="numpy")
    data = nd.Synthetic(SHAPE, classes=3, train=16, test=4)
    return nd.FitExperiment(data, model, batch_size=4, epochs=epochs, precision="float16", **fields)


def read_epoch_records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class ScaleHook(nd.Hook):
    """Hook that starts with an excessive loss scale, and stops after a step."""

    def __init__(self, last=None):
        self.last = last

    def before_run(self, run):
        if run.step == 0:
            run.model.loss_scaler.scale = 2.0**26

    def after_step(self, run):
        if run.step == self.last:
            run.stop = nd.train.Stop("enough")


def test_resumed_run_keeps_its_loss_scale(tmp_path):
    """Resume bit for bit in the middle of an epoch, after step 5 of 12."""

    def run(folder, hook, resume=False):
        def body(transport):
            experiment = make_experiment(3)
            experiment.run(nd.ProcessGrid(transport), output=tmp_path / folder, resume=resume, hooks=[hook])
            return experiment.model.state() | experiment.model.optimizer_state(), experiment.model.loss_scaler

        return loopback.run(2, body)

    uninterrupted = run("uninterrupted", ScaleHook())
    run("resumed", ScaleHook(5))
    resumed = run("resumed", ScaleHook(), resume=True)
    for (actual, scaler), (expected, expected_scaler) in zip(resumed, uninterrupted, strict=True):
        assert max_relative_difference(actual, expected) == 0
        assert scaler == expected_scaler
    records, expected = read_epoch_records(tmp_path / "resumed"), read_epoch_records(tmp_path / "uninterrupted")
    for name in ("step", "train_loss", "loss_scale", "skipped_steps"):
        assert [line[name] for line in records] == [line[name] for line in expected]
    assert records[0]["skipped_steps"] > 0


def test_check_shows_the_precision(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT.replace("float64", "float32"))
    code, out, _ = run_in_process(tmp_path, "check", "toy.yaml", "-n", 2, "--set", "precision=bfloat16")
    assert code == 0
    assert "ConvnetDist (float32, products in bfloat16)" in out
    assert "halo(dtype=bfloat16)" in out
    code, out, _ = run_in_process(tmp_path, "check", "toy.yaml", "--set", "precision=tf32")
    assert (code, "tf32 requires a GPU; on a CPU it is the same as float32" in out) == (0, True)


SERVERS = "strategy=!PS {sync: false}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["precision=half"], "precision: expected 'float32' or 'tf32' or 'bfloat16' or 'float16'"),
        (["precision=bfloat16"], r"precision: bfloat16 requires float32 parameters, but dtype is float64; leave out"),
        (
            ["precision=float16", "dtype=float32", SERVERS],
            r"precision: float16 needs a loss scale.*precision:"
            r" bfloat16",
        ),
    ],
)
def test_unsupported_precisions_are_rejected(tmp_path, settings, message):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    code, out, err = run_in_process(tmp_path, "check", "toy.yaml", "--set", *settings)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err


def test_backends_without_16_bit_products_are_rejected():
    model = nd.Convnet([nd.ConvLayer(2, 3)], backend=nd.Backend("plain", Kernels()), precision="bfloat16")
    with pytest.raises(ConfigError, match="precision: bfloat16 is unsupported by this backend; use backend: auto"):
        model.build((6, 6, 1), 1)
