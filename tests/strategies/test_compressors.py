"""Compressed gradients: exact error feedback, planned bytes, and checkpoints of the feedback."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import KINDS, make_model

import neondist as nd
from neondist.comm import Reductions
from neondist.parallel import compressors
from neondist.parallel.compressed import CompressedAllReduce
from neondist.parallel.compressors import compressed_bytes_if_smaller, create_compressor
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore_checkpoint

COMPRESSORS = ["fp16", "bf16", "topk(0.01)", "topk(0.3)", "topk(1)", "powersgd(1)", "powersgd(4)"]
shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=40)
@given(shapes, st.sampled_from(COMPRESSORS), st.integers(1, 4), st.sampled_from(["f4", "f8"]), st.integers(-8, 6))
def test_sums_and_residuals_equal_the_exact_sum(shapes, text, ranks, dtype, exponent):
    parameters = [(f"p{index}", shape, text) for index, shape in enumerate(shapes)]
    gradients = np.random.default_rng(5).normal(size=(3, ranks, sum(map(prod, shapes)))) * 10.0**exponent

    def body(world):
        reductions, outputs = Reductions(nd.ProcessGrid(world, replicas=ranks)), []
        flat = np.empty(gradients.shape[2], dtype)
        compressed = CompressedAllReduce(reductions, flat, parameters)
        for step in gradients:
            flat[...] = step[world.rank]
            compressed.sum_over_ranks()
            residuals = [compressor.residual for _, compressor in compressed.compressors_with_start]
            outputs.append((flat.copy(), np.concatenate(residuals)))
        return outputs, reductions.bytes_reduced

    results, sent = zip(*nd.loopback.run(ranks, body), strict=True)
    residual = np.zeros(gradients.shape[2])
    for index, step in enumerate(gradients):
        totals, residuals = zip(*(outputs[index] for outputs in results), strict=True)
        exact = residual + step.astype(dtype).astype(float).sum(axis=0)
        residual = np.sum(residuals, axis=0, dtype=float)
        bound = 1e-5 if dtype == "f4" else 1e-13
        np.testing.assert_allclose(totals[0] + residual, exact, atol=bound * np.abs(step).max() * 40)
        for total in totals:
            np.testing.assert_array_equal(total, totals[0])
    if ranks > 1:
        sizes = [nbytes for shape in shapes if (nbytes := _count_bytes(text, shape, np.dtype(dtype).itemsize))]
        assert set(sent) == {3 * sum(sizes)}
    else:
        assert not residual.any()


def _count_bytes(text, shape, itemsize):
    name, _, argument = text.rstrip(")").partition("(")
    return compressors.COMPRESSORS_BY_NAME[name].contribution_bytes(shape, float(argument or 0), itemsize)


def test_half_precision_rounds_to_nearest():
    numbers = np.random.default_rng(1).uniform(1, 2, 4000).astype("f4") * np.logspace(-4, 4, 4000, dtype="f4")
    for text, bits in (("fp16", 11), ("bf16", 8)):
        compressor = create_compressor(text, {"p": numbers.shape}, np.dtype("f4"))
        assert (np.abs(compressor.decode(compressor.encode(numbers)) / numbers - 1) <= 2.0**-bits).all()
        assert np.isfinite(compressor.decode(compressor.encode(np.array([1e30, -3.4e38], "f4")))).all()


def train(kind, compressor, grid, steps=5, dtype="float64", **options):
    model, shape = make_model(kind, True), KINDS[kind][0]
    model.dtype = np.dtype(dtype)
    model.configure_execution(
        strategy=None if compressor is None else f"AllReduce(compressor='{compressor}')", **options
    )
    model.build(shape, 7, grid)
    rng, losses = np.random.default_rng(4), []
    for _ in range(steps):
        x, labels = rng.normal(size=(7, *shape)), rng.integers(0, 10, (7, *model.output_shape[:-1]))
        losses.append(model.train_batch(model.scatter(x), labels))
    return model, losses


def count_gradient_bytes(model):
    return sum(account.nbytes * count for account, count in model.ledger().items() if account.layer == "gradients")


@pytest.mark.parametrize(
    ("shape", "sync"), [((2, 1, 1), "allreduce"), ((2, 1, 2), "bucketed"), ((1, 2, 2), "allreduce")], ids=str
)
@pytest.mark.parametrize("compressor", ["fp16", "bf16", "topk(0.2)", "powersgd(2)"])
@pytest.mark.long
def test_bytes_match_the_plan(compressor, shape, sync):
    def body(world):
        grid = nd.ProcessGrid(world, replicas=shape[0], rows=shape[1], cols=shape[2])
        model, losses = train("everything", compressor, grid, sync=sync)
        return (
            losses,
            count_gradient_bytes(model),
            5 * model.compiled.reduction_bytes(grid.rank)["gradients"],
            model.state(),
        )

    results = nd.loopback.run(prod(shape), body)
    exact = nd.loopback.run(1, lambda world: train("everything", None, nd.ProcessGrid(world)))[0][1]
    for losses, sent, planned, state in results:
        assert sent == planned
        np.testing.assert_allclose(losses, exact, rtol=0.02 if compressor in ("fp16", "bf16") else 0.2)
        assert losses != exact  # compression had an effect
        assert all(np.array_equal(state[name], array) for name, array in results[0][3].items())


def test_half_precision_halves_the_bytes():
    def count_bytes(compressor):
        def body(world):
            return count_gradient_bytes(
                train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), 1, "float32")[0]
            )

        return nd.loopback.run(2, body)[0] - 16 * 4  # flags are not compressed

    assert count_bytes("fp16") == count_bytes("bf16") == count_bytes(None) / 2


def test_bprop_is_exact_and_keeps_the_error_feedback():
    def body(world, compressor):
        model, _ = train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), steps=1)
        before = [state.array.copy() for state in model.parameters.compressed.sync_states()]
        model.load_state({name: np.ones_like(array) for name, array in model.state().items()})
        x = np.random.default_rng(1).normal(size=(7, *KINDS["perceptron"][0]))
        y = model.gather(model.fprop(model.scatter(x), training=False))
        model.fprop(model.scatter(x))
        model.bprop(model.scatter_output(np.random.default_rng(2).normal(size=y.shape)))
        after = [state.array for state in model.parameters.compressed.sync_states()]
        assert all(map(np.array_equal, before, after))
        return model.gradients()

    exact = nd.loopback.run(2, lambda world: body(world, None))[0]
    for actual in nd.loopback.run(2, lambda world: body(world, "topk(0.1)")):
        for name, array in exact.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compressor", ["fp16", "topk(0.1)", "powersgd(2)"])
def test_skipped_steps_keep_the_error_feedback(compressor):
    def body(world):
        model, _ = train("perceptron", compressor, nd.ProcessGrid(world, replicas=2), steps=2)
        model.nonfinite = "skip"
        before = [state.array.copy() for state in model.parameters.compressed.sync_states()]
        x = np.ones((7, *KINDS["perceptron"][0]))
        x[5] = np.inf  # on the second replica alone
        assert np.isnan(model.train_batch(model.scatter(x), np.zeros(7, int)))
        after = [state.array for state in model.parameters.compressed.sync_states()]
        assert any(array.any() for array in before)
        assert all(map(np.array_equal, before, after))
        parameters = model.parameters  # finite gradients, but another value of one rank is not finite
        parameters.reset_gradients()
        parameters.sync.record_finiteness(world.rank != 1)
        parameters.grads[...] = 1.0
        parameters.sum_gradients(to_owners=True)
        assert all(map(np.array_equal, before, after))

    nd.loopback.run(2, body)


def start_run(grid, strategy):
    layers = [nd.FCLayerDist(20, activation=nd.Tanh()), nd.FCLayerDist(4)]
    model = nd.MLPDist(layers, optimizer=nd.Adam(0.01), strategy=strategy, dtype="float64", backend="numpy")
    dataset = nd.Synthetic((3, 4, 1), classes=4, train=24, test=4)
    dataset.open(grid)
    model.build((3, 4, 1), 12, grid)
    return TrainState(model, dataset, 1, 12)


def train_steps(run, numbers):
    losses = []
    for number in numbers:
        rng = np.random.default_rng(number)
        x, labels = rng.normal(size=(12, 3, 4, 1)), rng.integers(0, 4, 12)
        losses.append(run.model.train_batch(run.model.scatter(x), labels, batch_size=12))
    return losses


def collect_feedback(run):
    """Return the error feedback summed over ranks, and the replicated state, by name."""
    states = run.model.parameters.compressed.sync_states()
    sums = {state.name: sum(run.grid.world.allgather(state.array)) for state in states if not state.same_on_all_ranks}
    return sums, {state.name: state.array.copy() for state in states if state.same_on_all_ranks}


@pytest.mark.parametrize("compressor", ["fp16", "topk(0.1)", "powersgd(2)"])
def test_resumed_run_is_identical(tmp_path, compressor):
    strategy = f"AllReduce(compressor='{compressor}')"

    def write(world):
        run = start_run(nd.ProcessGrid(world, replicas=world.size), strategy)
        train_steps(run, range(3))
        Checkpoint(tmp_path / "c.h5").save(run)
        return collect_feedback(run), train_steps(run, (3, 4)), run.model.state()

    saved, losses, state = nd.loopback.run(3, write)[0]

    def resume(world):
        run = start_run(nd.ProcessGrid(world, replicas=world.size), strategy)
        restore_checkpoint(tmp_path / "c.h5", run)
        return run.start_messages, collect_feedback(run), train_steps(run, (3, 4)), run.model.state()

    for ranks in (3, 1, 2, 5):
        for notes, (sums, replicated), resumed_losses, actual in nd.loopback.run(ranks, resume):
            assert not notes
            for name, array in saved[0].items():
                assert array.any() or "bias" in name
                np.testing.assert_allclose(sums[name], array, rtol=1e-13, atol=1e-18)
            assert all(np.array_equal(replicated[name], array) for name, array in saved[1].items())
            if ranks == 3:
                assert resumed_losses == losses
                assert all(np.array_equal(actual[name], array) for name, array in state.items())


def test_checkpoints_resume_with_other_compressors(tmp_path):
    def write(world):
        run = start_run(nd.ProcessGrid(world, replicas=2), "AllReduce(compressor='topk(0.1)')")
        train_steps(run, range(3))
        Checkpoint(tmp_path / "c.h5").save(run)
        return collect_feedback(run)[0]

    saved = nd.loopback.run(2, write)[0]

    def resume(strategy):
        def body(world):
            run = start_run(nd.ProcessGrid(world, replicas=2), strategy)
            restore_checkpoint(tmp_path / "c.h5", run)
            return run.start_messages, collect_feedback(run)[0]

        return nd.loopback.run(2, body)[0]

    notes, sums = resume("AllReduce(compressor='fp16')")
    assert not notes
    assert all(np.array_equal(sums[name], array) for name, array in saved.items())
    for strategy in (None, "ShardedOptimizer"):
        notes, sums = resume(strategy)
        assert not sums
        assert "error feedback is dropped" in notes[0]
        assert "fc1/bias, fc1/weights," in notes[0]


def test_small_parameters_are_not_compressed():
    assert compressed_bytes_if_smaller("powersgd(4)", (7,), 4) is None
    assert compressed_bytes_if_smaller("powersgd(4)", (4, 4), 4) is None
    assert compressed_bytes_if_smaller("topk(0.5)", (10,), 4) is None
    assert compressed_bytes_if_smaller("powersgd(4)", (3, 3, 16, 32), 4) == 4 * (144 + 32) * 4
