"""Fully connected layers split alternately by outputs and inputs: equal to one process, with one allreduce per pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.config import load_experiment
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore_checkpoint

OPTIMIZERS = {
    "momentum": lambda: nd.SGD(0.1, momentum=0.9, weight_decay=0.01, decay_all=False),
    "Adam": lambda: nd.Adam(0.01, clip_norm=0.3),
    "LAMB": lambda: nd.LAMB(0.01),
}
GRIDS = [(1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 3, 1), (1, 1, 1)]


def make_mlp(dist, sizes, optimizer="momentum", bias=True, vector_parallel=True, **options):
    layer = nd.FCLayerDist if dist else nd.FCLayer
    hidden = [layer(size, bias=bias, activation=nd.Tanh()) for size in sizes]
    model = (nd.MLPDist if dist else nd.MLP)(
        [*hidden, layer(3)], optimizer=OPTIMIZERS[optimizer](), dtype="float64", seed=2, **options
    )
    model.vector_parallel = vector_parallel
    return model


def train(model, shape, grid):
    """Train some steps, the last with fewer samples, and run one more pass; return global arrays."""
    model.build(shape, 6, grid)
    rng, losses = np.random.default_rng(0), []
    for samples in (6, 6, 5):
        x, labels = rng.normal(size=(samples, *shape)), rng.integers(0, 3, samples)
        losses.append(model.train_batch(model.scatter(x), labels, batch_size=samples))
    y = model.fprop(model.scatter(rng.normal(size=(6, *shape))))
    full_output = model.gather(y)
    dx = model.gather_input(model.bprop(model.scatter_output(rng.normal(size=full_output.shape))))
    return {"loss": np.array(losses), "y": full_output, "dx": dx} | model.state() | model.optimizer_state()


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 11), max_size=4), st.sampled_from([(9,), (3,), (4, 3, 2)]), st.sampled_from(GRIDS),
    st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.sampled_from([{}, {"recompute": True}, {"accumulate": 2}]),
    st.sampled_from(["AllReduce", "ShardedOptimizer", "AllReduce(compressor='fp16')"]),
)  # fmt: skip
@pytest.mark.long
def test_results_match_one_process(sizes, shape, grid, optimizer, bias, options, strategy):
    replicas, rows, cols = grid
    expected = train(make_mlp(False, sizes, optimizer, bias, vector_parallel=False), shape, None)

    def body(world):
        process_grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model = make_mlp(True, sizes, optimizer, bias, strategy=strategy, **options)
        return train(model, shape, process_grid), model.ledger(), model.compiled.reduction_bytes(process_grid.rank)

    tolerance = 1e-12 if optimizer == "momentum" else 1e-8
    if "fp16" in strategy:
        tolerance = 3e-2
    for actual, _, _ in nd.loopback.run(replicas * rows * cols, body):
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_pairs_need_one_sum_per_direction(pairs):
    sizes = [16, 12] * pairs

    def body(world):
        grid = nd.ProcessGrid(world)
        model = make_mlp(True, sizes[:-1])
        model.build((8,), 4, grid)
        model.train_batch(model.scatter(np.ones((4, 8))), np.zeros(4, int))
        log_entries = [entry for entry in model.ledger() if entry.layer.startswith("fc")]
        planned = model.compiled.reduction_bytes(grid.rank)
        for name in {entry.layer for entry in log_entries}:
            sums = [entry.nbytes * model.ledger()[entry] for entry in log_entries if entry.layer == name]
            assert sum(sums) == planned[name]
        shares = [
            np.prod(placed.local_shape) / np.prod(placed.parameter.shape) for placed in model.parameters.trained_shards
        ]
        split = [
            share
            for share, placed in zip(shares, model.parameters.trained_shards, strict=True)
            if placed.name == "weights"
        ]
        return log_entries, split

    for log_entries, split in nd.loopback.run(4, body):
        assert all(entry.kind == "sum" for entry in log_entries)
        directions = [entry.direction for entry in log_entries]
        assert directions.count("forward") == pairs
        assert directions.count("backward") == pairs - 1  # the input needs no gradient
        assert split == [0.25] * (2 * pairs)


def test_weights_are_divided_evenly():
    def body(world):
        model = make_mlp(True, [11, 7, 10])
        model.build((9,), 4, nd.ProcessGrid(world))
        for placed in model.parameters.trained_shards:
            if len(placed.parameter.shape) == 2:
                axis = 1 if placed.local_shape[0] == placed.parameter.shape[0] else 0
                assert placed.local_shape[axis] <= -(-placed.parameter.shape[axis] // 4)
                assert placed.local_shape[1 - axis] == placed.parameter.shape[1 - axis]

    nd.loopback.run(4, body)


def test_checkpoints_are_independent_of_the_grid(tmp_path):
    def start_run(world, vector_parallel, replicas):
        grid = nd.ProcessGrid(world, replicas=replicas)
        model, dataset = (
            make_mlp(True, [10, 6, 8], vector_parallel=vector_parallel),
            nd.Synthetic((9, 1), classes=3),
        )
        dataset.open(grid)
        model.build((9,), 6, grid)
        return TrainState(model, dataset, 1, 6)

    def save_run(world):
        run = start_run(world, True, 1)
        run.model.train_batch(run.model.scatter(np.ones((6, 9))), np.zeros(6, int))
        Checkpoint(tmp_path / "c.h5").save(run)
        return run.model.state() | run.model.optimizer_state()

    expected = nd.loopback.run(4, save_run)[0]
    for ranks, vector_parallel, replicas in ((1, False, 1), (3, True, 1), (4, True, 2), (4, False, 4)):

        def load_run(world, vector_parallel=vector_parallel, replicas=replicas):
            run = start_run(world, vector_parallel, replicas)
            restore_checkpoint(tmp_path / "c.h5", run)
            return run.model.state() | run.model.optimizer_state()

        for actual in nd.loopback.run(ranks, load_run):
            for name, array in expected.items():
                np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize(("layers", "shape", "message"), [
    ([nd.FCLayer(4, split="outputs"), nd.FCLayer(3)], (4, 4, 1), "'fc1'.*split: outputs needs a vector"),
    ([nd.FCLayer(4), nd.FCLayer(3, split="outputs")], (4,), "'fc2'.*'split: outputs' requires .* fully connected"),
    ([nd.FCLayer(4, split="outputs", activation=nd.Softmax()), nd.FCLayer(3)], (4,), "'fc1'.*elementwise"),
    ([nd.FCLayer(4, split="outputs"), nd.DropoutLayer(0.5), nd.FCLayer(3)], (4,), "'fc1'.*'split: outputs' requires"),
])  # fmt: skip
def test_unsplittable_layers_are_rejected(layers, shape, message):
    with pytest.raises(nd.UserError, match=message):
        nd.MLP(layers).plan(shape)


def test_layers_split_by_outputs():
    """Pairs end before layers that need the whole vector, and do not start at an image."""

    def make_fc(size, **options):
        return nd.FCLayer(size, **options)

    layers = [
        make_fc(5),
        make_fc(6),
        make_fc(7, activation=nd.Softmax()),
        make_fc(8),
        nd.DropoutLayer(),
        make_fc(5),
        make_fc(4),
        make_fc(3),
    ]
    model = nd.MLP(layers)
    model.vector_parallel = True
    model.plan((4, 4, 1))
    assert [layer.splits_outputs for layer in layers] == [False, True, False, False, False, False, True, False]
    model.plan((4,))
    assert [layer.splits_outputs for layer in layers[:4]] == [False, True, False, False]


EXPERIMENT_TEXT = """!FitExperiment
dataset: !Synthetic {{shape: [6, 6, 1], classes: 3, train: 12, test: 4}}
model: !MLPDist
  layers:
    - !FCLayerDist {{out_features: 8, activation: !ReLU {{}}}}
    - !FCLayerDist {{out_features: 6}}
    - !FCLayerDist {{out_features: 3}}
{lines}
"""


def load_experiment_with_lines(tmp_path, lines):
    path = tmp_path / "e.yaml"
    path.write_text(EXPERIMENT_TEXT.format(lines=lines))
    return load_experiment(path)


@pytest.mark.parametrize(("lines", "ranks", "grid"), [
    ("dist_mode: halopar", 4, (1, 2, 2)),
    ("dist_mode: vecpar", 4, (1, 2, 2)),
    ("dist_mode: vecpar\ngrid: {cols: 1}", 4, (1, 4, 1)),
    ("dist_mode: datapar", 4, (4, 1, 1)),
    ("dist_mode: datapar", 1, (1, 1, 1)),
    ("dist_mode: halodatapar\ngrid: {replicas: 2}", 4, (2, 2, 1)),
    ("dist_mode: halodatapar\ngrid: {cols: 2}", 4, (2, 1, 2)),
])  # fmt: skip
def test_modes_select_grids_and_layouts(tmp_path, lines, ranks, grid):
    experiment = load_experiment_with_lines(tmp_path, lines)
    experiment.validate(ranks)

    def body(world):
        rank_experiment = load_experiment_with_lines(tmp_path, lines)
        shape = rank_experiment.open_grid(world).shape
        return (shape.replicas, shape.rows, shape.cols), rank_experiment.run(
            rank_experiment.open_grid(world), hooks=[]
        ).history[-1]

    shapes, history = zip(*nd.loopback.run(ranks, body), strict=True)
    assert set(shapes) == {grid}
    serial = load_experiment_with_lines(tmp_path, "").run(nd.ProcessGrid.serial(), hooks=[]).history[-1]
    assert history[0]["train_loss"] == pytest.approx(serial["train_loss"], rel=1e-5)
    assert any(layer.splits_outputs for layer in experiment.model.leaves) == ("vecpar" in lines)


@pytest.mark.parametrize(("lines", "line", "message"), [
    ("dist_mode: halopa", 8, "halopar"),
    ("dist_mode: 3", 8, "dist_mode"),
    ("dist_mode: halopar\ngrid: {replicas: 2}", 8, "grid has replicas: 2"),
    ("dist_mode: datapar\ngrid: {rows: 2}", 8, "grid has rows: 2"),
    ("dist_mode: halodatapar", 8, "with a number of replicas"),
    ("dist_flag: false\ndist_mode: datapar", 9, "requires dist_flag: true"),
])  # fmt: skip
def test_invalid_modes_name_the_line(tmp_path, lines, line, message):
    with pytest.raises(nd.ConfigError) as error:
        load_experiment_with_lines(tmp_path, lines)
    assert str(error.value).startswith(f"{tmp_path / 'e.yaml'}:{line}: ")
    assert message in str(error.value)
