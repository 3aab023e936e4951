"""Experiments with parameter servers: one worker matches a serial run; several train each batch once."""

import threading
from functools import partial

import numpy as np
import pytest
from parameter_servers import Servers

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.services.client import ParameterClient
from neondist.services.progress import AppliedMinibatches
from neondist.services.training import AsyncWorkerSpec
from neondist.train.state import Stop

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


def make_embedding_module():
    """Return a model with a table of 30 rows, of which each tile uses some."""
    import torch

    from neondist.torch import TorchLoss, TorchModel, TorchOptimizer

    class Embeddings(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(30, 2, sparse=True), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.table((x.abs() * 20).long() % 30)).mean((1, 2, 3)))

    optimizer = TorchOptimizer("Adam", {"lr": 0.01, "weight_decay": 0.1})
    return TorchModel(Embeddings, loss=TorchLoss("CrossEntropyLoss"), optimizer=optimizer)


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
        (make_embedding_module, "PartitionedPS(sync=False)", 2),
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


def make_adam_module():
    from neondist.torch import TorchOptimizer

    model = make_module()
    model.optimizer = TorchOptimizer("Adam", {"lr": 0.01, "weight_decay": 0.1})
    return model


@pytest.mark.parametrize(
    ("model", "strategies", "tiles"),
    [
        (make_model, ("PS", None, "PartitionedPS"), 1),
        (make_model, (None, "PSLoadBalancing", "PS", None), 2),
        (make_adam_module, (None, "UnevenPartitionedPS", None), 2),
        (make_adam_module, ("PSLoadBalancing", None, "PS"), 1),
        (make_module, (None, "PartitionedPS", None), 1),
        (make_embedding_module, ("PartitionedPS", None, "PS"), 1),
    ],
)
@pytest.mark.long
def test_optimizer_state_moves_to_and_from_servers(tmp_path, model, strategies, tiles):
    """Continue with and without servers in turn; expect the values and the state of an uninterrupted run."""

    def train(world, strategy, epochs, **options):
        builder = None if strategy is None else nd.strategies.as_builder(strategy)
        if builder is not None:
            builder.sync = False
        experiment = make_experiment(model, builder)
        experiment.epochs = epochs
        experiment.run(experiment.open_grid(world), hooks=[], **options)
        arrays = experiment.model.checkpoint_arrays()
        return {
            (group, shard.full_name): shard.gather(array) for group, pairs in arrays.items() for shard, array in pairs
        }

    expected = loopback.run(tiles, lambda world: train(world, None, len(strategies)))
    for epoch, strategy in enumerate(strategies, 1):
        (servers_folder := tmp_path / f"servers-{epoch}").mkdir()
        with Servers(1 + epoch % 2, servers_folder, recover=True) as job:
            worker = None if strategy is None else place_worker(job)
            step = partial(
                train, strategy=strategy, epochs=epoch, worker=worker, output=tmp_path / "run", resume="auto"
            )
            results = loopback.run(tiles, step)
    for values, reference in zip(results, expected, strict=True):
        assert values.keys() == reference.keys()
        for name, value in reference.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=str(name))


class StopInEarlierEpoch(nd.Hook):
    """Return the tasks of the first epoch to the queue, as restored servers do, and stop after the next of them."""

    def __init__(self, job):
        self.job = job

    def after_epoch(self, run):
        if run.epoch == 1:
            self.job.master.reset_tasks(AppliedMinibatches(), [])

    def after_step(self, run):
        if run.totals.samples_of_other_workers < 0:
            run.stop = Stop("test")


@pytest.mark.long
def test_run_that_stopped_in_tasks_of_an_earlier_epoch_resumes(tmp_path):
    def train(*hooks):
        experiment = make_experiment(make_model, "PS(sync=False)")
        worker = place_worker(job)
        return experiment.run(ProcessGrid.serial(), hooks=hooks, worker=worker, output=tmp_path / "run", resume="auto")

    with Servers(1, tmp_path, recover=True) as job:
        assert train(StopInEarlierEpoch(job)).stop is not None
        history = train().history
    assert [record["epoch"] for record in history] == [1, 2]
    assert all(0 < record["train_loss"] < 2 for record in history)


def test_resumed_worker_needs_a_whole_number_of_minibatches(tmp_path):
    class StopAfterStep(nd.Hook):
        def after_step(self, run):
            run.stop = nd.train.Stop("test")

    experiment = make_experiment(make_model, "PS(sync=False)")
    experiment.batch_size = 5
    make_experiment(make_model).run(ProcessGrid.serial(), output=tmp_path, hooks=[StopAfterStep()])
    problem = r"8 samples of the epoch .* batch_size 5; resume with"
    with Servers(1) as job, pytest.raises(nd.DataError, match=problem):
        experiment.run(ProcessGrid.serial(), output=tmp_path, resume=True, hooks=[], worker=place_worker(job))


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
            for piece, cells in dense.layout.pieces_of_dtype("float64"):
                final_values[piece.name] = dense.values["float64"][cells].reshape(piece.box.shape)
    assert sum(results[index][0].history[-1]["step"] for index in range(3)) == 5 * EPOCHS
    for name, value in final_values.items():
        np.testing.assert_array_equal(results[0][1][name], value, err_msg=name)


class UpdatesByOthers(nd.Hook):
    """Pushes a gradient of another worker after the last step, and after the evaluation, of each epoch."""

    def __init__(self, job, experiment):
        self.experiment, self.server = experiment, job.servers[0]
        self.addresses, self.token = [host.address for host in job.hosts], job.token
        self.changes = []

    def push(self):
        layouts = [self.server._state.layout]
        with ParameterClient(self.addresses, layouts, self.token, "other") as client:
            client.pull({piece.name: np.zeros(piece.shape) for piece in layouts[0].pieces})
            assert not client.push({piece.name: np.ones(piece.shape) for piece in layouts[0].pieces}).stale

    def after_step(self, run):
        if run.samples_seen == SAMPLES and len(run.history) + 1 < EPOCHS:
            self.push()

    def after_epoch(self, run):
        state = self.server._state
        own = gather_weights(self.experiment)
        flat = np.concatenate([own[piece.name].reshape(-1) for piece in state.layout.pieces])
        self.changes.append(abs(flat - state.dense_parameters.values["float64"]).max())
        if run.epoch < EPOCHS:
            self.push()


def test_values_are_pulled_before_and_after_an_evaluation(monkeypatch):
    staleness, push = [], ParameterClient.push

    def record_staleness(client, *args, **kwargs):
        result = push(client, *args, **kwargs)
        staleness.append(result.staleness) if client.worker != "other" else None
        return result

    monkeypatch.setattr(ParameterClient, "push", record_staleness)
    experiment = make_experiment(make_model, "PS(sync=False)")
    with Servers(1) as job:
        hook = UpdatesByOthers(job, experiment)
        experiment.run(ProcessGrid.serial(), hooks=[hook], worker=place_worker(job))
    assert hook.changes == [0.0] * EPOCHS
    assert staleness == [0] * (EPOCHS * SAMPLES // BATCH_SIZE)


def test_learning_rate_depends_on_the_position_of_a_minibatch(monkeypatch):
    """Share single-minibatch tasks among two workers; scales equal those of one process."""
    scales, push = {}, ParameterClient.push

    def record_scale(client, gradients, samples, minibatch, scale):
        scales[minibatch.epoch, minibatch.task] = scale
        return push(client, gradients, samples, minibatch, scale)

    monkeypatch.setattr(ParameterClient, "push", record_scale)

    def train(index):
        experiment = make_experiment(make_model, "PS(sync=False)")
        experiment.model.optimizer = nd.SGD(0.1, schedule=nd.Warmup(EPOCHS))
        started.wait()
        experiment.run(ProcessGrid.serial(), hooks=[], worker=place_worker(job, index))

    started = threading.Barrier(2)
    with Servers(1) as job:
        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tasks = SAMPLES // BATCH_SIZE
    rate = nd.Warmup(EPOCHS).factor
    assert scales == {(epoch, task): rate(epoch + task / tasks) for epoch in range(EPOCHS) for task in range(tasks)}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        (
            "optimizer",
            nd.SGD(0.1, clip_norm=1.0),
            "clip_norm: needs a norm over all servers; leave it out, or use sync",
        ),
        ("optimizer", nd.LAMB(0.1), "LAMB updates whole parameters; choose a strategy without partitions"),
        ("optimizer", nd.SGD(0.1, momentum=0.9, schedule=nd.OneCycle(2, momentum=(0.8, 0.9))), "the momentum"),
        ("optimizer", nd.SGD(0.1, ema=0.9), "ema: is not supported"),
        ("best", nd.Best(patience=1), "patience: workers of parameter servers do not stop early"),
    ],
)
def test_settings_are_rejected_before_workers_are_started(field, value, problem):
    settings = {"best": value} if field == "best" else {}
    experiment = make_experiment(make_model, "PartitionedPS(sync=False)", **settings)
    if field == "optimizer":
        experiment.model.optimizer = value
    with pytest.raises(nd.ConfigError, match=problem) as caught:
        experiment.validate(2)
    assert caught.value.subject is value


@pytest.mark.parametrize("arguments", ["sync=False", "staleness=2"])
def test_strategies_without_owners_are_rejected_before_workers_are_started(arguments):
    experiment = make_experiment(make_model, f"Parallax({arguments})")
    with pytest.raises(nd.ConfigError, match=r"strategy: parameter 'conv1/weights' has no owner; choose PS") as caught:
        experiment.validate(2)
    assert caught.value.subject is experiment


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
