"""Workers and servers on the nodes of a resource file: losses of processes and of nodes, signals, and tiles."""

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
from cli_runs import here, neondist, start
from fake_nodes import FakeNodes, missing, needs_mpirun
from processes import finish
from sshd import Sshd, other_environment, without_sshd
from turns import some

import yaml
from neondist.cluster.hosts import HostSource
from neondist.errors import LaunchError
from neondist.launcher.job_nodes import JobNode, JobNodes, NodeLostError, open_nodes, place_workers
from neondist.launcher.remote import program
from neondist.launcher.scaling import check_bounds, open_scaling
from neondist.launcher.slots import Demand
from neondist.version import __version__ as VERSION

EXPERIMENT = """!FitExperiment
dataset: !Synthetic {shape: [6, 6, 1], classes: 2, train: 48, test: 4}
model: !ConvnetDist {layers: [!FCLayerDist {out_features: 2, activation: !Slow {}}], optimizer: !SGD {}}
grid: {replicas: 3}
batch_size: 4
epochs: 4
strategy: !PS {sync: false}
"""
SLOW = """
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
    first = {"address": platform.node(), "chief": True}
    nodes = [
        first,
        *({"address": node, "cpus": list(range(count)), "ssh_config": "all"} for node, count in cpus.items()),
    ]
    return {"nodes": nodes, "ssh": {"all": {"shared_envs": {"ODD": "it's $HOME"}}}}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "it's a $HOME"
    made.mkdir()
    (made / "job.yaml").write_text(EXPERIMENT)
    (made / "slow.py").write_text(SLOW)
    (made / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=1, nodeC=1)))
    return made


def wait_for(found, seconds=60):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


@pytest.fixture
def nodes(tmp_path):
    made = FakeNodes(tmp_path, "nodeB", "nodeC")
    yield made
    made.end()


def find(nodes, node, kind):
    """Return the processes of a kind on a node: 'ps', 'master', or 'run' for a worker."""
    found = []
    for _, where, pid in nodes.processes():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            if where == node and kind in words and "neondist.launcher.remote" not in words:
                found.append(process)
    return found


fake = pytest.mark.skipif(bool(missing()), reason=missing())


@fake
@needs_mpirun
@pytest.mark.long
def test_processes_and_a_node_are_lost_and_the_run_goes_on(folder, nodes):
    """A worker and a server of nodeB are killed, then nodeC is gone: its worker and its server go on elsewhere."""
    job = start(
        neondist("launch", "nodes.yaml", "job.yaml", "--import", "slow.py", "--output", "out"), folder, **nodes.env
    )
    try:
        wait_for(lambda: (folder / "out" / "metrics.jsonl").is_file() and find(nodes, "nodeC", "run"))
        for kind in ("run", "ps"):
            (process,) = wait_for(lambda kind=kind: find(nodes, "nodeB", kind))
            process.kill()
            process.wait()
            wait_for(lambda kind=kind: find(nodes, "nodeB", kind))
        nodes.switch_off("nodeC")
        out, err = finish(job, 240)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert "applied: 48 records in each of 4 epochs, each once" in out
    assert "parameter server 1 was killed (SIGKILL); restarted" in err
    assert "worker 1 was killed (SIGKILL); started again\n" in err
    assert "nodeC cannot be reached; continuing without it, from the servers' checkpoint" in err
    assert not nodes.processes()


@fake
@needs_mpirun
@pytest.mark.parametrize(("number", "command"), some([
    (signal.SIGTERM, ["launch", "nodes.yaml", "job.yaml", "-n", 4]),
    (signal.SIGKILL, ["run", "job.yaml", "--hosts-from", "hosts", "-n", 4]),
]))  # fmt: skip
@pytest.mark.long
def test_all_nodes_end_with_the_job(folder, nodes, number, command):
    """A stopped job has a checkpoint, from which it would go on; of a killed one nothing is left on any node."""
    (folder / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=4)))
    tiles = "grid: {replicas: 2, rows: 2, cols: 1}"
    (folder / "job.yaml").write_text(EXPERIMENT.replace("grid: {replicas: 3}", tiles))
    (folder / "hosts").write_text("nodeB:4\n")
    job = start(neondist(*command, "--import", "slow.py", "--output", "out"), folder, **nodes.env)
    try:
        wait_for(lambda: (folder / "out" / "metrics.jsonl").is_file() and len(nodes.pids("rank", "nodeB")) == 4)
        job.send_signal(number)
        _, err = finish(job, 60)
    finally:
        job.kill()
    assert job.returncode == (75 if number == signal.SIGTERM else -number), err
    wait_for(lambda: not nodes.processes(), 30)


@pytest.mark.skipif(bool(without_sshd()), reason=without_sshd())
@pytest.mark.long
def test_workers_over_sshd_of_two_environments(folder, tmp_path):
    """A session is killed, then the job is stopped; it goes on with a list of hosts, which is read once."""
    other, servers = other_environment(tmp_path), Sshd(tmp_path, "nodeB", "nodeC")
    venvs = {"nodeB": f"source {sys.prefix}/bin/activate", "nodeC": f"source '{other}/bin/activate'"}
    found = [{"address": node, "ssh_config": f"of {node}"} for node in venvs]
    groups = {f"of {node}": servers.settings(node, python_venv=venv) for node, venv in venvs.items()}
    first = {"address": platform.node(), "chief": True}
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": [first, *found], "ssh": groups}))
    (folder / "hosts").write_text("#!/bin/sh\necho run >> 'runs of it'\necho localhost\necho nodeB\necho nodeC:2\n")
    (folder / "hosts").chmod(0o755)
    metrics, words = folder / "out" / "metrics.jsonl", ("--import", "slow.py", "--output", "out")
    job = None
    try:
        servers.wait()
        job = start(neondist("launch", "nodes.yaml", "job.yaml", *words), folder, **servers.env)
        wait_for(lambda: metrics.is_file() and servers.sessions("nodeB", "run") and servers.sessions("nodeC", "run"))
        (folder / "hold").touch()  # lest all is trained before
        (session,) = servers.sessions("nodeB", "run")
        session.kill()
        wait_for(lambda: [one for one in servers.sessions("nodeB", "run") if one != session])
        job.send_signal(signal.SIGTERM)
        (folder / "hold").unlink()
        _, err = finish(job, 60)
        assert job.returncode == 75, err
        assert "worker 1 was killed (connection to nodeB lost); started again on nodeB\n" in err
        wait_for(lambda: not any(servers.sessions(node, word) for node in venvs for word in ("run", "ps")))
        told = "run", "job.yaml", "--hosts-from", "hosts", "-n", 3, *words, "--resume"
        job = start(neondist(*told), folder, **servers.env_of_list)
        wait_for(lambda: servers.sessions("nodeC", "run"))
        out, err = finish(job, 240)
    finally:
        if job is not None:
            job.kill()
        servers.end()
    assert job.returncode == 0, err
    assert "applied: 48 records in each of 4 epochs, each once; 0 workers started again" in out
    assert re.findall(r"(?m)^epoch (\d)/4 ", out)[-1:] == ["4"]
    assert (folder / "runs of it").read_text() == "run\n"


def test_workers_are_whole_on_a_node(folder):
    slots = {"a": 1, "b": 5, "c": 4}
    assert place_workers(slots, 3, 2) == {"b": 2, "c": 1}
    assert place_workers(slots, 9, 1) == {"a": 1, "b": 5, "c": 3}
    with pytest.raises(LaunchError, match=r"-n 10: .* have room for 4 workers of 2 tiles, .* at most -n 8,"):
        place_workers(slots, 5, 2)
    (folder / "nodes.yaml").write_text(yaml.safe_dump(resources(nodeB=3)))
    grid = "--set", "grid={replicas: 2, rows: 2, cols: 1}"
    code, _, err = here(folder, "launch", "nodes.yaml", "job.yaml", "--import", "slow.py", *grid)
    assert (code, "have room for 1 worker of 2 tiles" in err) == (2, True), err


def test_hosts_without_this_neondist(monkeypatch):
    """They say so, in one line each."""

    def said(words, request=None):
        done = subprocess.run(words, input=request, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
        return done.stderr

    words = program("far")
    assert "neondist 0.1.0 there, 0.0.1 where" in said(words, json.dumps({"version": "0.0.1"})).replace(
        VERSION, "0.1.0"
    )
    assert "error: far: has no /nowhere/python with " in said([*words[:4], "/nowhere/python", *words[5:]])
    monkeypatch.setattr("sys.executable", "/bin/sh")
    monkeypatch.setattr("neondist.safe_path.__file__", "/nowhere")
    assert "error: far: has no /bin/sh with /nowhere; install neondist there" in said(program("far"))


def test_a_list_is_read_once_at_the_start_of_an_elastic_job(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "hosts").write_text("#!/bin/sh\necho run >> runs\necho localhost:2\necho far\n")
    (folder / "hosts").chmod(0o755)
    source, demand = HostSource("hosts"), Demand(1, 3)
    check_bounds(demand, source)
    given = argparse.Namespace(resources=None, source=None, slots_from=source, fork_server=None)
    with open_scaling(demand, source) as scaling:
        hosts = scaling.wait_for_minimum(lambda: False, print)
        with open_nodes(given, hosts, 1) as nodes:
            assert nodes.workers == ["localhost", "localhost", "far"]
    assert (folder / "runs").read_text() == "run\n"


def test_hosts_that_join_an_elastic_job(folder, monkeypatch, capsys):
    """One has no neondist: it is left out, and said once."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("neondist.launcher.scaling.POLL", 0.01)
    monkeypatch.setattr("neondist.launcher.scaling.COOL_DOWN", 0.05)
    (folder / "agent").write_text('#!/bin/sh\n[ "$1" != bare ] || { sleep 0.3; exit 113; }\n')
    (folder / "agent").chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", shlex.quote(str(folder / "agent")))
    (folder / "hosts").write_text("localhost:1\n")
    source = HostSource("hosts")
    with open_scaling(Demand(1, 4), source) as scaling:
        assert scaling.wait_for_minimum(lambda: False, print) == ["localhost"]
        (folder / "hosts").write_text("localhost:1\nbare:2\nfar:1\n")
        found = []
        wait_for(lambda: found.extend(scaling.take()) or found)
        time.sleep(1)
        assert (found, scaling.take()) == (["far"], [])
    assert capsys.readouterr().err.count("hosts: bare has no ") == 1


def test_workers_of_a_lost_machine_are_divided(monkeypatch):
    """A worker goes to the machine with the fewest that answers, or stays."""
    answering = {"a", "b", "c"}
    monkeypatch.setattr(JobNode, "is_reachable", lambda node: node.name in answering)
    nodes = JobNodes([JobNode("a"), JobNode("b"), JobNode("c")], ["a", "a", "b", "b", "c"])
    assert nodes.replace("b", ["a", "a", "c"]) == "b"
    answering -= {"b"}
    assert nodes.replace("b", ["a", "a", "c"]) == "c"
    answering -= {"c"}
    assert nodes.replace("b", ["a", "a", "c"]) == "a"
    answering.clear()
    assert nodes.replace("b", ["a", "a", "c"]) == "b"
    nodes.drop("a")
    assert nodes.workers == ["b", "b", "c", "c", "b"]
    nodes.drop("b")
    with pytest.raises(NodeLostError, match="c cannot be reached; continue with --resume auto"):
        nodes.drop("c")


@pytest.mark.parametrize(("words", "message"), [
    ([], "hosts: far.invalid cannot be reached; correct the list, or the error shown by `ssh far.invalid`"),
    (["--cool-down", "5"], "--cool-down: applies to a single MPI job"),
])  # fmt: skip
def test_lists_that_cannot_be_used(folder, monkeypatch, words, message):
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "false")
    (folder / "hosts").write_text("localhost\nfar.invalid:2\n")
    told = "run", "job.yaml", "--hosts-from", "hosts", "-n", 3, "--import", "slow.py", "--output", "out"
    code, _, err = here(folder, *told, *words)
    assert (code, err.count("\n"), message in err) == (2, 1, True), err
