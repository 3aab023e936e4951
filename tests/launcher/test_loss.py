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
from processes import finish
from test_restarts import weights

import neondist as nd
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.io.checkpoint.snapshots import folder_of
from neondist.io.generation_log import read_events, read_run_key

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


@pytest.mark.long
def test_losses_on_other_nodes(nodes, tmp_path):
    """A daemon (mpirun: exit code 0), a stopped rank, a rank, and the supervisor; then the weights of a run without."""
    folder, log = tmp_path / "out", tmp_path / "log"
    command = neondist("run", "toy.yaml", "-n", 3, "--output", "out", "--resume", "auto", "--lease", "2s")
    command += ["--set", "checkpoint.every_steps=1000"]  # progress is in snapshots

    def start(*words):
        with log.open("wb") as file:
            return subprocess.Popen(
                [*command, *words], cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file
            )

    def epochs():
        return (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0

    def resumes():
        return [one for one in read_events(folder) if one["event"] == "resume"]

    def trained(more=2):
        before = epochs()
        wait(lambda: epochs() >= before + more, log.read_text)

    def restarted(number):
        return wait(lambda: re.search(f"restart {number} of 2: (.*); resuming from", log.read_text()), log.read_text)[1]

    job = start("--restarts", "2", "--snapshot", "1")
    trained()
    (daemon,) = nodes.pids("daemon", "nodeB")
    os.kill(daemon, signal.SIGKILL)
    assert "nodeB" in restarted(1)
    trained()
    (rank,) = nodes.pids("rank", "nodeC")
    os.kill(rank, signal.SIGSTOP)
    assert restarted(2).startswith("no heartbeat from rank 2 of 3 on nodeC for 2 s")
    trained()
    (rank,) = nodes.pids("rank", "nodeB")
    os.kill(rank, signal.SIGKILL)
    finish(job, 60)
    assert job.returncode == 137
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.match("error: rank [0-2] of 3 on node[A-C] ", error)  # others may end before it, as their peer is gone
    assert "--restarts" in error
    assert not nodes.pids("rank")
    assert {one["source"] for one in resumes()} == {"a snapshot"}

    before = len(resumes())
    job = start()
    wait(lambda: len(resumes()) > before, log.read_text)
    assert resumes()[-1]["source"] == "a snapshot"
    trained()
    job.kill()
    job.wait()
    wait(lambda: not nodes.pids("rank") and not nodes.pids("daemon"), nodes.processes)
    most = epochs() + 1
    job = start("--set", f"epochs={most}")
    finish(job, 120)
    assert job.returncode == 0, log.read_text()

    def undisturbed(world):
        made = load_experiment(tmp_path / "toy.yaml", [f"epochs={most}"])
        made.run(nd.ProcessGrid(world), hooks=[])
        return made.model.state()

    found = weights(folder / "checkpoint.h5")
    for name, array in loopback.run(3, undisturbed)[0].items():
        assert (found[name] == array).all(), name
    assert not folder_of(read_run_key(folder)).exists()


@pytest.mark.long
def test_hosts_that_come_and_go(nodes, tmp_path):
    """A host is added, and one without neondist, which is left out; its daemon is killed; the others go on."""
    log, hosts, discover = tmp_path / "log", tmp_path / "hosts.txt", tmp_path / "discover_hosts.sh"
    discover.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
    discover.chmod(0o755)
    hosts.write_text("nodeA:1\nnodeB:1\n")
    words = ["--hosts-from", discover, "--elastic", "2:3", "--snapshot", 1, "--cool-down", "1h"]
    with log.open("wb") as file:
        job = subprocess.Popen(
            neondist("run", "toy.yaml", "--output", "out", "--set", "checkpoint.every_steps=1000", *words),
            cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file,
        )  # fmt: skip

    def steps():
        return [int(path.stem[-10:]) for path in folder_of(read_run_key(tmp_path / "out")).glob("*.h5")]

    def begun(generation):
        events = [one for one in read_events(tmp_path / "out") if one.get("generation") == generation]
        return events and max(steps(), default=0) > before and events[0]

    before = 0
    wait(lambda: begun(1), log.read_text)
    (tmp_path / "bare-nodeD").touch()
    hosts.write_text("nodeA:1\nnodeB:1\nnodeD:1\nnodeC:1\n")
    for generation, ranks in ((2, {"nodeA": 1, "nodeB": 1, "nodeC": 1}), (3, {"nodeA": 1, "nodeB": 1})):
        event = wait(lambda number=generation: begun(number), log.read_text)
        assert (event["event"], event["hosts"]) == ("start", ranks)
        before = max(steps(), default=before)
        for pid in nodes.pids("daemon", "nodeC"):
            os.kill(pid, signal.SIGKILL)
    job.terminate()
    finish(job, 60)
    assert job.returncode == 75, log.read_text()
    assert "node nodeC was lost" in log.read_text()
    assert log.read_text().count("nodeD has no ") == 1
    assert not folder_of(read_run_key(tmp_path / "out")).exists()
    assert not nodes.pids("rank")
