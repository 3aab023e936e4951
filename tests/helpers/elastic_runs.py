"""Runs that move from one number of ranks to another; as a script, one stretch of each, on the ranks of mpirun.

mpirun -n 4 python elastic_runs.py FOLDER NUMBER_OF_STRETCH
"""

import json
import sys
from pathlib import Path

import numpy as np

import neondist as nd
from neondist.comm import loopback, mpi
from neondist.train import Stop

TIMES = ("seconds", "samples_per_second", "bytes_sent", "bytes_summed")
PLACES = [(4, {}), (6, {"rows": 3}), (1, {}), (4, {"replicas": 2})]
STRATEGIES = ["ShardedOptimizer", "PSLoadBalancing", "PartitionedPS", "Parallax"]  # of the stretches
STEPS = {"everything": [2, 2, 3], "autoencoder": [2, 5, 7]}  # of the stretches but the last; all end inside epochs


class StopAfter(nd.Hook):
    """Stops after so many steps of whatever is trained."""

    joins_pretraining = True

    def __init__(self, steps):
        self.left = steps

    def after_step(self, run):
        self.left -= 1
        if not self.left:
            run.stop = Stop("the node is wanted")


def everything():
    return nd.ConvnetDist(
        [
            nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
            nd.BatchNormLayerDist(),
            nd.LocalFilteringLayerDist(3, 2),
            nd.DropoutLayerDist(0.2),
            nd.FCLayerDist(4),
        ],
        optimizer=nd.Adam(0.01, schedule=nd.CosineDecay(4)),
        dtype="float64",
        backend="numpy",
    )


def autoencoder():
    return nd.GBDist(
        [
            nd.LocalFilteringLayerDist(3, 3),
            nd.L2PoolingLayerDist(2, 1),
            nd.LCNLayerDist(3),
            nd.LocalFilteringLayerDist(2, 2),
            nd.FCLayerDist(4),
        ],
        optimizer=nd.SGD(0.05, momentum=0.9),
        num_pretrain_epochs=2,
        dtype="float64",
        backend="numpy",
    )


def train(kind, world, folder, grid, strategy=None, **arguments):
    """Run an experiment as it stands; return its result and whole arrays."""
    data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=7)
    model = {"everything": everything, "autoencoder": autoencoder}[kind]()
    how = {"batch_size": 10, "epochs": 3, "grid": grid, "checkpoint": {"every_epochs": 100}, "strategy": strategy}
    made = nd.FitExperiment(data, model, **how)
    return made.run(nd.ProcessGrid(world, **grid), output=folder, **{"hooks": []} | arguments), model.state()


def stay(kind, folder):
    """Run on four virtual ranks throughout; return the whole arrays."""
    return loopback.run(4, lambda world: train(kind, world, folder, {})[1])[0]


def stretch(kind, at, world, folder):
    """Go on where the stretch before has stopped; return the whole arrays."""
    stops = STEPS[kind][at : at + 1]
    hooks = [StopAfter(steps) for steps in stops]
    result, state = train(kind, world, folder, PLACES[at][1], STRATEGIES[at], resume=at > 0, hooks=hooks)
    assert (result.stop is None) == (not stops)
    return state


def log(folder, name):
    """The records of a file, without what depends on the machine and the number of ranks."""
    lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def numbers(record):
    return {key: value for key, value in record.items() if isinstance(value, float)}


def same_curves(moved, still):
    """Compare the logs of two folders: names, order and numbers."""
    for name in ("metrics.jsonl", "pretrain.jsonl"):
        found, expected = log(moved, name), log(still, name)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert list(one) == list(other)
            assert {**one, **numbers(other)} == other, "names and counts are the same, numbers nearly"
            for key, value in numbers(other).items():
                np.testing.assert_allclose(one[key], value, rtol=1e-9, err_msg=key)
    assert len(log(moved, "metrics.jsonl")) == 3


def same_arrays(found, expected):
    """Compare whole arrays by name."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


if __name__ == "__main__":
    ranks = mpi.world()
    for each in STEPS:
        stretch(each, int(sys.argv[2]), ranks, Path(sys.argv[1]) / each)
