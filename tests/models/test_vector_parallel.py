"""Fully connected layers divided by outputs and inputs in turn: the numbers of one process, one sum a pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.config import load_experiment
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore

OPTIMIZERS = {
    "momentum": lambda: nd.SGD(0.1, momentum=0.9, weight_decay=0.01, decay_all=False),
    "Adam": lambda: nd.Adam(0.01, clip_norm=0.3),
    "LAMB": lambda: nd.LAMB(0.01),
}
GRIDS = [(1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 3, 1), (1, 1, 1)]


def perceptron(dist, sizes, optimizer="momentum", bias=True, vector_parallel=True, **how):
    layer = nd.FCLayerDist if dist else nd.FCLayer
    hidden = [layer(size, bias=bias, activation=nd.Tanh()) for size in sizes]
    model = (nd.MLPDist if dist else nd.MLP)(
        [*hidden, layer(3)], optimizer=OPTIMIZERS[optimizer](), dtype="float64", seed=2, **how
    )
    model.vector_parallel = vector_parallel
    return model


def train(model, shape, grid):
    """Train some steps, the last of fewer samples, and go through once more; return whole arrays."""
    model.build(shape, 6, grid)
    rng, losses = np.random.default_rng(0), []
    for samples in (6, 6, 5):
        x, labels = rng.normal(size=(samples, *shape)), rng.integers(0, 3, samples)
        losses.append(model.train_batch(model.scatter(x), labels, batch_size=samples))
    y = model.fprop(model.scatter(rng.normal(size=(6, *shape))))
    whole = model.gather(y)
    dx = model.gather_input(model.bprop(model.scatter_output(rng.normal(size=whole.shape))))
    return {"loss": np.array(losses), "y": whole, "dx": dx} | model.state() | model.optimizer_state()


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 11), max_size=4), st.sampled_from([(9,), (3,), (4, 3, 2)]), st.sampled_from(GRIDS),
    st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.sampled_from([{}, {"recompute": True}, {"accumulate": 2}]),
    st.sampled_from(["AllReduce", "ShardedOptimizer", "AllReduce(compressor='fp16')"]),
)  # fmt: skip
@pytest.mark.long
def test_numbers_are_those_of_one_process(sizes, shape, grid, optimizer, bias, how, strategy):
    replicas, rows, cols = grid
    expected = train(perceptron(False, sizes, optimizer, bias, vector_parallel=False), shape, None)

    def body(world):
        made = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model = perceptron(True, sizes, optimizer, bias, strategy=strategy, **how)
        return train(model, shape, made), model.ledger(), model.compiled.reduced(made.rank)

    tolerance = 1e-12 if optimizer == "momentum" else 1e-8
    if "fp16" in strategy:
        tolerance = 3e-2
    for found, _, _ in nd.loopback.run(replicas * rows * cols, body):
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_a_pair_needs_one_sum_forward_and_one_back(pairs):
    sizes = [16, 12] * pairs

    def body(world):
        grid = nd.ProcessGrid(world)
        model = perceptron(True, sizes[:-1])
        model.build((8,), 4, grid)
        model.train_batch(model.scatter(np.ones((4, 8))), np.zeros(4, int))
        accounts = [one for one in model.ledger() if one.layer.startswith("fc")]
        planned = model.compiled.reduced(grid.rank)
        for name in {one.layer for one in accounts}:
            sums = [one.nbytes * model.ledger()[one] for one in accounts if one.layer == name]
            assert sum(sums) == planned[name]
        shares = [np.prod(one.local_shape) / np.prod(one.parameter.shape) for one in model.parameters.trained]
        split = [share for share, one in zip(shares, model.parameters.trained, strict=True) if one.name == "weights"]
        return accounts, split

    for accounts, split in nd.loopback.run(4, body):
        assert all(one.kind == "sum" for one in accounts)
        assert len([one for one in accounts if one.direction == "forward"]) == pairs
        assert len([one for one in accounts if one.direction == "backward"]) == pairs - 1  # the input needs no gradient
        assert split == [0.25] * (2 * pairs)


def test_no_rank_holds_more_than_its_share_up_to_rounding():
    def body(world):
        model = perceptron(True, [11, 7, 10])
        model.build((9,), 4, nd.ProcessGrid(world))
        for one in model.parameters.trained:
            if len(one.parameter.shape) == 2:
                axis = 1 if one.local_shape[0] == one.parameter.shape[0] else 0
                assert one.local_shape[axis] <= -(-one.parameter.shape[axis] // 4)
                assert one.local_shape[1 - axis] == one.parameter.shape[1 - axis]

    nd.loopback.run(4, body)


def test_checkpoints_are_those_of_any_grid(tmp_path):
    def begun(world, vector_parallel, replicas):
        grid = nd.ProcessGrid(world, replicas=replicas)
        model, dataset = perceptron(True, [10, 6, 8], vector_parallel=vector_parallel), nd.Synthetic((9, 1), classes=3)
        dataset.open(grid)
        model.build((9,), 6, grid)
        return TrainState(model, dataset, 1, 6)

    def write(world):
        run = begun(world, True, 1)
        run.model.train_batch(run.model.scatter(np.ones((6, 9))), np.zeros(6, int))
        Checkpoint(tmp_path / "c.h5").save(run)
        return run.model.state() | run.model.optimizer_state()

    expected = nd.loopback.run(4, write)[0]
    for ranks, vector_parallel, replicas in ((1, False, 1), (3, True, 1), (4, True, 2), (4, False, 4)):

        def read(world, vector_parallel=vector_parallel, replicas=replicas):
            run = begun(world, vector_parallel, replicas)
            restore(tmp_path / "c.h5", run)
            return run.model.state() | run.model.optimizer_state()

        for found in nd.loopback.run(ranks, read):
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(("layers", "shape", "says"), [
    ([nd.FCLayer(4, split="outputs"), nd.FCLayer(3)], (4, 4, 1), "'fc1'.*split: outputs needs a vector"),
    ([nd.FCLayer(4), nd.FCLayer(3, split="outputs")], (4,), "'fc2'.*followed by fully connected layers with split"),
    ([nd.FCLayer(4, split="outputs", activation=nd.Softmax()), nd.FCLayer(3)], (4,), "'fc1'.*elementwise"),
    ([nd.FCLayer(4, split="outputs"), nd.DropoutLayer(0.5), nd.FCLayer(3)], (4,), "'fc1'.*followed by"),
])  # fmt: skip
def test_layers_that_cannot_be_divided_by_outputs_are_refused(layers, shape, says):
    with pytest.raises(nd.UserError, match=says):
        nd.MLP(layers).plan(shape)


def test_only_layers_that_can_be_are_divided_by_outputs():
    """A pair ends before what wants whole vectors, and begins with no image."""

    def fc(size, **how):
        return nd.FCLayer(size, **how)

    layers = [fc(5), fc(6), fc(7, activation=nd.Softmax()), fc(8), nd.DropoutLayer(), fc(5), fc(4), fc(3)]
    model = nd.MLP(layers)
    model.vector_parallel = True
    model.plan((4, 4, 1))
    assert [layer.splits_outputs for layer in layers] == [False, True, False, False, False, False, True, False]
    model.plan((4,))
    assert [layer.splits_outputs for layer in layers[:4]] == [False, True, False, False]


TEXT = """!FitExperiment
dataset: !Synthetic {{shape: [6, 6, 1], classes: 3, train: 12, test: 4}}
model: !MLPDist
  layers:
    - !FCLayerDist {{out_features: 8, activation: !ReLU {{}}}}
    - !FCLayerDist {{out_features: 6}}
    - !FCLayerDist {{out_features: 3}}
{lines}
"""


def experiment(tmp_path, lines):
    path = tmp_path / "e.yaml"
    path.write_text(TEXT.format(lines=lines))
    return load_experiment(path)


@pytest.mark.parametrize(("lines", "ranks", "grid"), [
    ("dist_mode: halopar", 4, (1, 2, 2)),
    ("dist_mode: vecpar", 4, (1, 2, 2)),
    ("dist_mode: vecpar\ngrid: {cols: 1}", 4, (1, 4, 1)),
    ("dist_mode: datapar", 4, (4, 1, 1)),
    ("dist_mode: datapar", 1, (1, 1, 1)),
    ("dist_mode: halodatapar\ngrid: {replicas: 2}", 4, (2, 2, 1)),
])  # fmt: skip
def test_modes_are_short_for_grids_and_layouts(tmp_path, lines, ranks, grid):
    made = experiment(tmp_path, lines)
    made.validate(ranks)

    def body(world):
        again = experiment(tmp_path, lines)
        shape = again.open_grid(world).shape
        return (shape.replicas, shape.rows, shape.cols), again.run(again.open_grid(world), hooks=[]).history[-1]

    found, history = zip(*nd.loopback.run(ranks, body), strict=True)
    assert set(found) == {grid}
    serial = experiment(tmp_path, "").run(nd.ProcessGrid.serial(), hooks=[]).history[-1]
    assert history[0]["train_loss"] == pytest.approx(serial["train_loss"], rel=1e-5)
    assert any(layer.splits_outputs for layer in made.model.leaves) == ("vecpar" in lines)


@pytest.mark.parametrize(("lines", "line", "says"), [
    ("dist_mode: halopa", 8, "halopar"),
    ("dist_mode: 3", 8, "dist_mode"),
    ("dist_mode: halopar\ngrid: {replicas: 2}", 8, "grid has replicas: 2"),
    ("dist_mode: datapar\ngrid: {rows: 2}", 8, "grid has rows: 2"),
    ("dist_mode: halodatapar", 8, "with a number of replicas"),
    ("dist_flag: false\ndist_mode: datapar", 9, "needs dist_flag: true"),
])  # fmt: skip
def test_wrong_modes_name_file_and_line(tmp_path, lines, line, says):
    with pytest.raises(nd.ConfigError) as error:
        experiment(tmp_path, lines)
    assert str(error.value).startswith(f"{tmp_path / 'e.yaml'}:{line}: ")
    assert says in str(error.value)
