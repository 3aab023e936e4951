"""Detection of incorrect layers and border schemes by the halo guard."""

import numpy as np
import pytest
from halo_guard import guard
from scheme_runs import build_model, draw_inputs, run_on_ranks, run_step

import neondist as nd
from neondist.errors import HaloError


class CorrectConv(nd.ConvLayerDist):
    """Convolution with a 3 x 3 window, the base of the incorrect layers."""

    def __init__(self, scheme=None, name="mine"):
        super().__init__(2, 3, padding=1, scheme=scheme, name=name)


class ReadsBeyondView:
    """Mixin that reads one row beyond its view, through the memory behind it."""

    def forward(self, ctx, view):
        n, h, w, c = view.shape
        extended_view = np.lib.stride_tricks.as_strided(view, (n, h + 1, w, c), view.strides)
        return super().forward(ctx, view) + extended_view[:, -1:, :1].sum(axis=-1, keepdims=True)


class ConvBeyondView(ReadsBeyondView, CorrectConv):
    """Convolution with a halo that reads beyond its view."""


class WritesIntoView(CorrectConv):
    """Centres its view in place, in forward."""

    def forward(self, ctx, view):
        view -= view.mean()
        return super().forward(ctx, view)


class WritesLater(CorrectConv):
    """Changes its view in place, in backward."""

    def backward(self, ctx, dy):
        dview = super().backward(ctx, dy)
        ctx.view *= 2
        return dview


class WritesIntoGradient(CorrectConv):
    """Changes dy in place, which branches may share."""

    def backward(self, ctx, dy):
        dy *= 2
        return super().backward(ctx, dy)


class ReducesIntoGradient(CorrectConv):
    """Changes dy in place, in reduce_backward."""

    def reductions_for(self, input_shape):
        return [nd.Reduction("backward", "tiles", result_elements_per_sample=2)]

    def reduce_backward(self, ctx, dy):
        dy *= 2
        return ctx.kernels.sample_sum(dy)


class ForgetsOutputs(CorrectConv):
    """Leaves the last row of its outputs unwritten."""

    def forward(self, ctx, view):
        y, full_output = ctx.out, super().forward(ctx, view)
        y[:, :-1] = full_output[:, :-1]
        return y


class ForgetsGradient(CorrectConv):
    """Leaves the first row of the gradient of its view unwritten."""

    def backward(self, ctx, dy):
        dview, full_gradient = ctx.out, super().backward(ctx, dy)
        dview[:, 1:] = full_gradient[:, 1:]
        return dview


class SkipsSecondStep(nd.schemes.ExchangePolicy):
    """Skips the exchange in its second step."""

    def forward(self, halo):
        if halo.step != 1:
            halo.exchange()

    def backward(self, halo):
        halo.drop()

    def exchanges_per_call(self, direction):
        return 0, 0.5, 1


class ModifiesInFlight(nd.schemes.ExchangePolicy):
    """Modifies cells during their transfer."""

    def forward(self, halo):
        packed = halo.memory.setdefault("packed", halo.packed())
        packed.start(halo.outgoing())
        if halo.step == 1:
            packed.outgoing += 1
        halo.unpack(packed.wait())

    def backward(self, halo):
        halo.exchange()


def run_steps(layer, ranks=2, guarded=True):
    def job(comm):
        model = build_model(
            comm, [nd.ConvLayerDist(3, 1, name="first"), layer(), nd.ConvLayerDist(2, 3, padding=1)], (8, 6, 2)
        )
        if guarded:
            guard(model)
        for number in range(2):
            run_step(model, number, *draw_inputs(model))

    run_on_ranks(ranks, job)


@pytest.mark.parametrize(
    ("layer", "location", "message"),
    [
        (
            ConvBeyondView,
            r"\(ConvBeyondView\), forward, step 0",
            r"\d+ elements of its outputs were computed from cells outside .* index",
        ),
        (WritesIntoView, r"\(WritesIntoView\), forward, step 0", "modified its view in place"),
        (WritesLater, r"\(WritesLater\), backward, step 0", "modified its view in place"),
        (
            WritesIntoGradient,
            r"\(WritesIntoGradient\), backward, step 0",
            "modified the gradient of its outputs in place",
        ),
        (
            ReducesIntoGradient,
            r"\(ReducesIntoGradient\), backward, step 0",
            "modified the gradient of its outputs in place",
        ),
        (ForgetsOutputs, r"\(ForgetsOutputs\), forward, step 0", "of its outputs were .* or never written"),
        (ForgetsGradient, r"\(ForgetsGradient\), backward, step 0", "of the gradient of its view .* never written"),
        (
            lambda: CorrectConv(SkipsSecondStep()),
            r"\(CorrectConv\), forward, step 1",
            r"54 values of its view were never filled, the first for cell \((4, 0|3, 0)\); scheme SkipsSecondStep",
        ),
        (
            lambda: CorrectConv(ModifiesInFlight()),
            r"\(CorrectConv\), forward, step 1",
            "rank [01] of 2: outgoing cells for rank [01] were modified",
        ),
    ],
)
def test_mistakes_are_detected(layer, location, message):
    with pytest.raises(HaloError, match=rf"^layer 'mine' {location}: .*{message}"):
        run_steps(layer)
    run_steps(layer, guarded=False)  # undetected without the guard


def test_correct_layers_pass():
    run_steps(CorrectConv)


def test_non_finite_values_pass():
    def job(comm):
        model = guard(build_model(comm, [CorrectConv(), nd.FCLayerDist(3)], (8, 6, 2)))
        x, dy = draw_inputs(model)
        x[0, 0, 0, 0], dy[0, 0] = np.nan, np.inf
        with np.errstate(all="ignore"):
            run_step(model, 0, x, dy)

    run_on_ranks(2, job)


def test_reads_beyond_a_view_without_a_halo_are_detected():
    """In one process, the memory behind the tile does not belong to the view."""

    class SerialConv(ReadsBeyondView, nd.ConvLayer):
        has_dist_counterpart = False

    model = nd.Convnet([SerialConv(2, 1, name="mine"), nd.FCLayer(3)], dtype="float32", backend="numpy")
    model.build((4, 4, 1), 2)
    guard(model)
    with pytest.raises(HaloError, match=r"^layer 'mine' \(SerialConv\), forward, step 0: "):
        model.fprop(model.scatter(np.ones((2, 4, 4, 1))))


class LocalMeanDist(nd.Dist, nd.Layer):
    """Keeps the mean of this rank's cells as its state, which must be equal on all ranks."""

    def state_for(self, input_shape):
        return {"mean": nd.Parameter(input_shape[-1:], nd.Constant(0.0))}

    def forward(self, ctx, view):
        ctx.state["mean"][...] = view.mean((0, 1, 2))
        return view - ctx.state["mean"]

    def backward(self, ctx, dy):
        return dy


class LocalUpdateDist(LocalMeanDist):
    """Modifies a weight on one rank."""

    def state_for(self, input_shape):
        return {}

    def parameters_for(self, input_shape):
        return {"gain": nd.Parameter(input_shape[-1:], nd.Constant(1.0))}

    def forward(self, ctx, view):
        ctx.params["gain"][...] += ctx.input_box.lo[0]
        return view * 1

    def backward(self, ctx, dy):
        ctx.grads["gain"] = 0 * ctx.params["gain"]
        return dy


@pytest.mark.parametrize(("layer", "array"), [(LocalMeanDist, "mean"), (LocalUpdateDist, "gain")])
def test_arrays_that_differ_between_ranks_are_detected(layer, array):
    def job(comm, hooks):
        model = nd.ConvnetDist([nd.ConvLayerDist(2, 3), layer(name="mine"), nd.FCLayerDist(2)], backend="numpy")
        data = nd.Synthetic(shape=(8, 6, 1), classes=2, train=4, test=2)
        nd.FitExperiment(data, model, batch_size=2).run(nd.ProcessGrid(comm), hooks=hooks)

    with pytest.raises(HaloError, match=rf"^layer 'mine' .*, step 1: '{array}' on rank 1 differs from rank 0; compute"):
        run_on_ranks(2, lambda comm: job(comm, [nd.DebugHalo()]))
    run_on_ranks(2, lambda comm: job(comm, []))  # undetected without the guard


class SumDist(nd.Dist, nd.Layer):
    """Returns a partial result of another kind on the second rank."""

    directions = ("forward", "backward")

    def __init__(self, partial, name="mine"):
        super().__init__(name=name)
        self.partial = partial

    def reductions_for(self, input_shape):
        return [nd.Reduction(direction, "world", fixed_elements=1) for direction in self.directions]

    def reduce(self, ctx, view):
        return self.partial(ctx.input_box.lo[0] > 0)

    def reduce_backward(self, ctx, dy):
        return self.partial(ctx.input_box.lo[0] > 0)

    def forward(self, ctx, view):
        return view * 1

    def backward(self, ctx, dy):
        return dy


class SumBackwardDist(SumDist):
    directions = ("backward",)


@pytest.mark.parametrize(("cls", "method"), [(SumDist, "reduce"), (SumBackwardDist, "reduce_backward")])
@pytest.mark.parametrize(
    ("partial", "actual", "expected"),
    [
        (lambda second: None if second else np.zeros(1), "None", "an array of float64"),
        (lambda second: np.zeros(1) if second else None, "an array of float64", "None"),
        (lambda second: np.zeros(1, "f4" if second else "f8"), "an array of float32", "an array of float64"),
    ],
)
def test_partial_results_that_differ_between_ranks_are_detected(cls, method, partial, actual, expected):
    message = rf"^layer 'mine' \({cls.__name__}\), .*: {method} returns {actual} on rank 1, but {expected} on rank 0"
    with pytest.raises(HaloError, match=message):
        run_steps(lambda: cls(partial))
    run_steps(lambda: cls(lambda second: np.zeros(1)))
    run_steps(lambda: cls(lambda second: None))
