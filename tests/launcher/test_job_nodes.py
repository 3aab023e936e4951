"""Workers and servers on the nodes of a resource file: lost processes and nodes, signals, and tiles."""

import argparse
import json
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from availability import needs_mpirun
from case_selection import select_cases
from cli_runs import build_command, run_in_process, start_command
from fake_nodes import FakeNodes, needs_fake_nodes
from processes import communicate
from sshd import SshServers, create_environment, needs_sshd
from waiting import wait_until

import yaml
from neondist.cluster.hosts import HostSource
from neondist.errors import LaunchError
from neondist.launcher.job_nodes import JobNode, JobNodes, NodeLostError, assign_workers_to_slots, checked_job_nodes
from neondist.launcher.remote import remote_side_command
from neondist.launcher.scaling import open_elastic_slots, reject_unreachable_maximum
from neondist.launcher.slots import WorkerBounds
from neondist.version import __version__ as VERSION

EXPERIMENT = """!FitExperiment
dataset: !Synthetic {shape: [6, 6, 1], classes: 2, train: 48, test: 4}
model: !ConvnetDist {layers: [!FCLayerDist {out_features: 2, activation: !Slow {}}], optimizer: !SGD {}}
grid: {replicas: 3}
batch_size: 4
epochs: 4
strategy: !PS {sync: false}
"""
SLOW_ACTIVATION_MODULE = """
import pathlib
import time

import neondist as nd


class Slow(nd.Activation):
    "The identity."

    def fprop(self, z):
        time.sleep(0.2)
        while pathlib.Path("hold").exists():
            time.sleep(0.05)
        return z

    def bprop(self, y, dy):
        return dy
"""


def resources(**cpus):
    chief = {"address": platform.node(), "chief": True}
    nodes = [
        chief,
        *({"address": node, "cpus": list(range(count)), "ssh_config": "all"} for node, count in cpus.items()),
    ]
    return {"nodes": nodes, "ssh": {"all": {"shared_envs": {"ODD": "it's $HOME"}}}}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    (folder / "job.yaml").write_text(EXPERIMENT)
    (folder / "slow.py").write_text(SLOW_ACTIVATION_MODULE)
    (folder / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=1, nodeC=1)))
    return folder


@pytest.fixture
def nodes(tmp_path):
    nodes = FakeNodes(tmp_path, "nodeB", "nodeC")
    yield nodes
    nodes.end()


def list_processes(nodes, node, kind):
    """Return the processes of a kind on a node: 'ps', 'master', or 'run' for a worker."""
    processes = []
    for _, host, pid in nodes.processes():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            if host == node and kind in words and "neondist.launcher.remote" not in words:
                processes.append(process)
    return processes


@needs_fake_nodes
@needs_mpirun
@pytest.mark.long
def test_run_survives_lost_processes_and_a_lost_node(folder, nodes):
    """Kill a worker and a server of nodeB, then nodeC, whose worker and server move to other nodes."""
    job = start_command(
        build_command("launch", "nodes.yaml", "job.yaml", "--import", "slow.py", "--output", "out"), folder, **nodes.env
    )
    try:
        wait_until(lambda: (folder / "out" / "metrics.jsonl").is_file() and list_processes(nodes, "nodeC", "run"))
        for kind in ("run", "ps"):
            (process,) = wait_until(lambda kind=kind: list_processes(nodes, "nodeB", kind))
            process.kill()
            process.wait()
            wait_until(lambda kind=kind: list_processes(nodes, "nodeB", kind))
        nodes.switch_off("nodeC")
        out, err = communicate(job, 240)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert "applied: 48 records in each of 4 epochs, each once" in out
    assert "parameter server 1 was killed (SIGKILL); restarted" in err
    assert "worker 1 was killed (SIGKILL); restarted\n" in err
    assert "nodeC cannot be reached; continuing without it, from the servers' checkpoint" in err
    assert not nodes.processes()


@needs_fake_nodes
@needs_mpirun
@pytest.mark.parametrize(("number", "command"), select_cases([
    (signal.SIGTERM, ["launch", "nodes.yaml", "job.yaml", "-n", 4]),
    (signal.SIGKILL, ["run", "job.yaml", "--hosts-from", "hosts", "-n", 4]),
]))  # fmt: skip
@pytest.mark.long
def test_all_nodes_end_with_the_job(folder, nodes, number, command):
    """Stop a job, which may be resumed, or kill it: no process remains on any node."""
    (folder / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=4)))
    tiles = "grid: {replicas: 2, rows: 2, cols: 1}"
    (folder / "job.yaml").write_text(EXPERIMENT.replace("grid: {replicas: 3}", tiles))
    (folder / "hosts").write_text("nodeB:4\n")
    job = start_command(build_command(*command, "--import", "slow.py", "--output", "out"), folder, **nodes.env)
    try:
        wait_until(lambda: (folder / "out" / "metrics.jsonl").is_file() and len(nodes.pids("rank", "nodeB")) == 4)
        job.send_signal(number)
        _, err = communicate(job, 60)
    finally:
        job.kill()
    assert job.returncode == (75 if number == signal.SIGTERM else -number), err
    wait_until(lambda: not nodes.processes(), 30)


@needs_sshd
@pytest.mark.long
def test_workers_over_sshd_in_two_environments(folder, tmp_path):
    """Kill a session, then stop the job and resume it with a list of hosts, which is read once."""
    environment, servers = create_environment(tmp_path), SshServers(tmp_path, "nodeB", "nodeC")
    venvs = {"nodeB": f"source {sys.prefix}/bin/activate", "nodeC": f"source '{environment}/bin/activate'"}
    workers = [{"address": node, "ssh_config": f"of {node}"} for node in venvs]
    groups = {f"of {node}": servers.settings(node, python_venv=venv) for node, venv in venvs.items()}
    chief = {"address": platform.node(), "chief": True}
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": [chief, *workers], "ssh": groups}))
    (folder / "hosts").write_text("#!/bin/sh\necho run >> 'runs of it'\necho localhost\necho nodeB\necho nodeC:2\n")
    (folder / "hosts").chmod(0o755)
    metrics, words = folder / "out" / "metrics.jsonl", ("--import", "slow.py", "--output", "out")
    job = None
    try:
        servers.wait()
        job = start_command(build_command("launch", "nodes.yaml", "job.yaml", *words), folder, **servers.env)
        wait_until(lambda: metrics.is_file() and servers.sessions("nodeB", "run") and servers.sessions("nodeC", "run"))
        (folder / "hold").touch()  # keeps the training from ending
        (session,) = servers.sessions("nodeB", "run")
        session.kill()
        wait_until(lambda: [other for other in servers.sessions("nodeB", "run") if other != session])
        job.send_signal(signal.SIGTERM)
        (folder / "hold").unlink()
        _, err = communicate(job, 60)
        assert job.returncode == 75, err
        assert "worker 1 was killed (connection to nodeB lost); restarted on nodeB\n" in err
        wait_until(lambda: not any(servers.sessions(node, word) for node in venvs for word in ("run", "ps")))
        arguments = "run", "job.yaml", "--hosts-from", "hosts", "-n", 3, *words, "--resume"
        job = start_command(build_command(*arguments), folder, **servers.host_list_env)
        wait_until(lambda: servers.sessions("nodeC", "run"))
        out, err = communicate(job, 240)
    finally:
        if job is not None:
            job.kill()
        servers.end()
    assert job.returncode == 0, err
    assert "applied: 48 records in each of 4 epochs, each once; 0 workers restarted" in out
    assert re.findall(r"(?m)^epoch (\d)/4 ", out)[-1:] == ["4"]
    assert (folder / "runs of it").read_text() == "run\n"


def test_tiles_of_a_worker_share_a_node(folder):
    slots = {"a": 1, "b": 5, "c": 4}
    assert assign_workers_to_slots(slots, 3, 2) == {"b": 2, "c": 1}
    assert assign_workers_to_slots(slots, 9, 1) == {"a": 1, "b": 5, "c": 3}
    with pytest.raises(LaunchError, match=r"-n 10: .* have room for 4 workers of 2 tiles, .* at most -n 8,"):
        assign_workers_to_slots(slots, 5, 2)
    (folder / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=3)))
    grid = "--set", "grid={replicas: 2, rows: 2, cols: 1}"
    code, _, err = run_in_process(folder, "launch", "nodes.yaml", "job.yaml", "--import", "slow.py", *grid)
    assert (code, "have room for 1 worker of 2 tiles" in err) == (2, True), err


def test_hosts_with_other_versions(monkeypatch):
    """Expect an error of one line from each."""

    def read_error(words, request=None):
        process = subprocess.run(words, input=request, capture_output=True, text=True, check=False)
        assert (process.returncode, process.stdout, len(process.stderr.splitlines())) == (2, "", 1), process.stderr
        return process.stderr

    words = remote_side_command("far")
    assert "neondist 0.1.0 there, 0.0.1 where" in read_error(words, json.dumps({"version": "0.0.1"})).replace(
        VERSION, "0.1.0"
    )
    assert "error: far: has no /nowhere/python with " in read_error([*words[:4], "/nowhere/python", *words[5:]])
    monkeypatch.setattr("sys.executable", "/bin/sh")
    monkeypatch.setattr("neondist.safe_path.__file__", "/nowhere")
    assert "error: far: has no /bin/sh with /nowhere; install neondist there" in read_error(remote_side_command("far"))


def test_host_list_is_read_once_at_the_start(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "hosts").write_text("#!/bin/sh\necho run >> runs\necho localhost:2\necho far\n")
    (folder / "hosts").chmod(0o755)
    source, bounds = HostSource("hosts"), WorkerBounds(1, 3)
    reject_unreachable_maximum(bounds, source)
    arguments = argparse.Namespace(resources=None, source=None, slots_from=source, fork_server=None)
    with open_elastic_slots(bounds, source) as scaling:
        hosts = scaling.wait_for_minimum(lambda: False, print)
        with checked_job_nodes(arguments, hosts, 1) as nodes:
            assert nodes.workers == ["localhost", "localhost", "far"]
    assert (folder / "runs").read_text() == "run\n"


def test_hosts_that_join_an_elastic_job(folder, monkeypatch, capsys):
    """Exclude a host without neondist, with one message."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("neondist.launcher.scaling.HOST_LIST_POLL_SECONDS", 0.01)
    monkeypatch.setattr("neondist.launcher.scaling.HOST_COOLDOWN_SECONDS", 0.05)
    (folder / "agent").write_text('#!/bin/sh\n[ "$1" != bare ] || { sleep 0.3; exit 113; }\nexit 116\n')
    (folder / "agent").chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", shlex.quote(str(folder / "agent")))
    (folder / "hosts").write_text("localhost:1\n")
    source = HostSource("hosts")
    with open_elastic_slots(WorkerBounds(1, 4), source) as scaling:
        assert scaling.wait_for_minimum(lambda: False, print) == ["localhost"]
        (folder / "hosts").write_text("localhost:1\nbare:2\nfar:1\n")
        joined = []
        wait_until(lambda: joined.extend(scaling.take_slots()) or joined)
        time.sleep(1)
        assert (joined, scaling.take_slots()) == (["far"], [])
    assert capsys.readouterr().err.count("hosts: bare has no ") == 1


def test_workers_of_a_lost_node_are_distributed(monkeypatch):
    """Move a worker to the reachable node with the fewest workers, if any."""
    reachable = {"a", "b", "c"}
    monkeypatch.setattr(JobNode, "is_reachable", lambda node: node.name in reachable)
    nodes = JobNodes([JobNode("a"), JobNode("b"), JobNode("c")], ["a", "a", "b", "b", "c"])
    assert nodes.choose_replacement_node("b", ["a", "a", "c"]) == "b"
    reachable -= {"b"}
    assert nodes.choose_replacement_node("b", ["a", "a", "c"]) == "c"
    reachable -= {"c"}
    assert nodes.choose_replacement_node("b", ["a", "a", "c"]) == "a"
    reachable.clear()
    assert nodes.choose_replacement_node("b", ["a", "a", "c"]) == "b"
    nodes.drop_node("a")
    assert nodes.workers == ["b", "b", "c", "c", "b"]
    nodes.drop_node("b")
    with pytest.raises(NodeLostError, match="c cannot be reached; continue with --resume auto"):
        nodes.drop_node("c")


@pytest.mark.parametrize(("options", "message"), [
    ([], "hosts: far.invalid cannot be reached; correct the list, or the error shown by `ssh far.invalid`"),
    (["--cooldown", "5"], "--cooldown: applies to a single MPI job"),
])  # fmt: skip
def test_unusable_host_lists(folder, monkeypatch, options, message):
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "false")
    (folder / "hosts").write_text("localhost\nfar.invalid:2\n")
    arguments = "run", "job.yaml", "--hosts-from", "hosts", "-n", 3, "--import", "slow.py", "--output", "out"
    code, _, err = run_in_process(folder, *arguments, *options)
    assert (code, err.count("\n"), message in err) == (2, 1, True), err
