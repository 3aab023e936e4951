"""Script sessions that follow the hosts of their job: a stop at a step, and continuation on other ranks."""

import os
import re
import signal
import subprocess

import h5py
import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import build_command, run_in_process
from processes import communicate
from waiting import wait_until

import neondist as nd
from neondist.cli import run as run_command
from neondist.system.heartbeat import CONNECTION_VARIABLE
from neondist.system.signals import find_active_signal_recorder

MODEL = """
import neondist as nd

def train(grid, folder, last, after_step):
    dataset = nd.Synthetic((6, 5, 1), train=11, test=4)
    dataset.open(grid)
    layers = [nd.ConvLayerDist(2, 3, padding=1), nd.DropoutLayerDist(0.3), nd.BatchNormLayerDist(), nd.FCLayerDist(4)]
    optimizer = nd.Adam(learning_rate=0.05, schedule=nd.StepDecay(every_epochs=30, factor=0.5))
    model = nd.ConvnetDist(layers, optimizer=optimizer, dtype="float64", seed=3)
    model.build(dataset.sample_shape, 3, grid)
    hooks = [nd.StopAtStepHook(last)]
    with nd.DistributedSession(nd.TaskSpecDef(), model, folder, hooks, log_step_count_steps=None) as session:
        for x, y in session.batches(dataset, 3):
            after_step(session, session.run(model.train_batch, x, y, batch_size=session.batch_size))
    return model
"""
SCRIPT = """
import os, sys, time
from training import nd, train

def report(session, loss):
    if grid.rank == 0:
        print("step", session.global_step, "on", grid.size, os.environ["NEONDIST_GENERATION"], repr(loss), flush=True)
    time.sleep(0.03)

grid = nd.ProcessGrid()
train(grid, "ckpt", int(sys.argv[1]), report)
if grid.rank == 0:
    print("after the session", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "training.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost:1\n")
    return tmp_path


@needs_mpirun
@pytest.mark.long
def test_script_follows_its_hosts(folder):
    """One rank, two ranks, a SIGTERM to the supervisor, one rank: each step runs once, as in an undisturbed run."""
    log = folder / "log"
    arguments = ["run", "--hosts-from", "hosts", "--elastic", "1:4", "script.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def read_steps():
        return re.findall(r"^step (\d+) on (\d) (\d) (\S+)$", log.read_text(), re.MULTILINE)

    def wait_for_step(condition):
        wait_until(lambda: any(condition(*map(int, fields[:3])) for fields in read_steps()), 120, log.read_text)

    with log.open("wb") as file:
        supervisor = subprocess.Popen(build_command(*arguments, 10**6), cwd=folder, env=env, stdout=file, stderr=file)
        try:
            wait_for_step(lambda step, ranks, generation: step > 2)
            (folder / "hosts.new").write_text("localhost:2\n")
            (folder / "hosts.new").replace(folder / "hosts")
            wait_for_step(lambda step, ranks, generation: (ranks, generation) == (2, 2))
            supervisor.terminate()
            communicate(supervisor, 150)
            assert supervisor.returncode == 75, log.read_text()
        finally:
            supervisor.kill()
        (folder / "hosts").write_text("localhost:1\n")
        last = len(read_steps()) + 3
        subprocess.run(
            build_command(*arguments, last), cwd=folder, env=env, stdout=file, stderr=file, timeout=150, check=True
        )
    text = log.read_text()
    assert "hosts changed: localhost added; restarting the script, on 2 ranks" in text
    assert text.count("stopped at step") == 2
    assert text.count("after the session") == 1
    assert [int(fields[0]) for fields in read_steps()] == list(range(1, last + 1))
    losses: list[float] = []
    reference = train_serially(folder, last, losses)
    np.testing.assert_allclose([float(fields[3]) for fields in read_steps()], losses, rtol=1e-9)
    with h5py.File(folder / "ckpt" / "checkpoint.h5") as file:
        for name, array in reference.state().items():
            np.testing.assert_allclose(file["model"][name][()], array, rtol=1e-9, atol=1e-12, err_msg=name)


def train_serially(folder, last, losses):
    """Return the model of an uninterrupted session on one rank."""
    scope = {}
    exec(compile(MODEL, "training.py", "exec"), scope)
    return scope["train"](nd.ProcessGrid.serial(), None, last, lambda session, loss: losses.append(loss))


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["run", "-n", "2", "a.py", "--set", "b.py"], ["a.py", "--set", "b.py"]),
        (["run", "--hosts-from", "find.py", "--import", "own.py", "a.yaml"], []),
        (["run", "--set", "a=b.py", "c=d.py", "a.yaml", "--output", "out.py"], []),
        (["launch", "nodes.yaml", "--restarts", "2", "a.py", "1"], ["a.py", "1"]),
        (["evaluate", "a.py"], []),
        ([], []),
    ],
)
def test_split_of_script_arguments(words, script):
    assert run_command.split_at_script(words) == (words[: len(words) - max(0, len(script) - 1)], script)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "none.py: no such script"),
        (["--set", "epochs=2", "script.py"], "--set, --memory and --strategy: apply to experiments"),
        (["--virtual", 2, "script.py"], "--virtual: applies to experiments; leave it out, and put a script's own"),
        (["--resume", "script.py"], "--resume: applies to experiments"),
        (["--time-limit", "1h", "script.py"], "--time-limit: applies to experiments"),
        (["--hosts-from", "hosts", "--spares", 1, "script.py"], "--spares 1: hosts has 1 slot,"),
        (["--restarts", 2, "script.py"], "give their number with -n"),
    ],
)
def test_options_not_available_to_scripts(folder, words, message):
    code, _, err = run_in_process(folder, "run", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_script_inside_an_mpi_job(folder, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    code, _, err = run_in_process(folder, "run", "script.py")
    assert (code, err) == (2, "error: inside an MPI job, run the script directly: python script.py\n")


@pytest.fixture
def read_messages(monkeypatch):
    """Make this process a rank with a supervisor; return a function that reads the messages to the supervisor."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(CONNECTION_VARIABLE, f"{writing}:{os.getpid()}")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield lambda: os.read(reading, 1000).decode().split()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.close(reading)
    os.close(writing)


def run_session(folder, *hooks, signal_step=None):
    """Run a session, optionally with a signal to this process after a step; return its steps."""
    steps = []
    hooks = [nd.StopAtStepHook(5), *hooks]
    with nd.DistributedSession(nd.TaskSpecDef(), None, folder, hooks, log_step_count_steps=None) as session:
        while not session.should_stop():
            session.run(lambda: steps.append(session.global_step + 1))
            if steps[-1] == signal_step:
                os.kill(os.getpid(), signal.SIGUSR1)
    return steps


@pytest.mark.parametrize("has_hook", [False, True], ids=["", "with a hook of the script's"])
def test_supervisor_stops_session_and_script(tmp_path, read_messages, has_hook, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_session(tmp_path, *([nd.train.StopOnSignal()] if has_hook else []), signal_step=3)
    assert exit_info.value.code == 75
    assert read_messages() == ["listens", "ignores"]
    assert "stopped at step 4: received SIGUSR1" in capsys.readouterr().out


def test_signal_between_sessions_stops_the_next_one(tmp_path, read_messages):
    assert run_session(tmp_path / "a") == [1, 2, 3, 4, 5]
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        run_session(tmp_path / "b")
    assert read_messages() == ["listens", "ignores"] * 2


def test_session_without_checkpoints_is_not_interrupted(read_messages):
    assert run_session(None) == [1, 2, 3, 4, 5]
    assert find_active_signal_recorder("SIGUSR1") is None
    with pytest.raises(BlockingIOError):
        read_messages()


def test_session_without_a_supervisor_handles_no_signals(tmp_path):
    assert run_session(tmp_path) == [1, 2, 3, 4, 5]
    assert find_active_signal_recorder("SIGUSR1") is None
