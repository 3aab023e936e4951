"""Runs that continue on different numbers of ranks; as a script, one stage of each run under mpirun.

mpirun -n 4 python elastic_runs.py FOLDER STAGE
"""

import json
import sys
from pathlib import Path

import numpy as np

import neondist as nd
from neondist.comm import loopback, mpi
from neondist.train import Stop

VARYING_FIELDS = ("seconds", "samples_per_second", "bytes_sent", "bytes_summed")
GRIDS = [(4, {}), (6, {"rows": 3}), (1, {}), (4, {"replicas": 2})]
STRATEGIES = ["ShardedOptimizer", "PSLoadBalancing", "PartitionedPS", "Parallax"]  # by stage
STEPS_BY_STAGE = {
    "everything": [2, 2, 3],
    "autoencoder": [2, 5, 7],
}  # by stage but the last; every stage ends within an epoch


class StepLimit(nd.Hook):
    """Hook that stops a run after a number of steps, of pretraining or training."""

    runs_during_pretraining = True

    def __init__(self, steps):
        self.steps_left = steps

    def after_step(self, run):
        self.steps_left -= 1
        if not self.steps_left:
            run.stop = Stop("preempted")


def make_convnet():
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


def make_autoencoder():
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


def run_experiment(kind, world, folder, grid, strategy=None, **arguments):
    """Run an experiment; return its result and full arrays."""
    data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=7)
    model = {"everything": make_convnet, "autoencoder": make_autoencoder}[kind]()
    settings = {"batch_size": 10, "epochs": 3, "grid": grid, "checkpoint": {"every_epochs": 100}, "strategy": strategy}
    experiment = nd.FitExperiment(data, model, **settings)
    return experiment.run(nd.ProcessGrid(world, **grid), output=folder, **{"hooks": []} | arguments), model.state()


def run_uninterrupted(kind, folder):
    """Run on four virtual ranks throughout; return the full arrays."""
    return loopback.run(4, lambda world: run_experiment(kind, world, folder, {})[1])[0]


def run_stage(kind, stage, world, folder):
    """Continue a run from the previous stage; return the full arrays."""
    stops = STEPS_BY_STAGE[kind][stage : stage + 1]
    hooks = [StepLimit(steps) for steps in stops]
    result, state = run_experiment(
        kind, world, folder, GRIDS[stage][1], STRATEGIES[stage], resume=stage > 0, hooks=hooks
    )
    assert (result.stop is None) == (not stops)
    return state


def read_records(folder, name):
    """Return the records of a log without fields that depend on the machine or the number of ranks."""
    lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in VARYING_FIELDS} for line in lines]


def select_floats(record):
    return {key: value for key, value in record.items() if isinstance(value, float)}


def check_curves(folder, reference):
    """Compare the logs of two folders: names, order and values."""
    for name in ("metrics.jsonl", "pretrain.jsonl"):
        records, expected = read_records(folder, name), read_records(reference, name)
        assert len(records) == len(expected)
        for record, expected_record in zip(records, expected, strict=True):
            assert list(record) == list(expected_record)
            assert {**record, **select_floats(expected_record)} == expected_record, "names or counts differ"
            for key, value in select_floats(expected_record).items():
                np.testing.assert_allclose(record[key], value, rtol=1e-9, err_msg=key)
    assert len(read_records(folder, "metrics.jsonl")) == 3


def check_arrays(actual, expected):
    """Compare full arrays by name."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


if __name__ == "__main__":
    world = mpi.world_transport()
    for kind in STEPS_BY_STAGE:
        run_stage(kind, int(sys.argv[2]), world, Path(sys.argv[1]) / kind)
