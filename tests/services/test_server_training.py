"""Experiments with parameter servers: one worker matches a serial run; several train each batch once."""

import threading

import numpy as np
import pytest
from parameter_servers import Servers

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.services.training import AsyncWorkerSpec

SAMPLES, BATCH_SIZE, EPOCHS = 24, 8, 2


def make_model():
    first = nd.ConvLayerDist(3, 3, activation=nd.Tanh())
    return nd.ConvnetDist([first, nd.BatchNormLayerDist(), nd.FCLayerDist(2)], optimizer=nd.Adam(0.01), seed=3)


def make_module():
    import torch

    from neondist.torch import TorchLoss, TorchModel, TorchOptimizer

    def factory():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(3 * 10 * 6, 2)
        )

    return TorchModel(factory, loss=TorchLoss("CrossEntropyLoss"), optimizer=TorchOptimizer("SGD", {"lr": 0.1}))


def make_experiment(model, strategy=None, **fields):
    data = nd.Synthetic(shape=(12, 8, 1), classes=2, train=SAMPLES, test=4)
    return nd.FitExperiment(
        data,
        model(),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        dtype="float64",
        strategy=strategy,
        grid={"replicas": 1},
        **fields,
    )


def gather_weights(experiment):
    return {shard.full_name: shard.gather(array) for shard, array in experiment.model.checkpoint_arrays()["model"]}


def place_worker(job, index=0):
    return AsyncWorkerSpec(index, tuple(host.address for host in job.hosts), job.master_host.address, job.token)


def check_records(job):
    """Return the summary of the master for each server."""
    return {
        job.master.verify_applied_gradients(server._state.samples, server._state.applied_minibatches)
        for server in job.servers
    }


@pytest.mark.parametrize(
    ("model", "strategy", "tiles"),
    [
        (make_model, "PS(sync=False)", 1),
        (make_model, "PartitionedPS(staleness=2)", 2),
        (make_module, "UnevenPartitionedPS(sync=False)", 1),
        (make_module, "PSLoadBalancing(sync=False)", 2),
    ],
)
@pytest.mark.long
def test_one_worker_matches_a_serial_run(model, strategy, tiles):
    serial = make_experiment(model)
    serial.run(ProcessGrid.serial(), hooks=[])
    expected = gather_weights(serial)

    def train(world):
        experiment = make_experiment(model, strategy)
        history = experiment.run(experiment.open_grid(world), hooks=[], worker=place_worker(job)).history
        return gather_weights(experiment), history

    with Servers(2, minibatches_per_task=2) as job:
        results = loopback.run(tiles, train)
        assert check_records(job) == {f"{SAMPLES} records in each of {EPOCHS} epochs, each once"}
    for values, history in results:
        assert [record["epoch"] for record in history] == [1, 2]
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_workers_train_each_batch_once():
    """Share five batches per epoch among three workers; the first ends with the final weights."""
    results = {}

    def train(index):
        experiment = make_experiment(make_model, "PSLoadBalancing(staleness=1)")
        experiment.batch_size = 5
        results[index] = (
            experiment.run(ProcessGrid.serial(), hooks=[], worker=place_worker(job, index)),
            gather_weights(experiment),
        )

    with Servers(2) as job:
        threads = [threading.Thread(target=train, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [server._state.version for server in job.servers] == [5 * EPOCHS] * 2
        assert check_records(job) == {f"{SAMPLES} records in each of {EPOCHS} epochs, each once"}
        final_values = {}
        for server in job.servers:
            dense = server._state.dense_parameters
            for piece, (start, stop) in zip(dense.layout.pieces, dense.layout.piece_ranges("float64"), strict=True):
                final_values[piece.name] = dense.values["float64"][start:stop].reshape(piece.box.shape)
    assert sum(results[index][0].history[-1]["step"] for index in range(3)) == 5 * EPOCHS
    for name, value in final_values.items():
        np.testing.assert_array_equal(results[0][1][name], value, err_msg=name)


def test_strategy_requires_servers():
    with pytest.raises(nd.ConfigError, match="which neondist run FILE"):
        make_experiment(make_model, "PS(sync=False)").run(ProcessGrid.serial(), hooks=[])


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("Parallax(sync=False)", "has no owner; choose PS"),
        ("PS(sync=False)", "ema: is not supported on parameter servers"),
    ],
)
def test_unsupported_settings_are_rejected(strategy, problem):
    experiment = make_experiment(make_model, strategy)
    experiment.model.optimizer = nd.SGD(0.1, ema=0.9 if "ema" in problem else None)
    with Servers(1) as job, pytest.raises(nd.ConfigError, match=problem):
        experiment.run(ProcessGrid.serial(), hooks=[], worker=place_worker(job))
