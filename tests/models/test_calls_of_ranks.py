"""Every collective call of models and arrays is compared before it waits for other ranks."""

from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
from parting import check_leaving, methods, refused_pairs

import neondist as nd

IMAGES = np.random.default_rng(0).random((2, 6, 6, 1), np.float32)
LABELS = np.array([0, 1])
COLLECTIVE = {
    "GlobalArray.get_fprop_view": ("get_fprop_view", lambda s: s.array.get_fprop_view(s.tile)),
    "GlobalArray.get_bprop_view": ("get_bprop_view", lambda s: s.array.get_bprop_view(s.view)),
    "GlobalArray.gather": ("gather", lambda s: s.array.gather(s.tile)),
    "GlobalArray.redistribute": ("redistribute", lambda s: s.array.redistribute(s.tile, s.array)),
    "Model.fprop": ("forward", lambda s: s.model.fprop(s.tile)),
    "Model.bprop": ("backward", lambda s: s.run.backward(s.dy)),
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
AS_OTHERS = {"forward", "evaluate_batch", "gather", "gather_input", "total", "remember", "renew_buffers", "trial_batch"}
"""those that only make others, and what passes and costs call between them"""
LOCAL = {
    "scatter", "scatter_output", "local_targets", "load_state", "load_optimizer_state", "kept_arrays", "plan", "build",
    "execute", "cut", "take", "owned", "buffer", "settle", "remembered", "check_tile", "batch_stats", "ledger", "place",
}  # fmt: skip
CALLS = dict(COLLECTIVE.values())


def begin(world):
    """A built model, its tile, and what its calls need."""
    grid = nd.ProcessGrid(world)
    layers = [nd.ConvLayerDist(2, kernel_size=3, padding=1), nd.FCLayerDist(2)]
    model = nd.ConvnetDist(layers, optimizer=nd.SGD(learning_rate=0.1))
    model.build(IMAGES.shape[1:], 2, grid)
    array = nd.GlobalArray(grid, IMAGES.shape, nd.Window(3, padding=1))
    tile = array.scatter(IMAGES)
    run = model.forward(tile)
    dataset = nd.Synthetic(shape=[6, 6, 1], classes=2, train=4, test=2)
    experiment = nd.FitExperiment(dataset, model, batch_size=2, epochs=1)
    from neondist.train.inference.predict import predict

    return SimpleNamespace(
        world=world, grid=grid, model=model, array=array, tile=tile, run=run, dy=np.ones_like(run.output),
        view=np.zeros(array.view_shape, np.float32), dataset=dataset, experiment=experiment,
        predict=lambda: predict(experiment, "none.h5", "none.npy", "none.npy", grid),
    )  # fmt: skip


def test_the_table_has_every_public_method():
    told = {name.split(".")[-1] for name in COLLECTIVE} | AS_OTHERS | LOCAL
    assert methods(nd.GlobalArray) | methods(nd.Model) <= told


def test_all_pairs_of_calls():
    assert not refused_pairs(begin, CALLS)


def test_a_rank_that_leaves():
    check_leaving(begin, CALLS)


PLACES = {"experiment": None, "checkpoint": "a.h5", "source": "b.npy", "target": "c.npy", "labels": "c.npy"}
READ = dict.fromkeys(("checkpoint", "source"), ("0.npy", "1.npy")) | {"block": (None, 4)}
OF_FILES = {
    nd.train.predict: READ | {"target": ("0.npy", "1.npy"), "overwrite": (False, True), "classes": (False, True),
                              "probabilities": (False, True), "steps": (None, 2)},
    nd.train.evaluate_files: READ | {"labels": ("0.npy", "1.npy"), "samples": (None, {})},
    nd.train.evaluate_checkpoint: {"checkpoint": ("0.npy", "1.npy"), "split": (None, "train"), "pictures": (None, {})},
}  # fmt: skip
SAID = {"classes": "outputs", "probabilities": "outputs", "steps": "outputs"}


@pytest.mark.parametrize(
    ("call", "what"), [(call, what) for call, cases in OF_FILES.items() for what in cases],
    ids=lambda of: getattr(of, "__name__", of),
)  # fmt: skip
def test_other_arguments_on_a_rank(call, what):
    def body(world):
        s = begin(world)
        given = {name: value for name, value in PLACES.items() if name in signature(call).parameters}
        call(**given | {"experiment": s.experiment, "grid": s.grid, what: OF_FILES[call][what][world.rank]})

    with pytest.raises(nd.ConfigError, match=f"rank 1: (the )?{SAID.get(what, what)} is .*on rank 0"):
        nd.loopback.run(2, body, timeout=30.0)


def test_every_argument_of_calls_on_files_is_in_the_table():
    for call, cases in OF_FILES.items():
        assert signature(call).parameters.keys() - {"experiment", "grid", "raw"} == cases.keys()  # raw is the default


@pytest.mark.parametrize(
    ("what", "values"), [("output", ["a", "b"]), ("resume", [False, "auto"]), ("snapshot", [None, 3])]
)
def test_another_run_on_a_rank(what, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body(world):
        s = begin(world)
        s.experiment.run(s.grid, **{"output": "a"} | {what: values[world.rank]})

    with pytest.raises(nd.ConfigError, match=f"rank 1: {what} is {values[1]}, but {values[0]} on rank 0"):
        nd.loopback.run(2, body)
    assert not list(tmp_path.iterdir())


def trained(world, layers=None, given=0.0, cost=None, input_shape=(6, 6, 1), rate=0.1, **how):
    """Train one that is so."""
    grid = nd.ProcessGrid(world)
    model = nd.ConvnetDist(layers or [nd.FCLayerDist(2)], cost=cost, optimizer=nd.SGD(learning_rate=rate), **how)
    model.build(input_shape, 2, grid)
    state = model.state()
    if given:
        model.load_state({name: array + given * world.rank for name, array in state.items()})
    x = np.resize(IMAGES, (2, *input_shape))
    model.train_batch(model.scatter(x), LABELS)


def fitted(world, **how):
    s = begin(world)
    s.dataset.open(s.grid)
    nd.fit(s.model, s.dataset, **{"batch_size": 2} | how)


def opened(world, augment=(), **how):
    data = nd.Synthetic(**{"shape": [6, 6, 1], "classes": 2, "train": 4, "test": 2} | how)
    data.open(nd.ProcessGrid(world), augment=augment)


def of_dropout(share):
    return [nd.DropoutLayerDist(share), nd.FCLayerDist(2)]


OTHERS = {
    "the optimizer is SGD learning_rate: 1.5": (trained, "rate", [0.1, 1.5]),
    "the seed is 2": (trained, "seed", [1, 2]),
    "the dtype is float64": (trained, "dtype", ["float32", "float64"]),
    "the cost is SumSquared": (trained, "cost", [None, nd.SumSquared()]),
    "the 'fc1' is FCLayerDist": (trained, "input_shape", [(6, 6, 1), (6, 6, 2)]),
    "the 'dropout1' is .*0.5": (trained, "layers", [of_dropout(0.25), of_dropout(0.5)]),
    "the checksum of the weights is": (trained, "given", [1.0, 1.0]),
    "epochs is 2": (fitted, "epochs", [1, 2]),
    "seed is 2": (fitted, "seed", [1, 2]),
    r"metrics is \[\]": (fitted, "metrics", [None, []]),
    "the data set is Synthetic .*seed: 1": (opened, "seed", [0, 1]),
    r"the augmentation is \[": (opened, "augment", [(), [nd.Flip()]]),
}


@pytest.mark.parametrize("said", OTHERS)
def test_another_model_or_data_set_on_a_rank(said):
    call, what, values = OTHERS[said]

    with pytest.raises(nd.ConfigError, match=f"rank 1: {said}.*on rank 0"):
        nd.loopback.run(2, lambda world: call(world, **{what: values[world.rank]}), timeout=30.0)


@pytest.mark.parametrize("what", ["images", "targets"])
def test_other_arrays_on_a_rank(what):
    def body(world):
        grid = nd.ProcessGrid(world, replicas=2 if what == "targets" else 1)
        model = nd.ConvnetDist([nd.FCLayerDist(2)], optimizer=nd.SGD(learning_rate=0.1))
        model.build(IMAGES.shape[1:], 2, grid)
        odd = grid.rank == 1
        x = model.scatter(IMAGES[::-1] if odd and what == "images" else IMAGES)
        for targets in (LABELS, LABELS[::-1] if odd and what == "targets" else LABELS):
            model.train_batch(x, targets)

    given = "the array given to scatter" if what == "images" else "the targets passed to train_batch"
    with pytest.raises(nd.ConfigError, match=f"rank 1: {given} is of checksum .*, but .* on rank 0"):
        nd.loopback.run(2, body)
