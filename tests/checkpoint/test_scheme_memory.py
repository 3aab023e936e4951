"""Border schemes that remember earlier steps go on, bit for bit, where a run is resumed on the same grid."""

import json

import numpy as np
import pytest
from checkpoint_toys import forged
from elastic_runs import StopAfter

import neondist as nd
from neondist.comm import loopback
from neondist.errors import DataError
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore

SCHEMES = ["stale", "stale(steps=3)", "every(j=4)", "quantised(bits=8, feedback=true)"]
SIZES = [10, 10, 5, 10, 10, 5]
SAMPLES = np.random.default_rng(0).normal(size=(10, 9, 8, 2))


def experiment(scheme):
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
        nd.LCNLayerDist(3),
        nd.ConvLayerDist(2, 2, name="second"),  # its cells go one way, its gradients the other
        nd.FCLayerDist(4),
    ]
    model = nd.ConvnetDist(layers, optimizer=nd.Adam(0.01), scheme=scheme, backend="numpy")
    return nd.FitExperiment(nd.Synthetic((9, 8, 2), classes=4, train=25, test=5), model, batch_size=10)


def begun(scheme, grid):
    made = experiment(scheme)
    made.dataset.open(grid)
    made.model.build((9, 8, 2), 10, grid)
    return TrainState(made.model, made.dataset, 1, 10)


def train(run, sizes):
    """Losses of some steps."""
    model = run.model
    return [model.train_batch(model.scatter(SAMPLES[:n] + n), np.arange(n) % 4, batch_size=n) for n in sizes]


@pytest.mark.parametrize(("scheme", "replicas"), [*((scheme, 1) for scheme in SCHEMES), ("stale", 2)])
@pytest.mark.long
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, scheme, replicas):
    """Stopped after the second step, after one with few samples, and after the first of the second round."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas)
        still, losses = begun(scheme, grid), []
        for step, size in enumerate(SIZES):
            if step in (2, 3, 4):
                Checkpoint(tmp_path / f"{step}.h5").save(still)
            losses += train(still, [size])
        for step in (2, 3, 4):
            resumed = begun(scheme, grid)
            restore(tmp_path / f"{step}.h5", resumed)
            if step == 3:  # new buffers and messages
                nd.DebugHalo().guard(resumed.model)
            assert resumed.notes == []
            assert train(resumed, SIZES[step:]) == losses[step:]
            for name, array in still.model.state().items():
                np.testing.assert_array_equal(resumed.model.state()[name], array, err_msg=name)

    loopback.run(4, body)


def test_nothing_is_under_way_when_a_run_is_over():
    """What arrives later would be written to where a buffer has been."""

    def body(world):
        made = experiment("stale(steps=3)")
        made.run(nd.ProcessGrid(world), hooks=[])
        exchanges = [e for layer in made.model.leaves for array in layer.arrays for _, e in array.recorded]
        return len(exchanges), any(exchange.under_way for exchange in exchanges)

    for count, under_way in loopback.run(4, body):
        assert count
        assert not under_way


def test_pretraining_goes_on_too(tmp_path):
    def run(folder, hooks, resume=False):
        def body(world):
            layers = [nd.LocalFilteringLayerDist(3, 3), nd.L2PoolingLayerDist(2, 1), nd.FCLayerDist(4)]
            model = nd.GBDist(layers, num_pretrain_epochs=1, scheme="stale", backend="numpy")
            data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=5)
            made = nd.FitExperiment(data, model, batch_size=10)
            history = made.run(nd.ProcessGrid(world), output=folder, resume=resume, hooks=hooks()).history
            return [(record["test_loss"], record["bytes_sent"]) for record in history], model.state()

        return loopback.run(2, body)[0]

    expected, weights = run(None, list)
    run(tmp_path, lambda: [StopAfter(2)])
    found, state = run(tmp_path, list, resume=True)
    assert found == expected  # what was under way travels again, but is not counted again
    for name, array in weights.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of two ranks after two steps, by scheme."""
    folder = tmp_path_factory.mktemp("written")
    for scheme in ("stale", "halo"):

        def body(world, scheme=scheme):
            run = begun(scheme, nd.ProcessGrid(world))
            train(run, SIZES[:2])
            Checkpoint(folder / f"{scheme}.h5").save(run)

        loopback.run(2, body)
    return folder


def notes(path, ranks, scheme="stale"):
    def body(world):
        run = begun(scheme, nd.ProcessGrid(world))
        restore(path, run)
        return run.notes

    return loopback.run(ranks, body)[0]


def test_on_another_grid_they_begin_anew_and_say_so(written):
    assert notes(written / "stale.h5", 1) == [
        "border schemes discard the cells of earlier steps: the checkpoint is of 2 x 1 tiles, 1 replicas, batches"
        " of 10,"
        " scheme stale, this run has 1 x 1 tiles, 1 replicas, batches of 10, scheme stale"
    ]
    assert "scheme halo" in notes(written / "stale.h5", 2, "halo")[0]


def test_exact_schemes_remember_nothing(written):
    import h5py

    with h5py.File(written / "halo.h5") as file:
        assert not {"borders", "remembered"} & file.keys()
    assert notes(written / "halo.h5", 2) == []


HARMS = {
    "no layers": lambda told: told.pop("layers"),
    "a layer that is not there": lambda told: told["layers"].update(other=told["layers"].pop("conv1")),
    "fewer ranks": lambda told: told["layers"]["conv1"].pop(),
    "other arrays": lambda told: told["layers"]["conv1"][0][0].__setitem__(0, 7),
    "other batches": lambda told: told["layers"]["conv1"][0][0].__setitem__(1, 3),
    "none at all": lambda told: told["layers"]["conv1"][0][0].__setitem__(3, 0),
    "words": lambda told: told["layers"]["conv1"][0][0].__setitem__(4, "many"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_cannot_be_is_refused(written, harm):
    def change(file):
        told = json.loads(file["remembered"][()])
        HARMS[harm](told)
        del file["remembered"]
        file["remembered"] = np.bytes_(json.dumps(told))

    with pytest.raises(DataError, match=r"forged\.h5: (has invalid data|the saved state of border schemes)"):
        notes(forged(written / "stale.h5", change), 2)
