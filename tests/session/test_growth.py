"""A script with a session follows the hosts of its job: it stops at a step, and goes on from there on other ranks."""

import os
import re
import signal
import subprocess
import time

import h5py
import numpy as np
import pytest
from cli_runs import here, needs_mpirun, neondist
from processes import finish

import neondist as nd
from neondist.cli import run as run_command
from neondist.system.heartbeat import CONNECTION
from neondist.system.signals import active_handler

MODEL = """
import neondist as nd

def trained(grid, folder, last, each):
    dataset = nd.Synthetic((6, 5, 1), train=11, test=4)
    dataset.open(grid)
    layers = [nd.ConvLayerDist(2, 3, padding=1), nd.DropoutLayerDist(0.3), nd.BatchNormLayerDist(), nd.FCLayerDist(4)]
    optimizer = nd.Adam(learning_rate=0.05, schedule=nd.StepDecay(every_epochs=30, factor=0.5))
    model = nd.ConvnetDist(layers, optimizer=optimizer, dtype="float64", seed=3)
    model.build(dataset.sample_shape, 3, grid)
    hooks = [nd.StopAtStepHook(last)]
    with nd.DistributedSession(nd.TaskSpecDef(), model, folder, hooks, log_step_count_steps=None) as session:
        for x, y in session.batches(dataset, 3):
            each(session, session.run(model.train_batch, x, y, batch_size=session.batch_size))
    return model
"""
SCRIPT = """
import os, sys, time
from trained import nd, trained

def each(session, loss):
    if grid.rank == 0:
        print("step", session.global_step, "on", grid.size, os.environ["NEONDIST_GENERATION"], repr(loss), flush=True)
    time.sleep(0.03)

grid = nd.ProcessGrid()
trained(grid, "ckpt", int(sys.argv[1]), each)
if grid.rank == 0:
    print("after the session", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trained.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost:1\n")
    return tmp_path


@needs_mpirun
@pytest.mark.long
def test_a_script_follows_its_hosts(folder):
    """One rank, two, a SIGTERM of the supervisor, and one rank: each step is done once, with the numbers of one run."""
    log = folder / "log"
    words = ["run", "--hosts-from", "hosts", "--elastic", "1:4", "script.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def steps():
        return re.findall(r"^step (\d+) on (\d) (\d) (\S+)$", log.read_text(), re.MULTILINE)

    def trained(condition):
        end = time.monotonic() + 120
        while not [one for one in steps() if condition(*map(int, one[:3]))]:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    with log.open("wb") as file:
        job = subprocess.Popen(neondist(*words, 10**6), cwd=folder, env=env, stdout=file, stderr=file)
        try:
            trained(lambda step, ranks, generation: step > 2)
            (folder / "hosts.new").write_text("localhost:2\n")
            (folder / "hosts.new").replace(folder / "hosts")
            trained(lambda step, ranks, generation: (ranks, generation) == (2, 2))
            job.terminate()
            finish(job, 150)
            assert job.returncode == 75, log.read_text()
        finally:
            job.kill()
        (folder / "hosts").write_text("localhost:1\n")
        last = len(steps()) + 3
        subprocess.run(neondist(*words, last), cwd=folder, env=env, stdout=file, stderr=file, timeout=150, check=True)
    text = log.read_text()
    assert "hosts changed: localhost added; restarting the script, on 2 ranks" in text
    assert text.count("stopped at step") == 2
    assert text.count("after the session") == 1
    assert [int(one[0]) for one in steps()] == list(range(1, last + 1))
    losses: list[float] = []
    serial = serially(folder, last, losses)
    np.testing.assert_allclose([float(one[3]) for one in steps()], losses, rtol=1e-9)
    with h5py.File(folder / "ckpt" / "checkpoint.h5") as file:
        for name, array in serial.state().items():
            np.testing.assert_allclose(file["model"][name][()], array, rtol=1e-9, atol=1e-12, err_msg=name)


def serially(folder, last, losses):
    """Return the model of a session on one rank that nothing disturbs."""
    scope = {}
    exec(compile(MODEL, "trained.py", "exec"), scope)
    return scope["trained"](nd.ProcessGrid.serial(), None, last, lambda session, loss: losses.append(loss))


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
def test_where_a_script_begins(words, script):
    assert run_command.split_script(words) == (words[: len(words) - max(0, len(script) - 1)], script)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "none.py: no such script"),
        (["--set", "epochs=2", "script.py"], "--set, --memory and --strategy: are for experiments"),
        (["--virtual", 2, "script.py"], "--virtual: is for experiments; put a script's own arguments"),
        (["--resume", "script.py"], "--resume: is for experiments"),
        (["--time-limit", "1h", "script.py"], "--time-limit: is for experiments"),
        (["--hosts-from", "hosts", "--spares", 1, "script.py"], "--spares 1: hosts has 1 slots"),
        (["--restarts", 2, "script.py"], "give their number with -n"),
    ],
)
def test_options_that_a_script_does_not_take(folder, words, message):
    code, _, err = here(folder, "run", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_a_script_inside_of_a_job(folder, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    code, _, err = here(folder, "run", "script.py")
    assert (code, err) == (2, "error: inside an MPI job each rank runs a script itself: python script.py\n")


@pytest.fixture
def words_sent(monkeypatch):
    """Let this process be a rank with a supervisor; return a function that returns what this one has heard."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(CONNECTION, f"{writing}:{os.getpid()}")
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield lambda: os.read(reading, 1000).decode().split()
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(reading)
    os.close(writing)


def steps(folder, *hooks, at=None):
    """Run a session, with a signal in its middle, and return its steps."""
    found = []
    hooks = [nd.StopAtStepHook(5), *hooks]
    with nd.DistributedSession(nd.TaskSpecDef(), None, folder, hooks, log_step_count_steps=None) as session:
        while not session.should_stop():
            session.run(lambda: found.append(session.global_step + 1))
            if found[-1] == at:
                os.kill(os.getpid(), signal.SIGUSR1)
    return found


@pytest.mark.parametrize("own", [False, True], ids=["", "with a hook of the script's"])
def test_a_supervisor_ends_a_session_and_its_script(tmp_path, words_sent, own, capsys):
    with pytest.raises(SystemExit) as end:
        steps(tmp_path, *([nd.train.StopOnSignal()] if own else []), at=3)
    assert end.value.code == 75
    assert words_sent() == ["listens", "ignores"]
    assert "stopped at step 4: received SIGUSR1" in capsys.readouterr().out


def test_a_signal_between_two_sessions_ends_the_next_one(tmp_path, words_sent):
    assert steps(tmp_path / "a") == [1, 2, 3, 4, 5]
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        steps(tmp_path / "b")
    assert words_sent() == ["listens", "ignores"] * 2


def test_a_session_that_keeps_nothing_is_not_interrupted(words_sent):
    """Nor is one whose process has no supervisor."""
    assert steps(None) == [1, 2, 3, 4, 5]
    assert active_handler("SIGUSR1") is None
    with pytest.raises(BlockingIOError):
        words_sent()


def test_a_session_without_a_supervisor_hears_no_signals(tmp_path):
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert active_handler("SIGUSR1") is None
