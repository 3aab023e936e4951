"""Every collective call of models and arrays is compared before it waits for other ranks."""

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
AS_OTHERS = {"forward", "judged", "gather", "gather_input", "total", "remember", "renew_buffers", "trial_batch"}
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


FILES = {"the checkpoint": 0, "the source": 1, "the target": 2, "the labels": 2}
OF_FILES = {
    "predict": (nd.train.predict, ["the checkpoint", "the source", "the target"]),
    "evaluate": (nd.train.evaluate_files, ["the checkpoint", "the source", "the labels"]),
}


@pytest.mark.parametrize(("call", "what"), [(call, what) for call in OF_FILES for what in OF_FILES[call][1]])
def test_other_files_on_a_rank(call, what):
    def body(world):
        s, files = begin(world), ["a.h5", "b.npy", "c.npy"]
        files[FILES[what]] = f"{world.rank}.npy"
        OF_FILES[call][0](s.experiment, *files, s.grid)

    with pytest.raises(nd.ConfigError, match=f"rank 1: {what} is 1.npy, but 0.npy on rank 0"):
        nd.loopback.run(2, body)


@pytest.mark.parametrize(("what", "values"), [("output", ["a", "b"]), ("resume", [False, "auto"])])
def test_another_run_on_a_rank(what, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body(world):
        s = begin(world)
        s.experiment.run(s.grid, **{"output": "a"} | {what: values[world.rank]})

    with pytest.raises(nd.ConfigError, match=f"rank 1: {what} is {values[1]}, but {values[0]} on rank 0"):
        nd.loopback.run(2, body)
    assert not list(tmp_path.iterdir())


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
