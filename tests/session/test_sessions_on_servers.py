"""Sessions of two workers on parameter servers: the updates are those of stale gradients, in the order they come."""

import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from processes import finish

import neondist as nd
from neondist.comm import ProcessGrid
from neondist.errors import LaunchError
from neondist.services.job import FIRST_WAIT, LEASE, JobService
from neondist.services.message import Message
from neondist.services.server import ParameterServer
from neondist.services.wire import TOKEN, ServiceHost, create_token

STEPS = 4
IMAGES = np.random.default_rng(0).normal(size=(2, STEPS, 4, 3, 2, 1))
LABELS = np.random.default_rng(1).integers(0, 3, size=(2, STEPS, 4))


def built():
    layers = [nd.FCLayerDist(5, activation=nd.Tanh()), nd.FCLayerDist(3)]
    model = nd.MLPDist(layers, optimizer=nd.SGD(0.5), seed=1, dtype="float64")
    model.build((3, 2, 1), 4, ProcessGrid.serial())
    return model


def weights(model):
    return {shard.full_name: np.array(shard.gather(array)) for shard, array in model.kept_arrays()["model"]}


def put(model, values):
    for shard, array in model.kept_arrays()["model"]:
        array[...] = values[shard.full_name].reshape(array.shape)


@pytest.fixture
def servers(monkeypatch):
    """Return the task of a master or a worker of two, with two servers of this process, made anew by `fresh`."""
    token, hosts = create_token(), []
    monkeypatch.setenv(TOKEN, token)

    def fresh():
        jobs = [JobService(lambda worker: None) for _ in range(2)]
        new = [ServiceHost([ParameterServer(), job], "127.0.0.1:0", token) for job in jobs]
        hosts.extend(new)
        addresses = [host.address for host in new]
        return jobs, lambda kind: nd.TaskSpecDef(kind, 0, None, addresses, ["b:1"], "a:1")

    yield fresh
    for host in hosts:
        host.stop()


def session(task, model, folder, hooks=(), **more):
    return nd.DistributedSession(task, model, folder, hooks, log_step_count_steps=None, **more)


def test_two_workers_in_turns(servers, tmp_path):
    """Each gradient is of the values before the other's update; the checkpoint has those of the servers."""
    jobs, task_of = servers()
    models = [built(), built()]
    put(models[1], {name: one + 1 for name, one in weights(models[1]).items()})  # which nobody sees
    held, stale, serial = weights(models[0]), [weights(models[0])] * 2, built()
    hooks = [[nd.StopAtStepHook(2 * STEPS)] for _ in range(2)]
    with session(task_of("master"), models[0], tmp_path, hooks[0], save_checkpoint_steps=3) as first:
        with session(task_of("worker"), models[1], tmp_path, hooks[1]) as second:
            assert (first.global_step, second.global_step, second.state.notes) == (0, 0, [])
            for step in range(STEPS):
                for at, one in enumerate((first, second)):
                    assert not one.should_stop()
                    one.run(models[at].train_batch, IMAGES[at, step], LABELS[at, step])
                    assert one.global_step == 2 * step + at + 1
                    put(serial, stale[at])
                    serial.train_batch(IMAGES[at, step], LABELS[at, step])
                    held = {name: held[name] + new - stale[at][name] for name, new in weights(serial).items()}
                    stale[at] = held
                    for name, value in weights(models[at]).items():
                        np.testing.assert_allclose(value, held[name], rtol=0, atol=1e-12, err_msg=name)
            assert second.should_stop()
            assert not any(job.is_over() for job in jobs)
        assert not first.should_stop()  # it is one update behind
        first.request_stop()
        first.run(models[0].train_batch, IMAGES[0, 0], LABELS[0, 0])
    assert all(job.is_over() for job in jobs)
    assert models[0].remote is None
    kept = sorted(int(re.findall(r"\d+", path.stem)[0]) for path in tmp_path.glob("checkpoint-*.h5"))
    assert kept == [0, 3, 7, 9]  # the master's updates were the odd ones, and the last
    last = weights(models[0])
    _, task_of = servers()
    for task in (task_of("master"), nd.TaskSpecDef()):  # on new servers, and without any
        again = built()
        with session(task, again, tmp_path, stop_grace_period_secs=0) as first:
            assert (first.global_step, again.uncounted) == (2 * STEPS + 1, 2 * STEPS + 1)
            for name, value in weights(again).items():
                np.testing.assert_array_equal(value, last[name])


def test_a_worker_waits_for_the_master(servers):
    """It begins with the step and the values of the master, also where a hook gives the master its first ones."""
    _, task_of = servers()
    models, seen, begins = [built(), built()], [], threading.Event()

    def work():
        with session(task_of("worker"), models[1], None) as one:
            seen.append((one.global_step, weights(models[1])))

    class Loaded(nd.train.Hook):
        def before_run(self, run):
            begins.set()
            put(models[0], {name: one + 1 for name, one in weights(models[0]).items()})

    thread = threading.Thread(target=work)
    thread.start()
    first = weights(models[0])
    with session(task_of("master"), models[0], None, [Loaded()]):
        thread.join()
    assert seen[0][0] == 0
    for name, value in seen[0][1].items():
        np.testing.assert_array_equal(value, first[name] + 1)


def test_mistakes(servers, monkeypatch):
    _, task_of = servers()
    with pytest.raises(nd.ConfigError, match="model: expected a model of layers"):
        session(task_of("worker"), None, None)
    ranks = built()
    ranks.execute(strategy="ShardedOptimizer")
    with pytest.raises(nd.ConfigError, match="model: its strategy is for synchronous ranks"):
        session(task_of("worker"), ranks, None)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(nd.ConfigError, match=r"NEONDIST_TOKEN: expected a secret .* create one"):
        session(task_of("worker"), built(), None)


def test_a_server_ends_with_its_workers():
    now, lost = [0.0], []
    job = JobService(lost.append, lambda: now[0])
    first, second = (Message({"worker": name}) for name in ("0", "1"))
    now[0] = FIRST_WAIT
    assert not job.is_over()
    now[0] += 1
    with pytest.raises(LaunchError, match="no worker has connected within 3600 s"):
        job.is_over()
    assert not job.alive(first).flag("stopping")
    now[0] += LEASE
    job.stop(Message())
    assert job.alive(second).flag("stopping")
    assert (job.is_over(), lost) == (False, [])
    now[0] += 1
    assert (job.is_over(), lost) == (False, ["0"])
    now[0] += LEASE
    with pytest.raises(LaunchError, match="no message from any worker for 120 s"):
        job.is_over()
    assert lost == ["0", "1"]
    assert job.begin(Message({"first_step": 7})).fields == job.begin(Message({"first_step": 9})).fields
    job.end(Message())
    assert job.is_over()


def test_a_server_is_ended_by_a_signal():
    script = "import neondist as nd; nd.TaskSpec().create_server(); print('goes on')"
    environ = os.environ | {"JOB_NAME": "ps", "PS_HOSTS": "127.0.0.1:0", TOKEN: create_token()}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("PServer at 127.0.0.1:")
        server.send_signal(signal.SIGTERM)
        assert finish(server, 60) == ("", None)
    assert server.returncode == 0
