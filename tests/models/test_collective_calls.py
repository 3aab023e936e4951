"""Collective calls of models and arrays are compared across ranks before any rank waits."""

from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
from mismatched_calls import check_early_exit, find_undetected_pairs, list_public_methods

import neondist as nd

IMAGES = np.random.default_rng(0).random((2, 6, 6, 1), np.float32)
LABELS = np.array([0, 1])
COLLECTIVE_CALLS = {
    "GlobalArray.get_fprop_view": ("get_fprop_view", lambda s: s.array.get_fprop_view(s.tile)),
    "GlobalArray.get_bprop_view": ("get_bprop_view", lambda s: s.array.get_bprop_view(s.view)),
    "GlobalArray.gather": ("gather", lambda s: s.array.gather(s.tile)),
    "GlobalArray.redistribute": ("redistribute", lambda s: s.array.redistribute(s.tile, s.array)),
    "Model.fprop": ("forward", lambda s: s.model.fprop(s.tile)),
    "Model.bprop": ("backward", lambda s: s.run.backward(s.dy)),
    "Model.update": ("update", lambda s: s.model.update()),
    "Model.train_batch": ("train_batch", lambda s: s.model.train_batch(s.tile, LABELS)),
    "Model.state": ("state", lambda s: s.model.state()),
    "Model.gradients": ("gradients", lambda s: s.model.gradients()),
    "Model.optimizer_state": ("optimizer_state", lambda s: s.model.optimizer_state()),
    "ProcessGrid": ("ProcessGrid", lambda s: nd.ProcessGrid(s.world, rows=1)),
    "Dataset.open": ("open", lambda s: s.dataset.open(s.grid)),
    "fit": ("fit", lambda s: nd.fit(s.model, s.dataset, batch_size=2)),
    "pretrain": ("pretrain", lambda s: nd.pretrain(s.model, s.dataset)),
    "FitExperiment.run": ("run", lambda s: s.experiment.run(s.grid)),
    "nd.train.predict": ("predict", lambda s: s.predict()),
}
NESTED_METHODS = {
    "forward",
    "evaluate_batch",
    "gather",
    "gather_input",
    "sum_over_ranks",
    "restore_scheme_state",
    "renew_buffers",
    "timing_batch",
}
"""methods that only call others, and calls made by passes and costs"""
LOCAL_METHODS = {
    "scatter", "scatter_output", "local_targets", "load_state", "load_optimizer_state", "checkpoint_arrays", "plan",
    "build", "configure_execution", "repartition", "set_halo_plan", "owned_part", "buffer", "wait_for_messages",
    "scheme_state", "check_tile_shape", "batch_stats", "ledger", "restrict_cost_to_local_cells",
}  # fmt: skip
CALLS_BY_REPORTED_NAME = dict(COLLECTIVE_CALLS.values())


def build_call_subjects(world):
    """Return a built model, its tile, and the arguments of its calls."""
    grid = nd.ProcessGrid(world)
    layers = [nd.ConvLayerDist(2, kernel_size=3, padding=1), nd.FCLayerDist(2)]
    model = nd.ConvnetDist(layers, optimizer=nd.SGD(learning_rate=0.1))
    model.build(IMAGES.shape[1:], 2, grid)
    array = nd.GlobalArray(grid, IMAGES.shape, nd.Window(3, padding=1))
    tile = array.scatter(IMAGES)
    run = model.forward(tile)
    run.backward(np.ones_like(run.output))
    dataset = nd.Synthetic(shape=[6, 6, 1], classes=2, train=4, test=2)
    experiment = nd.FitExperiment(dataset, model, batch_size=2, epochs=1)
    from neondist.train.inference.predict import predict

    return SimpleNamespace(
        world=world, grid=grid, model=model, array=array, tile=tile, run=run, dy=np.ones_like(run.output),
        view=np.zeros(array.view_shape, np.float32), dataset=dataset, experiment=experiment,
        predict=lambda: predict(experiment, "none.h5", "none.npy", "none.npy", grid),
    )  # fmt: skip


def test_table_covers_every_public_method():
    listed = {name.split(".")[-1] for name in COLLECTIVE_CALLS} | NESTED_METHODS | LOCAL_METHODS
    assert list_public_methods(nd.GlobalArray) | list_public_methods(nd.Model) <= listed


def test_mismatched_calls_are_detected():
    assert not find_undetected_pairs(build_call_subjects, CALLS_BY_REPORTED_NAME)


def test_early_exit_is_detected():
    check_early_exit(build_call_subjects, CALLS_BY_REPORTED_NAME)


FILE_PATHS = {"experiment": None, "checkpoint": "a.h5", "source": "b.npy", "target": "c.npy", "labels": "c.npy"}
READ_CASES = dict.fromkeys(("checkpoint", "source"), ("0.npy", "1.npy")) | {"block": (None, 4)}
FILE_CALL_ARGUMENT_VALUES = {
    nd.train.predict: READ_CASES | {"target": ("0.npy", "1.npy"), "overwrite": (False, True), "classes": (False, True),
                              "probabilities": (False, True), "steps": (None, 2), "axes": (None, "YXC")},
    nd.train.evaluate_files: READ_CASES | {"labels": ("0.npy", "1.npy"), "samples": (None, {}), "axes": (None, "YXC")},
    nd.train.evaluate_checkpoint: {"checkpoint": ("0.npy", "1.npy"), "split": (None, "train"), "pictures": (None, {})},
}  # fmt: skip
REPORTED_ARGUMENT_NAMES = dict.fromkeys(("classes", "probabilities", "steps"), "list of outputs")


@pytest.mark.parametrize(
    ("call", "argument"), [(call, argument) for call, cases in FILE_CALL_ARGUMENT_VALUES.items() for argument in cases],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_different_arguments_are_rejected(call, argument):
    def body(world):
        state = build_call_subjects(world)
        arguments = {name: value for name, value in FILE_PATHS.items() if name in signature(call).parameters}
        call(
            **arguments
            | {
                "experiment": state.experiment,
                "grid": state.grid,
                argument: FILE_CALL_ARGUMENT_VALUES[call][argument][world.rank],
            }
        )

    with pytest.raises(
        nd.ConfigError, match=f"rank 1: (the )?{REPORTED_ARGUMENT_NAMES.get(argument, argument)} is .*on rank 0"
    ):
        nd.loopback.run(2, body, timeout=30.0)


def test_table_covers_every_argument_of_file_calls():
    for call, cases in FILE_CALL_ARGUMENT_VALUES.items():
        assert signature(call).parameters.keys() - {"experiment", "grid", "raw"} == cases.keys()  # raw is the default


@pytest.mark.parametrize(
    ("argument", "values"), [("output", ["a", "b"]), ("resume", [False, "auto"]), ("snapshot", [None, 3])]
)
def test_different_runs_are_rejected(argument, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body(world):
        state = build_call_subjects(world)
        state.experiment.run(state.grid, **{"output": "a"} | {argument: values[world.rank]})

    with pytest.raises(nd.ConfigError, match=f"rank 1: {argument} is {values[1]}, but {values[0]} on rank 0"):
        nd.loopback.run(2, body)
    assert not list(tmp_path.iterdir())


def train_model(world, layers=None, weight_offset=0.0, cost=None, input_shape=(6, 6, 1), rate=0.1, **options):
    """Train a model with the given options."""
    grid = nd.ProcessGrid(world)
    model = nd.ConvnetDist(layers or [nd.FCLayerDist(2)], cost=cost, optimizer=nd.SGD(learning_rate=rate), **options)
    model.build(input_shape, 2, grid)
    weights = model.state()
    if weight_offset:
        model.load_state({name: array + weight_offset * world.rank for name, array in weights.items()})
    x = np.resize(IMAGES, (2, *input_shape))
    model.train_batch(model.scatter(x), LABELS)


def fit_model(world, **options):
    state = build_call_subjects(world)
    state.dataset.open(state.grid)
    nd.fit(state.model, state.dataset, **{"batch_size": 2} | options)


def open_dataset(world, augment=(), **options):
    data = nd.Synthetic(**{"shape": [6, 6, 1], "classes": 2, "train": 4, "test": 2} | options)
    data.open(nd.ProcessGrid(world), augment=augment)


def make_dropout_layers(rate):
    return [nd.DropoutLayerDist(rate), nd.FCLayerDist(2)]


def make_sum_layers(elements):
    class SumDist(nd.Dist, nd.Layer):
        def reductions_for(self, input_shape):
            return [nd.Reduction("forward", "world", fixed_elements=elements)]

        def reduce(self, ctx, view):
            return None

        def forward(self, ctx, view):
            return view * 1

        def backward(self, ctx, dy):
            return dy

    return [SumDist(), nd.FCLayerDist(2)]


CALLS_WITH_DIFFERENCES_BY_MESSAGE = {
    "the optimizer is SGD learning_rate: 1.5": (train_model, "rate", [0.1, 1.5]),
    "the seed is 2": (train_model, "seed", [1, 2]),
    "the dtype is float64": (train_model, "dtype", ["float32", "float64"]),
    "the cost is SumSquared": (train_model, "cost", [None, nd.SumSquared()]),
    "the 'fc1' is FCLayerDist": (train_model, "input_shape", [(6, 6, 1), (6, 6, 2)]),
    "the 'dropout1' is .*0.5": (train_model, "layers", [make_dropout_layers(0.25), make_dropout_layers(0.5)]),
    "the 'sum1' is .*'world', 0, 2,": (train_model, "layers", [make_sum_layers(1), make_sum_layers(2)]),
    "the initial or loaded 'fc1/bias' is of checksum": (train_model, "weight_offset", [1.0, 1.0]),
    "epochs is 2": (fit_model, "epochs", [1, 2]),
    "seed is 2": (fit_model, "seed", [1, 2]),
    r"metrics is \[\]": (fit_model, "metrics", [None, []]),
    "the data set is Synthetic .*seed: 1": (open_dataset, "seed", [0, 1]),
    r"the augmentation is \[": (open_dataset, "augment", [(), [nd.Flip()]]),
}


@pytest.mark.parametrize("message", CALLS_WITH_DIFFERENCES_BY_MESSAGE)
def test_different_models_and_data_sets_are_rejected(message):
    call, argument, values = CALLS_WITH_DIFFERENCES_BY_MESSAGE[message]

    with pytest.raises(nd.ConfigError, match=f"rank 1: {message}.*on rank 0"):
        nd.loopback.run(2, lambda world: call(world, **{argument: values[world.rank]}), timeout=30.0)


@pytest.mark.parametrize("kind", ["images", "targets"])
def test_different_arrays_are_rejected(kind):
    def body(world):
        grid = nd.ProcessGrid(world, replicas=2 if kind == "targets" else 1)
        model = nd.ConvnetDist([nd.FCLayerDist(2)], optimizer=nd.SGD(learning_rate=0.1))
        model.build(IMAGES.shape[1:], 2, grid)
        differs = grid.rank == 1
        x = model.scatter(IMAGES[::-1] if differs and kind == "images" else IMAGES)
        for targets in (LABELS, LABELS[::-1] if differs and kind == "targets" else LABELS):
            model.train_batch(x, targets)

    description = "the array given to scatter" if kind == "images" else "the array of targets passed to train_batch"
    with pytest.raises(nd.ConfigError, match=f"rank 1: {description} is of checksum .*, but .* on rank 0"):
        nd.loopback.run(2, body)


@pytest.mark.parametrize("strategy", ["AllReduce", "ShardedOptimizer"])
def test_initial_weights_are_compared(strategy):
    """An initialiser without a fixed seed would train a different network on each rank."""

    class Unseeded(nd.Initializer):
        def values(self, stream_key, indices, fan_in, fan_out):
            return np.random.default_rng().normal(size=indices.shape)

    def job(comm):
        layers = [nd.ConvLayerDist(2, 3, weights_init=Unseeded(), name="mine"), nd.FCLayerDist(2)]
        data = nd.Synthetic(shape=(8, 6, 1), classes=2, train=4, test=2)
        nd.FitExperiment(data, nd.ConvnetDist(layers, strategy=strategy), batch_size=2).run(nd.ProcessGrid(comm))

    with pytest.raises(nd.ConfigError, match="rank 1: the initial or loaded 'mine/weights' is of checksum"):
        nd.loopback.run(2, job)
