"""kill -9 at any moment, several times, and --resume after each: in the end the weights of an undisturbed run."""

import itertools
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from endless import TOY
from processes import alive, children, finish, kill

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.config import load_experiment
from neondist.errors import LaunchError
from neondist.io.checkpoint import open_checkpoint
from neondist.launcher.mpirun import find_mpirun

KILLS, RANKS = 4, 2


def _needs_mpirun():
    try:
        find_mpirun(os.environ)
    except LaunchError:
        return True
    return False


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(_needs_mpirun(), reason="needs mpirun"),
]


class Job:
    """A run of the toy under mpirun, in a folder, that is there to be killed."""

    def __init__(self, folder, *words):
        command = [sys.executable, "-m", "neondist", "run", "toy.yaml", "-n", str(RANKS), "--output", "out", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def kill(self, whom, rng):
        """Kill a rank, all ranks, mpirun, or everything; return all processes that there were."""
        below = children(self.process.pid)
        ranks = [pid for pid, name in below if name.startswith("python")]
        launchers = [pid for pid, name in below if name.startswith(("mpi", "prte"))]
        everything = [*ranks, *launchers]
        chosen = {"rank": ranks and [rng.choice(ranks)], "ranks": ranks, "mpirun": launchers}
        kill(chosen.get(whom) or [self.process.pid, *everything])  # everything, too, where it has not come so far
        return everything

    def end(self):
        """Wait until the command ends; return its exit code and what it said."""
        said = finish(self.process, 60)[1]
        return self.process.returncode, said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


def step_of(path):
    """The step of a checkpoint; fails if it cannot be read."""
    with open_checkpoint(path, SingleTransport()) as file:
        return json.loads(file.facts.texts["position"])["step"], json.loads(file.facts.texts["position"])["epoch"]


def written(path):
    """When a file was written; 0 before."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.001)


@pytest.mark.long
def test_killed_at_any_moment(folder):
    rng = random.Random(6)
    checkpoint = folder / "out" / "checkpoint.h5"
    writing = checkpoint.with_name("checkpoint.h5.partial")
    victims = itertools.cycle(["rank", "ranks", "mpirun", "everything"])
    at_write, last = 0, (0, 0)
    for number, whom in zip(range(KILLS), victims, strict=False):
        job = Job(folder, *(["--resume"] if (folder / "out" / "environment.json").exists() else []))
        if number % 4 == 3:  # anywhere in the first seconds, starting up included
            time.sleep(rng.uniform(0.3, 3))
        else:
            since = written(checkpoint)
            wait_for(lambda since=since: written(checkpoint) > since)
            if number % 2:
                time.sleep(rng.uniform(0, 0.1))
            else:
                wait_for(writing.exists)
        at_write += writing.exists()
        everything = job.kill(whom, rng)
        began = time.monotonic()
        code, said = job.end()
        assert code != 0, said
        assert code != 2, said
        while any(map(alive, everything)):
            assert time.monotonic() < began + 60, "something of the job is left"
            time.sleep(0.02)
        if checkpoint.exists():
            last = step_of(checkpoint)
        for older in checkpoint.parent.glob("checkpoint-*.h5"):
            step_of(older)
    assert at_write >= 2  # some came in the middle of a write
    epochs = last[1] + 1
    job = Job(folder, "--resume", "--set", f"epochs={epochs}")
    finish(job.process, 120)
    assert job.process.returncode == 0
    compare(folder, epochs)


def compare(folder, epochs):
    """Weights, slots and the log are those of a run that nobody disturbed."""

    def body(world):
        made = load_experiment(folder / "toy.yaml", [f"epochs={epochs}"])
        history = made.run(nd.ProcessGrid(world), hooks=[]).history
        return made.model.state(), made.model.optimizer_state(), history

    state, slots, history = loopback.run(RANKS, body)[0]
    import h5py

    with h5py.File(folder / "out" / "checkpoint.h5") as file:
        for group, arrays in (("model", state), ("optimizer", slots)):
            for name, array in arrays.items():
                np.testing.assert_array_equal(file[group][name][()], array, err_msg=name)
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    for key in ("step", "train_loss", "test_loss", "test_error", "bytes_sent"):
        assert [line[key] for line in lines] == [record[key] for record in history], key
