"""Products in 16 bits: rounding, the loss scale, and steps that all ranks skip together."""

import json
import re
from functools import partial

import numpy as np
import pytest
from cli_runs import EXPERIMENT, here
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support import worst

import neondist as nd
from neondist.arrays import precision as precisions
from neondist.arrays.precision import ComputePrecision, LossScaler
from neondist.backends import Kernels, get_backend
from neondist.comm import loopback
from neondist.errors import ConfigError, NonFiniteError

NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""what rounding may change, relatively"""
SHAPE, BATCH = (12, 8, 2), 4


@pytest.mark.parametrize("name", NARROW)
@given(bits=arrays(np.uint32, 64))
def test_numbers_are_rounded_as_pytorch_does(name, bits):
    """Those that lie in the middle between two numbers, too."""
    torch, precision = pytest.importorskip("torch"), ComputePrecision(name)
    middles = {"bfloat16": (0xFFFF, 0x8000), "float16": (0x1FFF, 0x1000)}[name]
    bits = np.concatenate([bits, bits & ~np.uint32(middles[0]) | np.uint32(middles[1])])
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):  # some of these are signalling NaNs
        expected = torch.from_numpy(x.copy()).to(getattr(torch, name)).float().numpy()
        found = precision.rounded(x)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(precision.decode(precision.encode(x)), expected)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(x)].all()


@given(st.lists(st.integers(0, 2 * precisions.INTERVAL + 3), max_size=5))
def test_the_scale_is_that_of_pytorch(goods):
    """Runs of good steps, with an overflow behind each."""
    torch = pytest.importorskip("torch")
    scaler, scale, good = LossScaler(), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    found = torch.tensor(0.0), torch.tensor(1.0)
    for count in goods:
        for overflow in [False] * count + [True]:
            scaler.update(overflow)
            torch._amp_update_scale_(scale, good, found[overflow], 2.0, 0.5, precisions.INTERVAL)
        assert (scaler.scale, scaler.good) == (float(scale), int(good))
    assert scaler.skipped == len(goods)
    resumed = LossScaler()
    resumed.load(json.loads(json.dumps(scaler.state())))
    assert resumed == scaler


def test_the_scale_keeps_within_its_bounds():
    scaler = LossScaler(scale=precisions.LARGEST, good=precisions.INTERVAL - 1)
    scaler.update(overflow=False)
    assert (scaler.scale, scaler.good) == (precisions.LARGEST, 0)
    scaler = LossScaler(scale=1.0)
    with pytest.raises(NonFiniteError, match=r"fallen below 1.*precision: bfloat16") as caught:
        scaler.update(overflow=True)
    assert caught.value.agreed


@pytest.mark.parametrize(
    "state",
    [{}, {"scale": 3.0}, {"scale": 0.5}, {"scale": float("inf")}, {"scale": "1"}, {"good": -1}, {"skipped": 1.5}],
)
def test_no_other_scale_is_taken_from_a_file(state):
    with pytest.raises(ValueError, match="loss_scale"):
        LossScaler().load(LossScaler().state() | state if state else state)


# Layers.


class Spike(nd.Activation):
    """The identity, whose gradient is too large for float16 on one rank at some steps; no error of float32."""

    large = False

    def fprop(self, z):
        return z

    def bprop(self, y, dy):
        return dy * np.float32(1e12) if self.large else dy


def layers():
    conv = nd.ConvLayerDist
    return [
        conv(4, 3, padding=1, activation=nd.ReLU()),
        nd.Sum([[conv(4, 3, padding=1, bias=False), nd.BatchNormLayerDist()], []]),
        nd.MaxPoolingLayerDist(2),
        conv(6, 5, padding="same", groups=2, activation=nd.ReLU()),
        nd.DeconvLayerDist(4, 2, stride=2, activation=Spike()),
        conv(3, 1, stride=2),
        nd.FCLayerDist(3),
    ]


def built(transport, precision, **how):
    grid = nd.ProcessGrid(transport, **{name: how.pop(name) for name in ("replicas",) if name in how})
    how = {"optimizer": nd.SGD(0.05, momentum=0.9), "backend": "numpy"} | how
    model = nd.ConvnetDist(layers(), precision=precision, **how)
    model.build(SHAPE, BATCH, grid)
    return model


def step(model, number=0):
    rng = np.random.default_rng(number)
    images, targets = rng.normal(size=(BATCH, *SHAPE)), rng.integers(0, 3, BATCH)
    return model.train_batch(model.scatter(images), targets, BATCH)


def first_step(transport, precision, **how):
    model = built(transport, precision, **how)
    loss, planned = step(model), model.compiled.bytes(model.grid.rank)
    assert model.bytes_sent == planned
    return {"loss": np.array(loss), **model.gradients()}, planned


def apart(found, expected):
    """Return by how much arrays differ, of the largest number of each."""
    return max(abs(found[name] - array).max() / abs(array).max() for name, array in expected.items())


@pytest.mark.parametrize("name", NARROW)
def test_ranks_agree_within_the_rounding_of_the_precision(name):
    (exact, _), (alone, _) = (loopback.run(1, lambda c, p=p: first_step(c, p))[0] for p in ("float32", name))
    assert 0.1 * NARROW[name] < apart(alone, exact) < 100 * NARROW[name]
    cases = [(2, {}), (4, {"strips": 3}), (6, {"recompute": True}), (4, {"replicas": 2, "sync": "bucketed"})]
    for ranks, how in cases:
        for (found, sent), (_, whole) in zip(
            loopback.run(ranks, lambda c, h=how: first_step(c, name, **h)),
            loopback.run(ranks, lambda c, h=how: first_step(c, "float32", **h)),
            strict=True,
        ):
            assert apart(found, alone) < 8 * NARROW[name]
            assert abs(found["loss"] - alone["loss"]) < 1e-3 * NARROW[name]  # halos forward are exact
            assert 2 * sent == whole > 0


def test_tf32_is_float32_on_a_cpu():
    found = [loopback.run(2, lambda c, p=p: first_step(c, p)) for p in ("float32", "tf32")]
    assert worst(found[1][0][0], found[0][0][0]) == 0


@pytest.mark.parametrize("name", NARROW)
def test_kernels_of_16_bits_give_the_same_numbers(name):
    """Those that take the instructions of a processor, which here may be slow, and those of float32."""
    pytest.importorskip("torch")
    from neondist.backends import torch_narrow

    rng = np.random.default_rng(0)
    slow, fast = (get_backend("torch").in_precision(ComputePrecision(name)).kernels for _ in range(2))
    slow.narrow, fast.narrow = None, torch_narrow
    x, weights, bias = (rng.normal(size=shape).astype("f4") for shape in [(2, 9, 8, 4), (3, 3, 2, 6), (6,)])
    how = (2, 1), (1, 2), 2
    y, expected = ({"y": kernels.conv_forward(x, weights, *how, bias)} for kernels in (fast, slow))
    assert apart(y, expected) < 4 * NARROW[name]
    crop = ((1, 1), (0, 2))
    dx, expected = ({"dx": one.conv_backward_input(y["y"], weights, (9, 8), *how, crop)} for one in (fast, slow))
    assert apart(dx, expected) < 4 * NARROW[name]


def test_a_gradient_is_cleared_where_the_operand_is_zero():
    """A ghost cell that has been rounded to zero gets what the cell itself gets."""
    kernels = get_backend("numpy").in_precision(ComputePrecision("float16")).kernels
    x, weights = np.array([1e-9, 1.0], "f4").reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1), "f4")
    dx, dy = np.empty_like(x), np.ones_like(x)
    kernels.conv_back_into(dx, x, dy, weights, (1, 1), (1, 1), 1, lambda part: dy[part], None, True, True)
    assert dx.ravel().tolist() == [0, 1]


@pytest.mark.parametrize("name", NARROW)
def test_what_is_no_convolution_is_float32(name):
    """Sums over cells, and filters of cells and blocks."""

    def gradients(precision):
        layers = [nd.LocalFilteringLayer(3, 3, shared=(2, 3)), nd.LocalFilteringLayer(2, 3), nd.BatchNormLayer()]
        model = nd.Convnet([*layers, nd.LCNLayer(3), nd.GroupNormLayer(1)], cost=nd.SumSquared(), precision=precision)
        model.build((9, 8, 2), 2)
        y = model.fprop(np.random.default_rng(0).normal(size=(2, 9, 8, 2)))
        model.bprop(y)
        return {"y": y, **model.gradients()}

    assert worst(gradients(name), gradients("float32")) == 0


@pytest.mark.parametrize(("ranks", "how"), [(1, {}), (3, {}), (4, {"replicas": 2, "sync": "bucketed"})])
def test_all_ranks_skip_a_step_in_which_one_overflows(ranks, how):
    """Steps 1, 2 (which overflows) and 3 end where steps 1 and 3 do, of a model whose count is moved on."""

    def body(transport):
        model, other = (built(transport, "float16", **how) for _ in range(2))
        for number in range(3):
            if number == 1:
                model.layers[4].activation.large = model.grid.rank == ranks - 1
                assert np.isnan(step(model, number))
                model.layers[4].activation.large = False
                other.step, other.uncounted, other.loss_scaler = 2, 1, LossScaler(2.0**15)
                assert "the loss scale is 32768" in model.nonfinite_monitor.where
            else:
                assert step(model, number) == step(other, number)
        assert (model.loss_scaler.scale, model.loss_scaler.good, model.loss_scaler.skipped) == (2.0**15, 1, 1)
        return [{**m.state(), **m.optimizer_state()} for m in (model, other)]

    for found, expected in loopback.run(ranks, body):
        assert worst(found, expected) == 0


def test_the_scale_is_in_no_gradient():
    """It is a power of two: updates are those of another scale, bit for bit, and of compressors too."""

    def body(transport, scale=1.0):
        model = built(transport, "float16", strategy=nd.strategies.AllReduce(compressor="bf16"))
        model.loss_scaler = LossScaler(scale)
        for number in range(2):
            step(model, number)
        return model.state()

    one, other = (loopback.run(2, partial(body, scale=scale))[0] for scale in (2.0**8, 2.0**10))
    assert worst(one, other) == 0


def test_a_loss_that_is_not_finite_is_no_overflow():
    def body(transport):
        model = built(transport, "float16")
        model.layers[-1].params["weights"][...] = np.inf
        with pytest.raises(NonFiniteError, match=r"not finite: the weights of layer 'fc1'.* first"):
            step(model)
        return model.loss_scaler

    assert loopback.run(2, body) == [LossScaler()] * 2


def experiment(epochs, **fields):
    model = nd.ConvnetDist(layers(), optimizer=nd.SGD(1e-4, momentum=0.9), backend="numpy")
    data = nd.Synthetic(SHAPE, classes=3, train=16, test=4)
    return nd.FitExperiment(data, model, batch_size=4, epochs=epochs, precision="float16", **fields)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Begin(nd.Hook):
    """Begins with a scale that is too large; stops after a step."""

    def __init__(self, last=None):
        self.last = last

    def before_run(self, run):
        if run.step == 0:
            run.model.loss_scaler.scale = 2.0**26

    def after_step(self, run):
        if run.step == self.last:
            run.stop = nd.train.Stop("enough")


def test_a_resumed_run_goes_on_with_its_scale(tmp_path):
    """Bit for bit, in the middle of an epoch too: after step 5 of 12."""

    def run(folder, hook, resume=False):
        def body(transport):
            made = experiment(3)
            made.run(nd.ProcessGrid(transport), output=tmp_path / folder, resume=resume, hooks=[hook])
            return made.model.state() | made.model.optimizer_state(), made.model.loss_scaler

        return loopback.run(2, body)

    whole, _, parts = run("whole", Begin()), run("parts", Begin(5)), run("parts", Begin(), resume=True)
    for (found, scaler), (expected, as_expected) in zip(parts, whole, strict=True):
        assert worst(found, expected) == 0
        assert scaler == as_expected
    told, expected = lines(tmp_path / "parts"), lines(tmp_path / "whole")
    for name in ("step", "train_loss", "loss_scale", "skipped_steps"):
        assert [line[name] for line in told] == [line[name] for line in expected]
    assert told[0]["skipped_steps"] > 0


# What users type.


def test_check_tells_the_precision(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT.replace("float64", "float32"))
    code, out, _ = here(tmp_path, "check", "toy.yaml", "-n", 2, "--set", "precision=bfloat16")
    assert code == 0
    assert "ConvnetDist (float32, products in bfloat16)" in out
    assert "halo(dtype=bfloat16)" in out
    code, out, _ = here(tmp_path, "check", "toy.yaml", "--set", "precision=tf32")
    assert (code, "tf32 requires a GPU; on a CPU it is the same as float32" in out) == (0, True)


SERVERS = "strategy=!PS {sync: false}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["precision=half"], "precision: expected 'float32' or 'tf32' or 'bfloat16' or 'float16'"),
        (["precision=bfloat16"], r"precision: bfloat16 requires float32 parameters, but dtype is float64; leave out"),
        (
            ["precision=float16", "dtype=float32", SERVERS],
            r"precision: float16 needs loss scaling.*precision:"
            r" bfloat16",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, settings, message):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    code, out, err = here(tmp_path, "check", "toy.yaml", "--set", *settings)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err


def test_a_backend_without_it_is_refused():
    model = nd.Convnet([nd.ConvLayer(2, 3)], backend=nd.Backend("plain", Kernels()), precision="bfloat16")
    with pytest.raises(ConfigError, match="precision: bfloat16 is not supported by this backend; use backend: auto"):
        model.build((6, 6, 1), 1)
