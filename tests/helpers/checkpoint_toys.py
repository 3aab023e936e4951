"""A run whose model has shared and tiled weights, state and slots, and its checkpoint."""

import shutil

import neondist as nd
from neondist.comm import loopback
from neondist.io.checkpoint.checksum import add_checksum
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore


def layers():
    return [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
        nd.BatchNormLayerDist(),
        nd.LocalFilteringLayerDist(3, 2, bias=True),
        nd.DropoutLayerDist(0.2),
        nd.FCLayerDist(4),
    ]


def experiment(epochs=2, seed=1, layers=layers, **fields):
    model = nd.ConvnetDist(layers(), optimizer=nd.Adam(0.01), dtype="float64", seed=seed, backend="numpy")
    data = nd.Synthetic((7, 6, 2), classes=4, train=25, test=5)
    return nd.FitExperiment(data, model, batch_size=10, epochs=epochs, **fields)


def begun(grid, steps=0, **fields):
    """A run on a grid, with so many steps done."""
    made = experiment(**fields)
    made.dataset.open(grid)
    made.model.build(made.dataset.sample_shape, made.batch_size, grid)
    run = TrainState(made.model, made.dataset, made.epochs, made.batch_size)
    for _ in range(steps):
        lo, hi = grid.sample_range(10)
        split = made.dataset.train
        made.model.train_batch(split.images(range(lo, hi), "float64"), split.targets(range(10)), batch_size=10)
    return run


def arrays(run):
    """All that a checkpoint holds, as whole arrays."""
    return {f"model/{k}": v for k, v in run.model.state().items()} | {
        f"optimizer/{k}": v for k, v in run.model.optimizer_state().items()
    }


def save(path, ranks=1, grid=None, steps=2, **fields):
    """Write a checkpoint on virtual ranks; return the whole arrays."""

    def body(world):
        run = begun(nd.ProcessGrid(world, **(grid or {})), steps)
        run.history.append({"epoch": 1, "test_error": 0.1})
        Checkpoint(path, **fields).save(run)
        return arrays(run)

    return loopback.run(ranks, body)[0]


def load(path, ranks=1, grid=None, **fields):
    """Read a checkpoint on virtual ranks; return the run of the first, and every rank's whole arrays."""

    def body(world):
        run = begun(nd.ProcessGrid(world, **(grid or {})), **fields)
        restore(path, run)
        return run, arrays(run)

    found = loopback.run(ranks, body)
    return found[0][0], [each for _, each in found]


def forged(path, change):
    """Change a file with h5py, as somebody might, and give it a right checksum."""
    import h5py

    other = path.with_name("forged.h5")
    shutil.copy(path, other)
    with h5py.File(other, "r+") as file:
        change(file)
    with other.open("rb+") as file:
        add_checksum(file)
    return other
