"""Compressed gradients: nothing is lost for good, bytes are as planned, and error feedback is part of the state."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import KINDS, model_of

import neondist as nd
from neondist.comm import Reductions
from neondist.parallel import compressors
from neondist.parallel.compressed import CompressedGradients
from neondist.parallel.compressors import compressed_bytes, compressor_of
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore

COMPRESSORS = ["fp16", "bf16", "topk(0.01)", "topk(0.3)", "topk(1)", "powersgd(1)", "powersgd(4)"]
shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=40)
@given(shapes, st.sampled_from(COMPRESSORS), st.integers(1, 4), st.sampled_from(["f4", "f8"]), st.integers(-8, 6))
def test_what_is_summed_and_what_is_left_out_are_the_exact_sum(shapes, text, ranks, dtype, exponent):
    parameters = [(f"p{at}", shape, text) for at, shape in enumerate(shapes)]
    given = np.random.default_rng(5).normal(size=(3, ranks, sum(map(prod, shapes)))) * 10.0**exponent

    def body(world):
        reductions, found = Reductions(nd.ProcessGrid(world, replicas=ranks)), []
        flat = np.empty(given.shape[2], dtype)
        compressed = CompressedGradients(reductions, flat, parameters)
        for step in given:
            flat[...] = step[world.rank]
            compressed.sum()
            residuals = [one.residual for _, one in compressed.compressors]
            found.append((flat.copy(), np.concatenate(residuals)))
        return found, reductions.bytes_reduced

    everyone, sent = zip(*nd.loopback.run(ranks, body), strict=True)
    left = np.zeros(given.shape[2])
    for at, step in enumerate(given):
        totals, residuals = zip(*(found[at] for found in everyone), strict=True)
        exact = left + step.astype(dtype).astype(float).sum(axis=0)
        left = np.sum(residuals, axis=0, dtype=float)
        bound = 1e-5 if dtype == "f4" else 1e-13
        np.testing.assert_allclose(totals[0] + left, exact, atol=bound * np.abs(step).max() * 40)
        for total in totals:
            np.testing.assert_array_equal(total, totals[0])
    if ranks > 1:
        kinds = [nbytes for shape in shapes if (nbytes := _bytes(text, shape, np.dtype(dtype).itemsize))]
        assert set(sent) == {3 * sum(kinds)}
    else:
        assert not left.any()


def _bytes(text, shape, itemsize):
    name, _, argument = text.rstrip(")").partition("(")
    return compressors.KINDS[name].nbytes(shape, float(argument or 0), itemsize)


def test_half_precision_rounds_to_the_nearest():
    numbers = np.random.default_rng(1).uniform(1, 2, 4000).astype("f4") * np.logspace(-4, 4, 4000, dtype="f4")
    for text, bits in (("fp16", 11), ("bf16", 8)):
        one = compressor_of(text, {"p": numbers.shape}, np.dtype("f4"))
        assert (np.abs(one.decode(one.encode(numbers)) / numbers - 1) <= 2.0**-bits).all()
        assert np.isfinite(one.decode(one.encode(np.array([1e30, -3.4e38], "f4")))).all()


def train(kind, compressor, grid, steps=5, dtype="float64", **how):
    model, shape = model_of(kind, True), KINDS[kind][0]
    model.dtype = np.dtype(dtype)
    model.execute(strategy=None if compressor is None else f"AllReduce(compressor='{compressor}')", **how)
    model.build(shape, 7, grid)
    rng, losses = np.random.default_rng(4), []
    for _ in range(steps):
        x, labels = rng.normal(size=(7, *shape)), rng.integers(0, 10, (7, *model.output_shape[:-1]))
        losses.append(model.train_batch(model.scatter(x), labels))
    return model, losses


def sent_of(model):
    return sum(account.nbytes * count for account, count in model.ledger().items() if account.layer == "gradients")


@pytest.mark.parametrize(
    ("shape", "sync"), [((2, 1, 1), "allreduce"), ((2, 1, 2), "bucketed"), ((1, 2, 2), "allreduce")], ids=str
)
@pytest.mark.parametrize("compressor", ["fp16", "bf16", "topk(0.2)", "powersgd(2)"])
@pytest.mark.long
def test_bytes_and_memory_are_as_planned(compressor, shape, sync):
    def body(world):
        grid = nd.ProcessGrid(world, replicas=shape[0], rows=shape[1], cols=shape[2])
        model, losses = train("everything", compressor, grid, sync=sync)
        return losses, sent_of(model), 5 * model.compiled.reduced(grid.rank)["gradients"], model.state()

    found = nd.loopback.run(prod(shape), body)
    exact = nd.loopback.run(1, lambda world: train("everything", None, nd.ProcessGrid(world)))[0][1]
    for losses, sent, planned, state in found:
        assert sent == planned
        np.testing.assert_allclose(losses, exact, rtol=0.02 if compressor in ("fp16", "bf16") else 0.2)
        assert losses != exact  # it was compressed
        assert all(np.array_equal(state[name], array) for name, array in found[0][3].items())


def test_half_precision_halves_the_bytes():
    def sent(compressor):
        def body(world):
            return sent_of(train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), 1, "float32")[0])

        return nd.loopback.run(2, body)[0] - 16 * 4  # the flags stay as they are

    assert sent("fp16") == sent("bf16") == sent(None) / 2


def test_bprop_gives_exact_gradients_and_keeps_the_error_feedback():
    def body(world, compressor):
        model, _ = train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), steps=1)
        before = [state.array.copy() for state in model.parameters.compressed.state()]
        model.load_state({name: np.ones_like(array) for name, array in model.state().items()})
        x = np.random.default_rng(1).normal(size=(7, *KINDS["perceptron"][0]))
        y = model.gather(model.fprop(model.scatter(x), training=False))
        model.fprop(model.scatter(x))
        model.bprop(model.scatter_output(np.random.default_rng(2).normal(size=y.shape)))
        after = [state.array for state in model.parameters.compressed.state()]
        assert all(map(np.array_equal, before, after))
        return model.gradients()

    exact = nd.loopback.run(2, lambda world: body(world, None))[0]
    for found in nd.loopback.run(2, lambda world: body(world, "topk(0.1)")):
        for name, array in exact.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compressor", ["fp16", "topk(0.1)", "powersgd(2)"])
def test_a_step_that_is_skipped_changes_no_error_feedback(compressor):
    def body(world):
        model, _ = train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), steps=2)
        model.nonfinite = "skip"
        before = [state.array.copy() for state in model.parameters.compressed.state()]
        x = np.ones((7, *KINDS["perceptron"][0]))
        x[5] = np.inf  # on the second replica alone
        assert np.isnan(model.train_batch(model.scatter(x), np.zeros(7, int)))
        after = [state.array for state in model.parameters.compressed.state()]
        assert any(array.any() for array in before)
        assert all(map(np.array_equal, before, after))
        parameters = model.parameters  # gradients are finite, but something else on one rank is not
        parameters.begin_gradients()
        parameters.sync.note(world.rank != 1)
        parameters.grads[...] = 1.0
        parameters.sum_gradients(for_update=True)
        assert all(map(np.array_equal, before, after))

    nd.loopback.run(2, body)


def begun(grid, strategy):
    layers = [nd.FCLayerDist(20, activation=nd.Tanh()), nd.FCLayerDist(4)]
    model = nd.MLPDist(layers, optimizer=nd.Adam(0.01), strategy=strategy, dtype="float64", backend="numpy")
    dataset = nd.Synthetic((3, 4, 1), classes=4, train=24, test=4)
    dataset.open(grid)
    model.build((3, 4, 1), 12, grid)
    return TrainState(model, dataset, 1, 12)


def steps(run, numbers):
    found = []
    for number in numbers:
        rng = np.random.default_rng(number)
        x, labels = rng.normal(size=(12, 3, 4, 1)), rng.integers(0, 4, 12)
        found.append(run.model.train_batch(run.model.scatter(x), labels, batch_size=12))
    return found


def feedback(run):
    """Return the error feedback summed over all ranks, by name, and what is the same on all."""
    states = run.model.parameters.compressed.state()
    sums = {one.name: sum(run.grid.world.allgather(one.array)) for one in states if not one.replicated}
    return sums, {one.name: one.array.copy() for one in states if one.replicated}


@pytest.mark.parametrize("compressor", ["fp16", "topk(0.1)", "powersgd(2)"])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, compressor):
    strategy = f"AllReduce(compressor='{compressor}')"

    def write(world):
        run = begun(nd.ProcessGrid(world, replicas=world.size), strategy)
        steps(run, range(3))
        Checkpoint(tmp_path / "c.h5").save(run)
        return feedback(run), steps(run, (3, 4)), run.model.state()

    kept, losses, state = nd.loopback.run(3, write)[0]

    def resume(world):
        run = begun(nd.ProcessGrid(world, replicas=world.size), strategy)
        restore(tmp_path / "c.h5", run)
        return run.notes, feedback(run), steps(run, (3, 4)), run.model.state()

    for ranks in (3, 1, 2, 5):
        for notes, (sums, alike), again, found in nd.loopback.run(ranks, resume):
            assert not notes
            for name, array in kept[0].items():
                assert array.any() or "bias" in name
                np.testing.assert_allclose(sums[name], array, rtol=1e-13, atol=1e-18)
            assert all(np.array_equal(alike[name], array) for name, array in kept[1].items())
            if ranks == 3:
                assert again == losses
                assert all(np.array_equal(found[name], array) for name, array in state.items())


def test_checkpoints_go_on_with_other_compressors_or_none(tmp_path):
    def write(world):
        run = begun(nd.ProcessGrid(world, replicas=2), "AllReduce(compressor='topk(0.1)')")
        steps(run, range(3))
        Checkpoint(tmp_path / "c.h5").save(run)
        return feedback(run)[0]

    kept = nd.loopback.run(2, write)[0]

    def resume(strategy):
        def body(world):
            run = begun(nd.ProcessGrid(world, replicas=2), strategy)
            restore(tmp_path / "c.h5", run)
            return run.notes, feedback(run)[0]

        return nd.loopback.run(2, body)[0]

    notes, sums = resume("AllReduce(compressor='fp16')")
    assert not notes
    assert all(np.array_equal(sums[name], array) for name, array in kept.items())
    for strategy in (None, "ShardedOptimizer"):
        notes, sums = resume(strategy)
        assert not sums
        assert "error feedback is dropped" in notes[0]
        assert "fc1/weights/error_feedback" in notes[0]


def test_small_parameters_travel_as_they_are():
    assert compressed_bytes("powersgd(4)", (7,), 4) is None
    assert compressed_bytes("powersgd(4)", (4, 4), 4) is None
    assert compressed_bytes("topk(0.5)", (10,), 4) is None
    assert compressed_bytes("powersgd(4)", (3, 3, 16, 32), 4) == 4 * (144 + 32) * 4
