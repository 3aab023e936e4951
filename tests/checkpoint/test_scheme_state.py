"""Border schemes with memory: bit for bit resumption on the same grid."""

import json

import numpy as np
import pytest
from checkpoint_runs import forge_checkpoint
from elastic_runs import StepLimit

import neondist as nd
from neondist.comm import loopback
from neondist.errors import DataError
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore_checkpoint

SCHEMES = ["stale", "stale(steps=3)", "every(j=4)", "quantised(bits=8, feedback=true)"]
SIZES = [10, 10, 5, 10, 10, 5]
SAMPLES = np.random.default_rng(0).normal(size=(10, 9, 8, 2))


def make_experiment(scheme):
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
        nd.LCNLayerDist(3),
        nd.ConvLayerDist(2, 2, name="second"),  # sends cells in one direction, gradients in the other
        nd.FCLayerDist(4),
    ]
    model = nd.ConvnetDist(layers, optimizer=nd.Adam(0.01), scheme=scheme, backend="numpy")
    return nd.FitExperiment(nd.Synthetic((9, 8, 2), classes=4, train=25, test=5), model, batch_size=10)


def start_run(scheme, grid):
    experiment = make_experiment(scheme)
    experiment.dataset.open(grid)
    experiment.model.build((9, 8, 2), 10, grid)
    return TrainState(experiment.model, experiment.dataset, 1, 10)


def train(run, sizes):
    """Train for some steps; return their losses."""
    model = run.model
    return [model.train_batch(model.scatter(SAMPLES[:n] + n), np.arange(n) % 4, batch_size=n) for n in sizes]


@pytest.mark.parametrize(("scheme", "replicas"), [*((scheme, 1) for scheme in SCHEMES), ("stale", 2)])
@pytest.mark.long
def test_resumed_run_is_bit_identical(tmp_path, scheme, replicas):
    """Stops after the second step, after a small batch, and after the first batch of the second round."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas)
        uninterrupted, losses = start_run(scheme, grid), []
        for step, size in enumerate(SIZES):
            if step in (2, 3, 4):
                Checkpoint(tmp_path / f"{step}.h5").save(uninterrupted)
            losses += train(uninterrupted, [size])
        for step in (2, 3, 4):
            resumed = start_run(scheme, grid)
            restore_checkpoint(tmp_path / f"{step}.h5", resumed)
            if step == 3:  # new buffers and messages
                nd.DebugHalo().guard(resumed.model)
            assert resumed.start_messages == []
            assert train(resumed, SIZES[step:]) == losses[step:]
            for name, array in uninterrupted.model.state().items():
                np.testing.assert_array_equal(resumed.model.state()[name], array, err_msg=name)

    loopback.run(4, body)


def test_no_exchange_is_pending_after_a_run():
    """A later arrival would be written into a released buffer."""

    def body(world):
        experiment = make_experiment("stale(steps=3)")
        experiment.run(nd.ProcessGrid(world), hooks=[])
        exchanges = [
            exchange
            for layer in experiment.model.leaves
            for array in layer.arrays
            for _, exchange in array.recorded_exchanges
        ]
        return len(exchanges), any(exchange.is_running for exchange in exchanges)

    for count, pending in loopback.run(4, body):
        assert count
        assert not pending


def test_pretraining_resumes(tmp_path):
    def train_gb(folder, hooks, resume=False):
        def body(world):
            layers = [nd.LocalFilteringLayerDist(3, 3), nd.L2PoolingLayerDist(2, 1), nd.FCLayerDist(4)]
            model = nd.GBDist(layers, num_pretrain_epochs=1, scheme="stale", backend="numpy")
            data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=5)
            experiment = nd.FitExperiment(data, model, batch_size=10)
            history = experiment.run(nd.ProcessGrid(world), output=folder, resume=resume, hooks=hooks()).history
            return [(record["test_loss"], record["bytes_sent"]) for record in history], model.state()

        return loopback.run(2, body)[0]

    expected, weights = train_gb(None, list)
    train_gb(tmp_path, lambda: [StepLimit(2)])
    actual, state = train_gb(tmp_path, list, resume=True)
    assert actual == expected  # pending messages are sent again, but not counted again
    for name, array in weights.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of two ranks after two steps, by scheme."""
    folder = tmp_path_factory.mktemp("written")
    for scheme in ("stale", "halo"):

        def body(world, scheme=scheme):
            run = start_run(scheme, nd.ProcessGrid(world))
            train(run, SIZES[:2])
            Checkpoint(folder / f"{scheme}.h5").save(run)

        loopback.run(2, body)
    return folder


def read_notes(path, ranks, scheme="stale"):
    def body(world):
        run = start_run(scheme, nd.ProcessGrid(world))
        restore_checkpoint(path, run)
        return run.start_messages

    return loopback.run(ranks, body)[0]


def test_memory_is_discarded_on_another_grid(checkpoints):
    assert read_notes(checkpoints / "stale.h5", 1) == [
        "border schemes start without the cells of earlier steps, since the checkpoint was written with 2 x 1 tiles,"
        " 1 replica, batches of 10,"
        " scheme stale, but this run has 1 x 1 tiles, 1 replica, batches of 10, scheme stale"
    ]
    assert "scheme halo" in read_notes(checkpoints / "stale.h5", 2, "halo")[0]


def test_exact_schemes_have_no_memory(checkpoints):
    import h5py

    with h5py.File(checkpoints / "halo.h5") as file:
        assert not {"borders", "scheme_state"} & file.keys()
    assert read_notes(checkpoints / "halo.h5", 2) == []


ALTERATIONS = {
    "missing layers": lambda memory: memory.pop("layers"),
    "unknown layer": lambda memory: memory["layers"].update(other=memory["layers"].pop("conv1")),
    "fewer ranks": lambda memory: memory["layers"]["conv1"].pop(),
    "other arrays": lambda memory: memory["layers"]["conv1"][0][0].__setitem__(0, 7),
    "other batches": lambda memory: memory["layers"]["conv1"][0][0].__setitem__(1, 3),
    "no arrays": lambda memory: memory["layers"]["conv1"][0][0].__setitem__(3, 0),
    "text": lambda memory: memory["layers"]["conv1"][0][0].__setitem__(4, "text"),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_invalid_memory_is_rejected(checkpoints, name):
    def alter(file):
        memory = json.loads(file["scheme_state"][()])
        ALTERATIONS[name](memory)
        del file["scheme_state"]
        file["scheme_state"] = np.bytes_(json.dumps(memory))

    with pytest.raises(DataError, match=r"forged\.h5: (has invalid data|its border schemes do not match)"):
        read_notes(forge_checkpoint(checkpoints / "stale.h5", alter), 2)
