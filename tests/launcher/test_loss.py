"""Lost ranks, daemons and supervisors on three fake nodes: they are reported as losses, and runs continue."""

import os
import re
import signal
import subprocess

import pytest
from availability import needs_mpirun
from cli_runs import build_command
from endless_experiment import ENDLESS_YAML
from fake_nodes import FakeNodes, needs_fake_nodes
from processes import communicate
from restart_runs import check_weights
from waiting import wait_until

from neondist.io.checkpoint.snapshots import snapshot_folder
from neondist.io.run_event_log import read_events, read_run_key

pytestmark = [needs_mpirun, needs_fake_nodes]


@pytest.fixture
def nodes(tmp_path):
    (tmp_path / "toy.yaml").write_text(ENDLESS_YAML)
    nodes = FakeNodes(tmp_path, "nodeA", "nodeB", "nodeC")
    yield nodes
    nodes.end()


@pytest.mark.long
def test_losses_on_remote_nodes(nodes, tmp_path):
    """Kill a daemon (mpirun exits with 0), stop a rank, kill a rank and the supervisor; finally compare weights."""
    folder, log = tmp_path / "out", tmp_path / "log"
    command = build_command("run", "toy.yaml", "-n", 3, "--output", "out", "--resume", "auto", "--lease", "2s")
    command += ["--set", "checkpoint.every_steps=1000"]  # progress is in snapshots

    def start_job(*words):
        with log.open("wb") as file:
            return subprocess.Popen(
                [*command, *words], cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file
            )

    def count_epochs():
        return (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0

    def list_resumes():
        return [event for event in read_events(folder) if event["event"] == "resume"]

    def wait_for_epochs(count=2):
        before = count_epochs()
        wait_until(lambda: count_epochs() >= before + count, 120, log.read_text)

    def wait_for_restart(number):
        return wait_until(
            lambda: re.search(f"restart {number} of 2: (.*); resuming from", log.read_text()), 120, log.read_text
        )[1]

    job = start_job("--restarts", "2", "--snapshot", "1")
    wait_for_epochs()
    (daemon,) = nodes.pids("daemon", "nodeB")
    os.kill(daemon, signal.SIGKILL)
    assert "nodeB" in wait_for_restart(1)
    wait_for_epochs()
    (rank,) = nodes.pids("rank", "nodeC")
    os.kill(rank, signal.SIGSTOP)
    assert wait_for_restart(2).startswith("no heartbeat from rank 2 of 3 on nodeC for 2 s")
    wait_for_epochs()
    (rank,) = nodes.pids("rank", "nodeB")
    os.kill(rank, signal.SIGKILL)
    communicate(job, 60)
    assert job.returncode == 137
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.match("error: rank [0-2] of 3 on node[A-C] ", error)  # others may end before it, as their peer has ended
    assert "--restarts" in error
    assert not nodes.pids("rank")
    assert {event["source"] for event in list_resumes()} == {"a snapshot"}

    before = len(list_resumes())
    job = start_job()
    wait_until(lambda: len(list_resumes()) > before, 120, log.read_text)
    assert list_resumes()[-1]["source"] == "a snapshot"
    wait_for_epochs()
    job.kill()
    job.wait()
    wait_until(lambda: not nodes.pids("rank") and not nodes.pids("daemon"), 120, nodes.processes)
    last_epoch = count_epochs() + 1
    job = start_job("--set", f"epochs={last_epoch}")
    communicate(job, 120)
    assert job.returncode == 0, log.read_text()
    check_weights(folder / "checkpoint.h5", tmp_path / "toy.yaml", 3, [f"epochs={last_epoch}"])
    assert not snapshot_folder(read_run_key(folder)).exists()


@pytest.mark.long
def test_changing_hosts_of_a_run(nodes, tmp_path):
    """Add a host, and one without neondist, which is excluded; then kill the daemon of the former."""
    log, hosts, discover = tmp_path / "log", tmp_path / "hosts.txt", tmp_path / "discover_hosts.sh"
    discover.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
    discover.chmod(0o755)
    hosts.write_text("nodeA:1\nnodeB:1\n")
    words = ["--hosts-from", discover, "--elastic", "2:3", "--snapshot", 1, "--cooldown", "1h"]
    with log.open("wb") as file:
        job = subprocess.Popen(
            build_command("run", "toy.yaml", "--output", "out", "--set", "checkpoint.every_steps=1000", *words),
            cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file,
        )  # fmt: skip

    def list_steps():
        return [int(path.stem[-10:]) for path in snapshot_folder(read_run_key(tmp_path / "out")).glob("*.h5")]

    def find_start(generation):
        events = [event for event in read_events(tmp_path / "out") if event.get("generation") == generation]
        return events and max(list_steps(), default=0) > before and events[0]

    before = 0
    wait_until(lambda: find_start(1), 120, log.read_text)
    (tmp_path / "bare-nodeD").touch()
    hosts.write_text("nodeA:1\nnodeB:1\nnodeD:1\nnodeC:1\n")
    for generation, ranks in ((2, {"nodeA": 1, "nodeB": 1, "nodeC": 1}), (3, {"nodeA": 1, "nodeB": 1})):
        event = wait_until(lambda number=generation: find_start(number), 120, log.read_text)
        assert (event["event"], event["hosts"]) == ("start", ranks)
        before = max(list_steps(), default=before)
        for pid in nodes.pids("daemon", "nodeC"):
            os.kill(pid, signal.SIGKILL)
    job.terminate()
    communicate(job, 60)
    assert job.returncode == 75, log.read_text()
    assert "node nodeC was lost" in log.read_text()
    assert log.read_text().count("nodeD has no ") == 1
    assert not snapshot_folder(read_run_key(tmp_path / "out")).exists()
    assert not nodes.pids("rank")
