"""Checkpoints of servers: any number of servers resumes, and damaged or mixed files are rejected."""

import shutil
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from parameter_servers import SHAPES, Servers, draw_arrays

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.checkpoint import export_checkpoint
from neondist.services.job_status import JobStatus
from neondist.services.master import Master
from neondist.services.message import Message
from neondist.services.placement import EmbeddingTableSpec
from neondist.services.progress import MinibatchId
from neondist.services.recovery import ServerRecovery, list_complete_checkpoints
from neondist.services.state import SyncPolicy

TABLE = EmbeddingTableSpec("embedding", 50, 3, "float64")
OPTIMIZER = nd.Adam(0.05)
QUEUE_PARAMETERS = {"records": 2, "batch_size": 2, "epochs": 1, "seed": 0}
STRATEGIES = {1: "PS", 2: "PSLoadBalancing", 3: "PartitionedPS"}


def draw_gradients(step):
    rng = np.random.default_rng(1000 + step)
    return draw_arrays(step + 1) | {"embedding": (rng.integers(0, 50, 6), rng.normal(size=(6, 3)))}


def connect(job):
    count = len(job.servers)
    return job.client(layouts=job.layouts(STRATEGIES[count], tables=[TABLE]))


def train(client, steps):
    values = draw_arrays(9)
    client.pull(values)
    for step in steps:
        client.push(draw_gradients(step), minibatch=MinibatchId(0, step, 0))
        client.pull(values)
    return values, client.pull_rows("embedding", np.arange(50))


def push_to_first_server(job, client):
    """Push a gradient that the second of two servers does not receive."""
    job.hosts[1].stop(0)
    with pytest.raises(ServiceError):
        client.push(draw_gradients(0), minibatch=MinibatchId(0, 0, 0))
    job.hosts[1] = job.stack.enter_context(type(job.hosts[1])([job.servers[1]], job.hosts[1].address, job.token))


def start_job(job, master, folder):
    """Start a job of one minibatch; return the client of its worker, and the recovery of its servers."""
    client = connect(job)
    client.push_initial_values(draw_arrays(0), OPTIMIZER, SyncPolicy(sync=False))
    client.pull(draw_arrays(9))
    master.report_training_params(Message(QUEUE_PARAMETERS))
    recovery = ServerRecovery(client._server_connections, folder, master)
    recovery.restore_or_save_servers()
    assert master.servers_match_queue
    return client, recovery


def assert_equal(actual, expected):
    for name in SHAPES:
        np.testing.assert_allclose(actual[0][name], expected[0][name], rtol=0, atol=1e-13)
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=1e-13)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a folder with checkpoints of two servers, and the final values of the run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with Servers(2, folder) as job:
        client = connect(job)
        client.push_initial_values(draw_arrays(0), OPTIMIZER)
        train(client, range(3))
        assert client.save("at-3").to_list() == [MinibatchId(0, step, 0) for step in range(3)]
        return folder, train(client, range(3, 6))


@pytest.mark.parametrize("counts", [[2], [3], [1], [3, 2], [3, 1, 2]], ids=str)
@pytest.mark.long
def test_any_number_of_servers_resumes(uninterrupted, tmp_path, counts):
    """Move slots, scalars, rows and credits between servers; expect the values of an uninterrupted run."""
    folder, expected = uninterrupted
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    for i, count in enumerate(counts):
        with Servers(count, tmp_path) as job:
            client = connect(job)
            client.load("at-3" if i == 0 else f"stage-{i - 1}", OPTIMIZER)
            assert client.applied_minibatches().to_list() == [MinibatchId(0, step, 0) for step in range(3)]
            if i == len(counts) - 1:
                assert client.push(draw_gradients(2), minibatch=MinibatchId(0, 2, 0)).stale  # nothing has been pulled
                client.pull(draw_arrays(9))
                assert client.push(draw_gradients(2), minibatch=MinibatchId(0, 2, 0)).duplicate
                assert_equal(train(client, range(3, 6)), expected)
            else:
                client.save(f"stage-{i}")


def test_loaded_checkpoint_replaces_later_values(uninterrupted, tmp_path):
    folder, expected = uninterrupted
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    with Servers(2, tmp_path) as job:
        client, other = connect(job), connect(job)
        for worker in (client, other):
            worker.push_initial_values(draw_arrays(5), OPTIMIZER)
        train(other, range(1))
        client.load("at-3", OPTIMIZER)
        assert other.push(draw_gradients(1)).stale  # computed from replaced values
        assert_equal(train(client, range(3, 6)), expected)


def test_export(uninterrupted, tmp_path):
    import h5py
    from safetensors.numpy import load_file

    folder, _ = uninterrupted
    with Servers(3, folder) as job:
        client = connect(job)
        client.load("at-3", OPTIMIZER)
        values, rows = train(client, ())
    export_checkpoint(folder / "at-3", tmp_path / "checkpoint.h5")
    export_checkpoint(folder / "at-3", tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        for name, value in (values | {"embedding": rows}).items():
            np.testing.assert_array_equal(file[f"model/{name}"], value)
            np.testing.assert_array_equal(weights[name], value)
        assert file["optimizer/fc/weights/mean"].shape == (10, 6)
    with pytest.raises(nd.ConfigError, match=r"ends with .h5 or .safetensors"):
        export_checkpoint(folder / "at-3", tmp_path / "weights.pt")


def test_models_load_exported_checkpoints(tmp_path):
    """Export weights from servers to the file format of models."""
    from neondist.comm import SingleTransport
    from neondist.io.checkpoint import load_weights, open_checkpoint

    def build_model(seed):
        model = nd.MLP(
            [nd.FCLayer(4, name="hidden"), nd.FCLayer(2, name="out")], cost=nd.MSE(), optimizer=nd.SGD(), seed=seed
        )
        model.build((3,), 1)
        return model

    model, fresh = build_model(1), build_model(2)
    shapes = {shard.full_name: shard.parameter.shape for shard, _ in model.checkpoint_arrays()["model"]}
    values = {shard.full_name: array for shard, array in model.checkpoint_arrays()["model"]}
    with Servers(2, tmp_path) as job:
        client = job.client(layouts=job.layouts(shapes=shapes, dtype="float32"))
        client.push_initial_values(values, nd.SGD(0.1))
        client.save("first")
    export_checkpoint(tmp_path / "first", tmp_path / "checkpoint.h5")
    with open_checkpoint(tmp_path / "checkpoint.h5", SingleTransport()) as file:
        load_weights(file, fresh.checkpoint_arrays()["model"], strict=True)
    for name, value in fresh.state().items():
        np.testing.assert_array_equal(value, values[name])


def test_checkpoint_waits_for_a_partially_applied_gradient(tmp_path):
    """Save while one server lacks a minibatch: it accepts that minibatch, and no other, before."""
    with Servers(2, tmp_path) as job:
        client, other, third = (connect(job) for _ in range(3))
        for worker in (client, other, third):
            worker.push_initial_values(draw_arrays(0), OPTIMIZER, SyncPolicy(sync=False))
            worker.pull(draw_arrays(9))
        push_to_first_server(job, client)
        with pytest.raises(ServiceError, match="have not applied the same gradients; try again later"):
            other.save("too-early", timeout=0.1)
        saved = []
        saving = threading.Thread(target=lambda: saved.append(other.save("complete")))
        saving.start()
        while not all(server._hold_deadline > time.monotonic() for server in job.servers):
            time.sleep(0.001)
        later = third.push_async(draw_gradients(1), minibatch=MinibatchId(0, 1, 0))
        assert not client.push(draw_gradients(0), minibatch=MinibatchId(0, 0, 0)).duplicate
        saving.join(20)
        assert saved[0].to_list() == [MinibatchId(0, 0, 0)]
        assert not later.result().duplicate
        assert len(client.applied_minibatches().to_list()) == 2


def test_second_master_assigns_the_missing_minibatch(tmp_path, monkeypatch):
    """Replace a master killed while one of two servers lacks a gradient, which prevents checkpoints."""
    monkeypatch.setattr("neondist.services.recovery._HOLD_TIMEOUT_SECONDS", 0.1)
    path = tmp_path / "tasks.sqlite"
    with Servers(2, tmp_path) as job:
        with closing(Master(path=path)) as first:
            client, _ = start_job(job, first, tmp_path)
        push_to_first_server(job, client)
        with closing(Master(path=path)) as second:
            recovery = ServerRecovery(client._server_connections, tmp_path, second)
            with pytest.raises(ServiceError, match="have not applied the same gradients; try again later"):
                recovery.restore_or_save_servers()
            task = second.get_task(Message({"worker": "0"}))
            assert task.text("type") == "TRAINING"
            assert not client.push(draw_gradients(0), minibatch=MinibatchId(0, 0, 0)).duplicate
            second.report_task_result(Message({"task_id": task.integer("task_id"), "err_message": ""}))
            recovery.restore_or_save_servers()
            assert second.results_saved


def test_final_status_is_written(tmp_path, monkeypatch):
    """Write it although the previous one is recent."""
    with Servers(2, tmp_path) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client, recovery = start_job(job, master, tmp_path)
        recovery.restore_or_save_servers()
        monkeypatch.setattr("neondist.services.recovery.STATUS_INTERVAL_SECONDS", 3600.0)
        assert not JobStatus.read(tmp_path).ended
        task = master.get_task(Message({"worker": "0"}))
        client.push(draw_gradients(0), minibatch=MinibatchId(0, 0, 0))
        master.report_task_result(Message({"task_id": task.integer("task_id"), "err_message": ""}))
        recovery.restore_or_save_servers()
        assert JobStatus.read(tmp_path).ended


def test_job_stopped_before_training_has_nothing_to_save(tmp_path):
    with Servers(2, tmp_path) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        with connect(job) as client:
            recovery = ServerRecovery(client._server_connections, tmp_path, master)
            assert recovery.save(Message()).flag("saved")
        assert list_complete_checkpoints(tmp_path) == []


def test_stopped_job_keeps_the_checkpoint_before_a_partial_gradient(tmp_path, monkeypatch):
    """Stop while no worker is left that could push the gradient to the other server."""
    monkeypatch.setattr("neondist.services.recovery._HOLD_TIMEOUT_SECONDS", 0.1)
    with Servers(2, tmp_path) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client, recovery = start_job(job, master, tmp_path)
        assert recovery.save(Message()).flag("saved")
        push_to_first_server(job, client)
        assert not recovery.save(Message()).flag("saved")
        assert [path.name for path in list_complete_checkpoints(tmp_path)] == ["checkpoint-000000000"]


@pytest.mark.parametrize("obstacle", ["servers without a folder", "unwritable status"])
def test_obstacles_to_checkpoints_are_reported_once(tmp_path, monkeypatch, capsys, obstacle):
    monkeypatch.setattr("neondist.services.recovery.SERVER_POLL_SECONDS", 0.001)
    monkeypatch.setattr("neondist.services.recovery.STATUS_INTERVAL_SECONDS", 0.0)
    steps, problem = threading.Semaphore(0), "has no checkpoint folder; start it with one"

    class CountingRecovery(ServerRecovery):
        def restore_or_save_servers(self):
            steps.release()
            super().restore_or_save_servers()

    folder, servers_folder = tmp_path, []
    if obstacle == "unwritable status":
        folder, servers_folder, problem = (
            tmp_path / "removed",
            [tmp_path],
            "status.json: cannot be written (No such file or directory)",
        )
    with Servers(1, *servers_folder) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client = connect(job)
        client.push_initial_values(draw_arrays(0), OPTIMIZER, SyncPolicy(sync=False))
        master.report_training_params(Message(QUEUE_PARAMETERS))
        with CountingRecovery(client._server_connections, folder, master):
            assert all(steps.acquire(timeout=20) for _ in range(30))
    error = capsys.readouterr().err
    assert error.count("warning: cannot save or restore the servers: ") == error.count("\n") == 1
    assert problem in error
    assert error.endswith("; retrying\n")


@pytest.mark.parametrize("fault", ["missing", "damaged", "mixed", "none", "optimizer", "model", "outside"])
def test_checkpoint_errors(uninterrupted, tmp_path, fault):
    folder, _ = uninterrupted
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    file, name, optimizer, shapes = tmp_path / "at-3" / "server-1-of-2.h5", "at-3", OPTIMIZER, None
    problem = "is not a complete parameter-server checkpoint"
    with Servers(2, tmp_path) as job:
        if fault == "missing":
            file.unlink()
        elif fault == "damaged":
            content = bytearray(file.read_bytes())
            content[-9] ^= 1
            file.write_bytes(content)
            problem = "damaged"
        elif fault == "mixed":
            client = connect(job)
            client.push_initial_values(draw_arrays(0), OPTIMIZER)
            client.save("other")
            shutil.copy(tmp_path / "other" / file.name, file)
            problem = "belong to different checkpoints"
        elif fault == "none":
            name = "absent"
        elif fault == "optimizer":
            optimizer, problem = nd.SGD(0.1), "was written with optimizer Adam, but the model has SGD"
        elif fault == "model":
            shapes, problem = SHAPES | {"more": (2,)}, "does not have all of 'more'"
        else:
            name, problem = "../at-3", "field 'name': expected letters"
        client = job.client("1", job.layouts(STRATEGIES[2], shapes, [TABLE]))
        with pytest.raises(ServiceError, match=problem):
            client.load(name, optimizer)
        assert fault == "mixed" or not all(status["initialized"] for status in client.status())
