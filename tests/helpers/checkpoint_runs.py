"""Training runs of a model with shared and tiled weights, state and optimizer slots, and their checkpoints."""

import shutil

import neondist as nd
from neondist.comm import loopback
from neondist.io.checkpoint.checksum import add_checksum
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore_checkpoint


def make_layers():
    return [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
        nd.BatchNormLayerDist(),
        nd.LocalFilteringLayerDist(3, 2, bias=True),
        nd.DropoutLayerDist(0.2),
        nd.FCLayerDist(4),
    ]


def make_experiment(epochs=2, seed=1, layers=make_layers, **fields):
    model = nd.ConvnetDist(layers(), optimizer=nd.Adam(0.01), dtype="float64", seed=seed, backend="numpy")
    data = nd.Synthetic((7, 6, 2), classes=4, train=25, test=5)
    return nd.FitExperiment(data, model, batch_size=10, epochs=epochs, **fields)


def start_run(grid, steps=0, **fields):
    """Return a run on a grid after `steps` training steps."""
    experiment = make_experiment(**fields)
    experiment.dataset.open(grid)
    experiment.model.build(experiment.dataset.sample_shape, experiment.batch_size, grid)
    run = TrainState(experiment.model, experiment.dataset, experiment.epochs, experiment.batch_size)
    for _ in range(steps):
        lo, hi = grid.sample_range(10)
        split = experiment.dataset.train
        experiment.model.train_batch(split.images(range(lo, hi), "float64"), split.targets(range(10)), batch_size=10)
    return run


def collect_arrays(run):
    """Return the contents of a checkpoint as full arrays."""
    return {f"model/{k}": v for k, v in run.model.state().items()} | {
        f"optimizer/{k}": v for k, v in run.model.optimizer_state().items()
    }


def save_run(path, ranks=1, grid=None, steps=2, **fields):
    """Write a checkpoint on virtual ranks; return its full arrays."""

    def body(world):
        run = start_run(nd.ProcessGrid(world, **(grid or {})), steps)
        run.history.append({"epoch": 1, "test_error": 0.1})
        Checkpoint(path, **fields).save(run)
        return collect_arrays(run)

    return loopback.run(ranks, body)[0]


def load_run(path, ranks=1, grid=None, **fields):
    """Read a checkpoint on virtual ranks; return the run of rank 0 and the full arrays of every rank."""

    def body(world):
        run = start_run(nd.ProcessGrid(world, **(grid or {})), **fields)
        restore_checkpoint(path, run)
        return run, collect_arrays(run)

    results = loopback.run(ranks, body)
    return results[0][0], [arrays for _, arrays in results]


def forge_checkpoint(path, change):
    """Return a copy of a file that is edited with h5py and has a valid checksum."""
    import h5py

    forged = path.with_name("forged.h5")
    shutil.copy(path, forged)
    with h5py.File(forged, "r+") as file:
        change(file)
    with forged.open("rb+") as file:
        add_checksum(file)
    return forged
