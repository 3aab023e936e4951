"""Sessions of two workers on parameter servers: updates by stale gradients, in the order of arrival."""

import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from processes import communicate

import neondist as nd
from neondist.comm import ProcessGrid
from neondist.errors import LaunchError
from neondist.services.job import FIRST_WORKER_TIMEOUT_SECONDS, WORKER_LEASE_SECONDS, JobService
from neondist.services.message import Message
from neondist.services.server import ParameterServer
from neondist.services.wire import TOKEN_VARIABLE, ServiceHost, create_token

STEPS = 4
IMAGES = np.random.default_rng(0).normal(size=(2, STEPS, 4, 3, 2, 1))
LABELS = np.random.default_rng(1).integers(0, 3, size=(2, STEPS, 4))


def build_model(optimizer=None):
    layers = [nd.FCLayerDist(5, activation=nd.Tanh()), nd.FCLayerDist(3)]
    model = nd.MLPDist(layers, optimizer=optimizer or nd.SGD(0.5), seed=1, dtype="float64")
    model.build((3, 2, 1), 4, ProcessGrid.serial())
    return model


def copy_weights(model):
    return {shard.full_name: np.array(shard.gather(array)) for shard, array in model.checkpoint_arrays()["model"]}


def set_weights(model, values):
    for shard, array in model.checkpoint_arrays()["model"]:
        array[...] = values[shard.full_name].reshape(array.shape)


@pytest.fixture
def servers(monkeypatch):
    """Function that starts two servers in this process; it returns their jobs and a function that makes tasks."""
    token, hosts = create_token(), []
    monkeypatch.setenv(TOKEN_VARIABLE, token)

    def start_servers():
        jobs = [JobService(lambda worker: None) for _ in range(2)]
        started = [ServiceHost([ParameterServer(), job], "127.0.0.1:0", token) for job in jobs]
        hosts.extend(started)
        addresses = [host.address for host in started]
        return jobs, lambda kind: nd.TaskSpecDef(kind, 0, None, addresses, ["b:1"], "a:1")

    yield start_servers
    for host in hosts:
        host.stop()


def create_session(task, model, folder, hooks=(), **options):
    return nd.DistributedSession(task, model, folder, hooks, log_step_count_steps=None, **options)


def test_alternating_workers(servers, tmp_path):
    """Gradients use the weights before the other worker's update; the checkpoint holds those of the servers."""
    jobs, task_of = servers()
    models = [build_model(), build_model()]
    set_weights(models[1], {name: array + 1 for name, array in copy_weights(models[1]).items()})  # never used
    server_weights, stale_weights, serial = copy_weights(models[0]), [copy_weights(models[0])] * 2, build_model()
    hooks = [[nd.StopAtStepHook(2 * STEPS)] for _ in range(2)]
    with create_session(task_of("master"), models[0], tmp_path, hooks[0], save_checkpoint_steps=3) as first:
        with create_session(task_of("worker"), models[1], tmp_path, hooks[1]) as second:
            assert (first.global_step, second.global_step, second.state.start_messages) == (0, 0, [])
            for step in range(STEPS):
                for worker, session in enumerate((first, second)):
                    assert not session.should_stop()
                    session.run(models[worker].train_batch, IMAGES[worker, step], LABELS[worker, step])
                    assert session.global_step == 2 * step + worker + 1
                    set_weights(serial, stale_weights[worker])
                    serial.train_batch(IMAGES[worker, step], LABELS[worker, step])
                    server_weights = {
                        name: server_weights[name] + updated - stale_weights[worker][name]
                        for name, updated in copy_weights(serial).items()
                    }
                    stale_weights[worker] = server_weights
                    for name, value in copy_weights(models[worker]).items():
                        np.testing.assert_allclose(value, server_weights[name], rtol=0, atol=1e-12, err_msg=name)
            assert second.should_stop()
            assert not any(job.remove_lost_workers_and_check_end() for job in jobs)
        assert not first.should_stop()  # one update behind
        first.request_stop()
        first.run(models[0].train_batch, IMAGES[0, 0], LABELS[0, 0])
    assert all(job.remove_lost_workers_and_check_end() for job in jobs)
    assert models[0].remote_update is None
    saved_steps = sorted(int(re.findall(r"\d+", path.stem)[0]) for path in tmp_path.glob("checkpoint-*.h5"))
    assert saved_steps == [0, 3, 7, 9]  # the master's updates were the odd ones, and the last
    final_weights = copy_weights(models[0])
    _, task_of = servers()
    for task in (task_of("master"), nd.TaskSpecDef()):  # on new servers, and without servers
        resumed = build_model()
        with create_session(task, resumed, tmp_path, stop_grace_period_secs=0) as first:
            assert (first.global_step, resumed.steps_without_optimizer) == (2 * STEPS + 1, 0)
            for name, value in copy_weights(resumed).items():
                np.testing.assert_array_equal(value, final_weights[name])


def test_optimizer_state_moves_to_and_from_servers(servers, tmp_path):
    """Train two steps each on servers, without servers, and on new servers; expect those of one process."""

    def train(model, session):
        for _ in range(2):
            session.run(model.train_batch, IMAGES[0, session.global_step % STEPS], LABELS[0, 0])

    serial = build_model(nd.Adam(0.1))
    for step in range(6):
        serial.train_batch(IMAGES[0, step % STEPS], LABELS[0, 0])
    for part in range(3):
        task = nd.TaskSpecDef() if part == 1 else servers()[1]("master")
        model = build_model(nd.Adam(0.1))
        with create_session(task, model, tmp_path, stop_grace_period_secs=0) as session:
            train(model, session)
            assert (session.global_step, model.steps_without_optimizer) == (2 * part + 2, 0)
    for name, value in (copy_weights(model) | model.optimizer_state()).items():
        expected = (copy_weights(serial) | serial.optimizer_state())[name]
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12, err_msg=name)


def test_worker_waits_for_the_master(servers):
    """The worker starts at the step and with the weights of the master, also if a hook sets them."""
    _, task_of = servers()
    models, observed, started = [build_model(), build_model()], [], threading.Event()

    def run_worker():
        with create_session(task_of("worker"), models[1], None) as session:
            observed.append((session.global_step, copy_weights(models[1])))

    class SetWeights(nd.train.Hook):
        def before_run(self, run):
            started.set()
            set_weights(models[0], {name: array + 1 for name, array in copy_weights(models[0]).items()})

    thread = threading.Thread(target=run_worker)
    thread.start()
    first = copy_weights(models[0])
    with create_session(task_of("master"), models[0], None, [SetWeights()]):
        thread.join()
    assert observed[0][0] == 0
    for name, value in observed[0][1].items():
        np.testing.assert_array_equal(value, first[name] + 1)


def test_invalid_sessions(servers, monkeypatch):
    _, task_of = servers()
    with pytest.raises(nd.ConfigError, match="model: expected a model of layers"):
        create_session(task_of("worker"), None, None)
    synchronous_model = build_model()
    synchronous_model.configure_execution(strategy="ShardedOptimizer")
    with pytest.raises(nd.ConfigError, match="model: its strategy is for synchronous ranks"):
        create_session(task_of("worker"), synchronous_model, None)
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(nd.ConfigError, match=r"NEONDIST_TOKEN: expected a secret .* create one"):
        create_session(task_of("worker"), build_model(), None)


def test_server_ends_with_its_workers():
    now, lost = [0.0], []
    job = JobService(lost.append, lambda: now[0])
    first, second = (Message({"worker": name}) for name in ("0", "1"))
    now[0] = FIRST_WORKER_TIMEOUT_SECONDS
    assert not job.remove_lost_workers_and_check_end()
    now[0] += 1
    with pytest.raises(LaunchError, match="no worker has connected within 3600 s"):
        job.remove_lost_workers_and_check_end()
    assert not job.record_heartbeat(first).flag("stopping")
    now[0] += WORKER_LEASE_SECONDS
    job.request_stop(Message())
    assert job.record_heartbeat(second).flag("stopping")
    assert (job.remove_lost_workers_and_check_end(), lost) == (False, [])
    now[0] += 1
    assert (job.remove_lost_workers_and_check_end(), lost) == (False, ["0"])
    now[0] += WORKER_LEASE_SECONDS
    with pytest.raises(LaunchError, match="no message from any worker for 120 s"):
        job.remove_lost_workers_and_check_end()
    assert lost == ["0", "1"]
    assert job.allow_start(Message({"first_step": 7})).fields == job.allow_start(Message({"first_step": 9})).fields
    job.end_job(Message())
    assert job.remove_lost_workers_and_check_end()


def test_signal_ends_a_server():
    script = "import neondist as nd; nd.TaskSpec().create_server(); print('goes on')"
    environ = os.environ | {"JOB_NAME": "ps", "PS_HOSTS": "127.0.0.1:0", TOKEN_VARIABLE: create_token()}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("PServer at 127.0.0.1:")
        server.send_signal(signal.SIGTERM)
        assert communicate(server, 60) == ("", None)
    assert server.returncode == 0


@pytest.mark.parametrize(("kind", "statement", "message"), [
    ("ps", "task.create_server()", "NEONDIST_TOKEN: expected a secret"),
    ("worker", "nd.ProcessGrid(task.create_server())\nnd.DistributedSession(task, save_checkpoint_steps=0)",
     "DistributedSession: save_checkpoint_steps: expected an integer of at least 1"),
])  # fmt: skip
def test_errors_of_scripts(tmp_path, kind, statement, message):
    """Print one message with the line of the script, and exit with code 2."""
    (tmp_path / "script.py").write_text(f"import neondist as nd\ntask = nd.TaskSpec()\n{statement}\n")
    environ = os.environ | {"JOB_NAME": kind, "PS_HOSTS": "127.0.0.1:0", "WORKER_HOSTS": "127.0.0.1:1"}
    environ.pop(TOKEN_VARIABLE, None)
    command = [sys.executable, "script.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("error: ")
    assert f"script.py:{2 + len(statement.splitlines())}: {message}" in result.stderr
