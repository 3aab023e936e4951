"""Runs killed at any moment and resumed, several times: the final weights are those of an uninterrupted run."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from availability import needs_mpirun
from endless_experiment import ENDLESS_YAML
from processes import communicate, is_alive, kill, list_children
from waiting import wait_until

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.config import load_experiment
from neondist.io.checkpoint import open_checkpoint

KILLS, RANKS = 4, 2


pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), needs_mpirun]


class Job:
    """Run under mpirun, to be killed."""

    def __init__(self, folder, *words):
        command = [sys.executable, "-m", "neondist", "run", "toy.yaml", "-n", str(RANKS), "--output", "out", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def kill(self, target, rng):
        """Kill a rank, all ranks, mpirun, or all processes; return those that were running."""
        below = list_children(self.process.pid)
        ranks = [pid for pid, name in below if name.startswith("python")]
        launchers = [pid for pid, name in below if name.startswith(("mpi", "prte"))]
        processes = [*ranks, *launchers]
        victims = {"rank": ranks and [rng.choice(ranks)], "ranks": ranks, "mpirun": launchers}
        kill(victims.get(target) or [self.process.pid, *processes])  # all if none has started yet
        return processes

    def is_writing(self):
        """Whether a rank writes an unnamed file, which becomes a checkpoint."""
        for pid, _ in list_children(self.process.pid):
            with contextlib.suppress(OSError):  # the process or the file is closed
                if any("/out/#" in os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")):
                    return True
        return False

    def end(self):
        """Wait until the command ends; return its exit code and stderr."""
        err = communicate(self.process, 60)[1]
        return self.process.returncode, err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(ENDLESS_YAML)
    return tmp_path


def read_checkpoint_step(path):
    """Return step and epoch of a checkpoint; fail if it cannot be read."""
    with open_checkpoint(path, SingleTransport()) as file:
        return json.loads(file.contents.texts["position"])["step"], json.loads(file.contents.texts["position"])["epoch"]


def read_mtime(path):
    """Return the modification time of a file, 0 before it exists."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.long
def test_run_survives_kills_at_any_moment(folder):
    rng = random.Random(6)
    checkpoint = folder / "out" / "checkpoint.h5"
    victims = itertools.cycle(["rank", "ranks", "mpirun", "everything"])
    at_write, last = 0, (0, 0)
    for number, target in enumerate(victims):
        if (number >= KILLS and at_write >= 2) or number == 4 * KILLS:
            break
        job = Job(folder, *(["--resume"] if (folder / "out" / "environment.json").exists() else []))
        if number % 4 == 3:  # within the first seconds, possibly during the start
            time.sleep(rng.uniform(0.3, 3))
        else:
            since = read_mtime(checkpoint)
            wait_until(lambda since=since: read_mtime(checkpoint) > since, 120, interval=0.001)
            if number % 2:
                time.sleep(rng.uniform(0, 0.1))
            else:
                wait_until(job.is_writing, 120, interval=0.001)
        at_write += job.is_writing()
        processes = job.kill(target, rng)
        code, err = job.end()
        assert code != 0, err
        assert code != 2, err
        wait_until(lambda processes=processes: not any(map(is_alive, processes)))
        assert not list(checkpoint.parent.glob("*.partial"))
        if checkpoint.exists():
            last = read_checkpoint_step(checkpoint)
        for older in checkpoint.parent.glob("checkpoint-*.h5"):
            read_checkpoint_step(older)
    assert at_write >= 2  # some interrupted a write
    epochs = last[1] + 1
    job = Job(folder, "--resume", "--set", f"epochs={epochs}")
    communicate(job.process, 120)
    assert job.process.returncode == 0
    check_results(folder, epochs)


def check_results(folder, epochs):
    """Compare weights, optimizer slots and the log with those of an uninterrupted run."""

    def train(world):
        experiment = load_experiment(folder / "toy.yaml", [f"epochs={epochs}"])
        history = experiment.run(nd.ProcessGrid(world), hooks=[]).history
        return experiment.model.state(), experiment.model.optimizer_state(), history

    state, slots, history = loopback.run(RANKS, train)[0]
    import h5py

    with h5py.File(folder / "out" / "checkpoint.h5") as file:
        for group, arrays in (("model", state), ("optimizer", slots)):
            for name, array in arrays.items():
                np.testing.assert_array_equal(file[group][name][()], array, err_msg=name)
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    for key in ("step", "train_loss", "test_loss", "test_error", "bytes_sent"):
        assert [line[key] for line in lines] == [record[key] for record in history], key
