"""Checkpoints of servers: any number of them goes on, and damaged or mixed files are refused."""

import shutil
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from parameter_servers import SHAPES, Servers, arrays

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.checkpoint import export_checkpoint
from neondist.services.job_status import JobStatus
from neondist.services.master import Master
from neondist.services.message import Message
from neondist.services.placement import TableSpec
from neondist.services.progress import Credit
from neondist.services.recovery import ServerRecovery, complete_checkpoints
from neondist.services.state import UpdateRule

TABLE = TableSpec("embedding", 50, 3, "float64")
OPTIMIZER = nd.Adam(0.05)
FACTS = {"records": 2, "batch_size": 2, "epochs": 1, "seed": 0}
STRATEGIES = {1: "PS", 2: "PSLoadBalancing", 3: "PartitionedPS"}


def gradients(step):
    draw = np.random.default_rng(1000 + step)
    return arrays(step + 1) | {"embedding": (draw.integers(0, 50, 6), draw.normal(size=(6, 3)))}


def connect(job):
    count = len(job.servers)
    return job.client(layouts=job.layouts(STRATEGIES[count], tables=[TABLE]))


def train(client, steps):
    values = arrays(9)
    client.pull(values)
    for step in steps:
        client.push(gradients(step), credit=Credit(0, step, 0))
        client.pull(values)
    return values, client.pull_rows("embedding", np.arange(50))


def push_to_first(job, client):
    """Push a gradient that the second of two servers does not get."""
    job.hosts[1].stop(0)
    with pytest.raises(ServiceError):
        client.push(gradients(0), credit=Credit(0, 0, 0))
    job.hosts[1] = job.stack.enter_context(type(job.hosts[1])([job.servers[1]], job.hosts[1].address, job.token))


def begin(job, master, folder):
    """Begin a job of one minibatch; return the client of its worker, and who restores its servers."""
    client = connect(job)
    client.initialize(arrays(0), OPTIMIZER, UpdateRule(sync=False))
    client.pull(arrays(9))
    master.report_training_params(Message(FACTS))
    recovery = ServerRecovery(client._group, folder, master)
    recovery.step()
    assert master.ready
    return client, recovery


def assert_equal(found, expected):
    for name in SHAPES:
        np.testing.assert_allclose(found[0][name], expected[0][name], rtol=0, atol=1e-13)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-13)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a folder with checkpoints of two servers, and the values at the end."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with Servers(2, folder) as job:
        client = connect(job)
        client.initialize(arrays(0), OPTIMIZER)
        train(client, range(3))
        assert client.save("at-3").to_list() == [Credit(0, step, 0) for step in range(3)]
        return folder, train(client, range(3, 6))


@pytest.mark.parametrize("counts", [[2], [3], [1], [3, 2], [3, 1, 2]], ids=str)
@pytest.mark.long
def test_any_number_of_servers_goes_on(undisturbed, tmp_path, counts):
    """Slots, scalars, rows and credits move between servers; the end is that of an undisturbed run."""
    folder, expected = undisturbed
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    for at, count in enumerate(counts):
        with Servers(count, tmp_path) as job:
            client = connect(job)
            client.load("at-3" if at == 0 else f"again-{at - 1}", OPTIMIZER)
            assert client.credits().to_list() == [Credit(0, step, 0) for step in range(3)]
            if at == len(counts) - 1:
                assert client.push(gradients(2), credit=Credit(0, 2, 0)).stale  # nothing has been pulled
                client.pull(arrays(9))
                assert client.push(gradients(2), credit=Credit(0, 2, 0)).duplicate
                assert_equal(train(client, range(3, 6)), expected)
            else:
                client.save(f"again-{at}")


def test_a_loaded_checkpoint_replaces_later_values(undisturbed, tmp_path):
    folder, expected = undisturbed
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    with Servers(2, tmp_path) as job:
        client, other = connect(job), connect(job)
        for one in (client, other):
            one.initialize(arrays(5), OPTIMIZER)
        train(other, range(1))
        client.load("at-3", OPTIMIZER)
        assert other.push(gradients(1)).stale  # of values that are gone
        assert_equal(train(client, range(3, 6)), expected)


def test_export(undisturbed, tmp_path):
    import h5py
    from safetensors.numpy import load_file

    folder, _ = undisturbed
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


def test_an_exported_checkpoint_is_one_of_a_run(tmp_path):
    """Weights of a model on servers, in the file that the model itself reads."""
    from neondist.comm import SingleTransport
    from neondist.io.checkpoint import load_weights, open_checkpoint

    def built(seed):
        model = nd.MLP(
            [nd.FCLayer(4, name="hidden"), nd.FCLayer(2, name="out")], cost=nd.MSE(), optimizer=nd.SGD(), seed=seed
        )
        model.build((3,), 1)
        return model

    model, fresh = built(1), built(2)
    shapes = {shard.full_name: shard.parameter.shape for shard, _ in model.kept_arrays()["model"]}
    values = {shard.full_name: array for shard, array in model.kept_arrays()["model"]}
    with Servers(2, tmp_path) as job:
        client = job.client(layouts=job.layouts(shapes=shapes, dtype="float32"))
        client.initialize(values, nd.SGD(0.1))
        client.save("first")
    export_checkpoint(tmp_path / "first", tmp_path / "checkpoint.h5")
    with open_checkpoint(tmp_path / "checkpoint.h5", SingleTransport()) as file:
        load_weights(file, fresh.kept_arrays()["model"], strict=True)
    for name, value in fresh.state().items():
        np.testing.assert_array_equal(value, values[name])


def test_a_checkpoint_waits_for_a_gradient_between_two_servers(tmp_path):
    """One server has applied a minibatch, the other has not: it takes that one, and no other, first."""
    with Servers(2, tmp_path) as job:
        client, other, third = (connect(job) for _ in range(3))
        for one in (client, other, third):
            one.initialize(arrays(0), OPTIMIZER, UpdateRule(sync=False))
            one.pull(arrays(9))
        push_to_first(job, client)
        with pytest.raises(ServiceError, match="have not applied the same gradients; try again later"):
            other.save("too-early", patience=0.1)
        found = []
        saving = threading.Thread(target=lambda: found.append(other.save("complete")))
        saving.start()
        while not job.servers[0]._held_until > time.monotonic():
            time.sleep(0.001)
        later = third.push_later(gradients(1), credit=Credit(0, 1, 0))
        assert not client.push(gradients(0), credit=Credit(0, 0, 0)).duplicate
        saving.join(20)
        assert found[0].to_list() == [Credit(0, 0, 0)]
        assert not later.result().duplicate
        assert len(client.credits().to_list()) == 2


def test_another_master_hands_out_what_one_server_lacks(tmp_path, monkeypatch):
    """The first was killed when one of two servers had a gradient: no checkpoint is possible before both have it."""
    monkeypatch.setattr("neondist.services.recovery._PATIENCE", 0.1)
    path = tmp_path / "tasks.sqlite"
    with Servers(2, tmp_path) as job:
        with closing(Master(path=path)) as first:
            client, _ = begin(job, first, tmp_path)
        push_to_first(job, client)
        with closing(Master(path=path)) as second:
            recovery = ServerRecovery(client._group, tmp_path, second)
            with pytest.raises(ServiceError, match="have not applied the same gradients; try again later"):
                recovery.step()
            task = second.get_task(Message({"worker": "0"}))
            assert task.text("type") == "TRAINING"
            assert not client.push(gradients(0), credit=Credit(0, 0, 0)).duplicate
            second.report_task_result(Message({"task_id": task.integer("task_id"), "err_message": ""}))
            recovery.step()
            assert second.finished


def test_the_written_state_of_a_job_is_that_of_its_end(tmp_path, monkeypatch):
    """Though the last one was written a moment ago."""
    with Servers(2, tmp_path) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client, recovery = begin(job, master, tmp_path)
        recovery.step()
        monkeypatch.setattr("neondist.services.recovery.REPORT", 3600.0)
        assert not JobStatus.read(tmp_path).ended
        task = master.get_task(Message({"worker": "0"}))
        client.push(gradients(0), credit=Credit(0, 0, 0))
        master.report_task_result(Message({"task_id": task.integer("task_id"), "err_message": ""}))
        recovery.step()
        assert JobStatus.read(tmp_path).ended


def test_a_stopped_job_keeps_the_checkpoint_before_a_gradient_of_one_server(tmp_path, monkeypatch):
    """Its workers have ended, and none of them will push that gradient to the other server."""
    monkeypatch.setattr("neondist.services.recovery._PATIENCE", 0.1)
    with Servers(2, tmp_path) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client, recovery = begin(job, master, tmp_path)
        assert recovery.save(Message()).flag("saved")
        push_to_first(job, client)
        assert not recovery.save(Message()).flag("saved")
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-000000000"]


def test_what_keeps_a_job_waiting_is_told_once(tmp_path, monkeypatch, capsys):
    """Here servers without a folder for checkpoints."""
    monkeypatch.setattr("neondist.services.recovery.POLL", 0.001)
    steps = threading.Semaphore(0)

    class Counted(ServerRecovery):
        def step(self):
            steps.release()
            super().step()

    with Servers(1) as job, closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        client = connect(job)
        client.initialize(arrays(0), OPTIMIZER, UpdateRule(sync=False))
        master.report_training_params(Message(FACTS))
        with Counted(client._group, tmp_path, master):
            assert all(steps.acquire(timeout=20) for _ in range(30))
    error = capsys.readouterr().err
    assert error.count("warning: servers can be neither saved nor restored: ") == error.count("\n") == 1
    assert "has no checkpoint folder; start it with --checkpoint-dir; it is tried again" in error


@pytest.mark.parametrize("fault", ["missing", "damaged", "mixed", "none", "optimizer", "model", "outside"])
def test_checkpoints_that_cannot_be_loaded_are_named(undisturbed, tmp_path, fault):
    folder, _ = undisturbed
    shutil.copytree(folder / "at-3", tmp_path / "at-3")
    file, name, optimizer, shapes = tmp_path / "at-3" / "server-1-of-2.h5", "at-3", OPTIMIZER, None
    problem = "is not a complete checkpoint of servers"
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
            client.initialize(arrays(0), OPTIMIZER)
            client.save("other")
            shutil.copy(tmp_path / "other" / file.name, file)
            problem = "belong to different checkpoints"
        elif fault == "none":
            name = "absent"
        elif fault == "optimizer":
            optimizer, problem = nd.SGD(0.1), "has the slots of Adam, and the model has SGD"
        elif fault == "model":
            shapes, problem = SHAPES | {"more": (2,)}, "has no parameter 'more'"
        else:
            name, problem = "../at-3", "field 'name': expected letters"
        client = job.client("1", job.layouts(STRATEGIES[2], shapes, [TABLE]))
        with pytest.raises(ServiceError, match=problem):
            client.load(name, optimizer)
        assert fault == "mixed" or not all(status["initialized"] for status in client.status())
