"""Experiments whose parameters servers update: equal to serial ones with one worker; each batch once with several."""

import threading

import numpy as np
import pytest
from parameter_servers import Servers

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.services.training import WorkerPlace

SAMPLES, BATCH, EPOCHS = 24, 8, 2


def layers():
    first = nd.ConvLayerDist(3, 3, activation=nd.Tanh())
    return nd.ConvnetDist([first, nd.BatchNormLayerDist(), nd.FCLayerDist(2)], optimizer=nd.Adam(0.01), seed=3)


def module():
    import torch

    from neondist.torch import TorchLoss, TorchModel, TorchOptimizer

    def factory():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(3 * 10 * 6, 2)
        )

    return TorchModel(factory, loss=TorchLoss("CrossEntropyLoss"), optimizer=TorchOptimizer("SGD", {"lr": 0.1}))


def experiment(model, strategy=None, **fields):
    data = nd.Synthetic(shape=(12, 8, 1), classes=2, train=SAMPLES, test=4)
    return nd.FitExperiment(
        data,
        model(),
        batch_size=BATCH,
        epochs=EPOCHS,
        dtype="float64",
        strategy=strategy,
        grid={"replicas": 1},
        **fields,
    )


def weights(one):
    return {shard.full_name: shard.gather(array) for shard, array in one.model.kept_arrays()["model"]}


def worker(job, index=0):
    return WorkerPlace(index, tuple(host.address for host in job.hosts), job.master_host.address, job.token)


def told(job):
    """Return what the master finds, of each server."""
    return {job.master.check(one._state.samples, one._state.credits) for one in job.servers}


@pytest.mark.parametrize(
    ("model", "strategy", "tiles"),
    [
        (layers, "PS(sync=False)", 1),
        (layers, "PartitionedPS(staleness=2)", 2),
        (module, "UnevenPartitionedPS(sync=False)", 1),
        (module, "PSLoadBalancing(sync=False)", 2),
    ],
)
@pytest.mark.long
def test_one_worker_is_a_serial_run(model, strategy, tiles):
    serial = experiment(model)
    serial.run(ProcessGrid.serial(), hooks=[])
    expected = weights(serial)

    def work(world):
        one = experiment(model, strategy)
        history = one.run(one.open_grid(world), hooks=[], worker=worker(job)).history
        return weights(one), history

    with Servers(2, minibatches_per_task=2) as job:
        found = loopback.run(tiles, work)
        assert told(job) == {f"{SAMPLES} records in each of {EPOCHS} epochs, each once"}
    for values, history in found:
        assert [record["epoch"] for record in history] == [1, 2]
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_workers_train_each_batch_once():
    """Three workers share five batches an epoch; the first one ends with what all have trained."""
    ends = {}

    def work(index):
        one = experiment(layers, "PSLoadBalancing(staleness=1)")
        one.batch_size = 5
        ends[index] = one.run(ProcessGrid.serial(), hooks=[], worker=worker(job, index)), weights(one)

    with Servers(2) as job:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [server._state.version for server in job.servers] == [5 * EPOCHS] * 2
        assert told(job) == {f"{SAMPLES} records in each of {EPOCHS} epochs, each once"}
        last = {}
        for server in job.servers:
            dense = server._state.dense
            for piece, (start, stop) in zip(dense.layout.pieces, dense.layout.spans("float64"), strict=True):
                last[piece.name] = dense.values["float64"][start:stop].reshape(piece.box.shape)
    assert sum(ends[index][0].history[-1]["step"] for index in range(3)) == 5 * EPOCHS
    for name, value in last.items():
        np.testing.assert_array_equal(ends[0][1][name], value, err_msg=name)


def test_without_servers_it_is_refused():
    with pytest.raises(nd.ConfigError, match="which neondist run FILE"):
        experiment(layers, "PS(sync=False)").run(ProcessGrid.serial(), hooks=[])


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [("Parallax(sync=False)", "has no owner; choose PS"), ("PS(sync=False)", "ema: the running mean would stay")],
)
def test_what_servers_cannot_do_is_refused(strategy, problem):
    one = experiment(layers, strategy)
    one.model.optimizer = nd.SGD(0.1, ema=0.9 if "ema" in problem else None)
    with Servers(1) as job, pytest.raises(nd.ConfigError, match=problem):
        one.run(ProcessGrid.serial(), hooks=[], worker=worker(job))
