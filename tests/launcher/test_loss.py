"""Lost ranks, daemons and supervisors on three nodes of this machine are told as losses, and runs go on after them."""

import os
import re
import signal
import subprocess
import time

import pytest
from cli_runs import neondist
from endless import TOY
from fake_nodes import FakeNodes, missing, needs_mpirun
from test_restarts import weights

import neondist as nd
from neondist.comm import loopback
from neondist.config import load_experiment

pytestmark = [needs_mpirun, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
def nodes(tmp_path):
    (tmp_path / "toy.yaml").write_text(TOY)
    made = FakeNodes(tmp_path, "nodeA", "nodeB", "nodeC")
    yield made
    made.end()


def wait(condition, what, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def test_losses_on_other_nodes(nodes, tmp_path):
    """A daemon (mpirun: exit code 0), a stopped rank, a rank, and the supervisor; then the weights of a run without."""
    folder, log = tmp_path / "out", tmp_path / "log"
    command = neondist("run", "toy.yaml", "-n", 3, "--output", "out", "--resume", "auto", "--lease", "2s")

    def start(*words):
        with log.open("wb") as file:
            return subprocess.Popen(
                [*command, *words], cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file
            )

    def epochs():
        return (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0

    def trained(more=2):
        before = epochs()
        wait(lambda: epochs() >= before + more, log.read_text)

    def restarted(number):
        return wait(lambda: re.search(f"restart {number} of 2: (.*); goes on from", log.read_text()), log.read_text)[1]

    job = start("--restarts", "2")
    trained()
    (daemon,) = nodes.pids("daemon", "nodeB")
    os.kill(daemon, signal.SIGKILL)
    assert "nodeB" in restarted(1)
    trained()
    (rank,) = nodes.pids("rank", "nodeC")
    os.kill(rank, signal.SIGSTOP)
    assert restarted(2).startswith("rank 2 of 3 on nodeC has given no sign of life for 2 s")
    trained()
    (rank,) = nodes.pids("rank", "nodeB")
    os.kill(rank, signal.SIGKILL)
    assert job.wait(60) == 137
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.match("error: rank [0-2] of 3 on node[A-C] ", error)  # others may end before it, as their peer is gone
    assert "--restarts" in error
    assert not nodes.pids("rank")

    job = start()
    trained()
    job.kill()
    job.wait()
    wait(lambda: not nodes.pids("rank") and not nodes.pids("daemon"), nodes.processes)
    most = epochs() + 1
    assert start("--set", f"epochs={most}").wait(120) == 0, log.read_text()

    def undisturbed(world):
        made = load_experiment(tmp_path / "toy.yaml", [f"epochs={most}"])
        made.run(nd.ProcessGrid(world), hooks=[])
        return made.model.state()

    found = weights(folder / "checkpoint.h5")
    for name, array in loopback.run(3, undisturbed)[0].items():
        assert (found[name] == array).all(), name
