"""`neondist launch` over fake nodes, and over real sshd on two ports, with paths and variables that want quoting."""

import json
import os
import platform
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from cli_runs import EXPERIMENT, call, here, neondist, start
from fake_nodes import FakeNodes, missing, needs_mpirun
from processes import finish
from sshd import Sshd, other_environment, without_sshd

import yaml
from neondist.cluster.ssh_config import OWN

fake = pytest.mark.skipif(bool(missing()), reason=missing())
SCRIPT = """
import json, os, socket, sys, time
import neondist as nd
grid = nd.ProcessGrid()
facts = [socket.gethostname(), sys.argv[1:], os.environ.get("ODD"), sys.prefix, os.getcwd()]
found = grid.world.allgather(facts)
if grid.rank == 0:
    print(json.dumps(found), flush=True)
if "--wait" in sys.argv:
    time.sleep(300)
"""
ODD = "a b '\" $HOME `id`, ; %"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "it's a $HOME"
    made.mkdir()
    (made / "script.py").write_text(SCRIPT)
    (made / "toy.yaml").write_text(EXPERIMENT)
    return made


def write(folder, addresses, **ssh):
    nodes = [{"address": platform.node(), "chief": True}]
    nodes += [{"address": address, "ssh_config": f"of {address}"} for address in addresses]
    groups = {f"of {address}": {"shared_envs": {"ODD": ODD}, **ssh.get(address, {})} for address in addresses}
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "ssh": groups}))


@fake
@needs_mpirun
@pytest.mark.long
def test_a_script_and_an_experiment_on_fake_nodes(folder, tmp_path):
    nodes = FakeNodes(tmp_path, "nodeB", "nodeC")
    write(folder, nodes.nodes)
    try:
        code, out, err = call(neondist("launch", "nodes.yaml", "script.py", "x y", "--flag"), folder, **nodes.env)
        assert code == 0, err
        *_, last = out.splitlines()
        rest = [["x y", "--flag"], ODD, sys.prefix, str(folder)]
        assert json.loads(last)[1:] == [["nodeB", *rest], ["nodeC", *rest]]
        assert json.loads(last)[0][:2] == [platform.node(), ["x y", "--flag"]]
        assert [line.split()[0] for line in out.splitlines()[:4]] == ["node", platform.node(), "nodeB", "nodeC"]
        code, out, err = call(
            neondist("launch", "nodes.yaml", "toy.yaml", "-n", 2, "--output", "out"), folder, **nodes.env
        )
        assert code == 0, err
        assert "ConvnetDist on 2 ranks" in out
        assert not nodes.processes()
    finally:
        nodes.end()


def test_nodes_that_cannot_take_part(folder, monkeypatch):
    """All are named, in one message, with exit code 2; nothing is started."""
    write(folder, ["nodeB", "nodeC"])
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "false")
    code, _, err = here(folder, "launch", "nodes.yaml", "toy.yaml", "--output", "out")
    assert code == 2, err
    assert [line.split(":")[0].strip() for line in err.splitlines()] == ["error", "nodeB", "nodeC"]
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())


@pytest.mark.parametrize(("words", "message"), [
    (["-n", 9], "-n 9: the resource file has 3 devices"), (["--virtual", 2], "--virtual runs all ranks"),
    (["--elastic", "1:2"], "also give --restarts"), (["--spares", 3], "of which at least 1 are needed for ranks"),
])  # fmt: skip
def test_options_that_do_not_fit(folder, words, message):
    write(folder, ["nodeB", "nodeC"])
    code, _, err = here(folder, "launch", "nodes.yaml", "toy.yaml", *words)
    assert (code, message in err) == (2, True), err


def test_mistakes_with_scripts(folder):
    write(folder, ["nodeB"])
    for words, message in (
        (["no.py"], "no.py: no such script"),
        (["--snapshot", "1", "--restarts", "2", "script.py"], "--snapshot: is for experiments"),
        (["--hosts-from", "x", "script.py"], "--hosts-from: launch takes the hosts from its resource file"),
    ):
        code, _, err = here(folder, "launch", "nodes.yaml", *words)
        assert (code, message in err) == (2, True), err


@needs_mpirun
@pytest.mark.long
def test_a_script_that_is_lost_begins_again(folder):
    (folder / "nodes.yaml").write_text(f"nodes: [{{address: {platform.node()}, cpus: [0]}}]")
    (folder / "dies.py").write_text(
        "import os\nprint('generation', os.environ['NEONDIST_GENERATION'], flush=True)\n"
        "if os.environ['NEONDIST_GENERATION'] == '1':\n    os.kill(os.getpid(), 9)\n"
    )
    code, out, err = call(neondist("launch", "nodes.yaml", "--restarts", 1, "dies.py"), folder)
    assert code == 0, err
    assert "; restarting the script, on 1 ranks" in out
    assert [line for line in out.splitlines() if line in ("generation 1", "generation 2")] == [
        "generation 1",
        "generation 2",
    ]


@pytest.mark.skipif(bool(without_sshd()), reason=without_sshd())
@needs_mpirun
@pytest.mark.long
def test_sshd_on_two_ports_with_two_virtual_environments(folder, tmp_path):
    # MPI's library is found by a variable of that node
    other, servers = other_environment(tmp_path), Sshd(tmp_path, "nodeB", "nodeC")
    envs = {"ODD": ODD, "LD_LIBRARY_PATH": f"{sys.prefix}/lib", "OMPI_MCA_mpi_yield_when_idle": "1"}
    venvs = {"nodeB": f"source {sys.prefix}/bin/activate", "nodeC": f"source '{other}/bin/activate'"}
    write(folder, venvs, **{n: servers.settings(n, python_venv=venv, shared_envs=envs) for n, venv in venvs.items()})
    try:
        servers.wait()
        words = neondist("launch", "nodes.yaml", "script.py", "--wait", f"run-{os.getpid()}")
        for number in (signal.SIGTERM, signal.SIGINT):
            job, lines = start(words, folder, **servers.env), []
            while not lines or (lines[-1] and not lines[-1].startswith("[")):
                lines.append(job.stdout.readline())
            job.send_signal(number)
            _, err = finish(job, 60)
            assert job.returncode == 128 + number, err
            rest = list(words[-2:]), ODD
            assert json.loads(lines[-1])[1:] == [
                ["nodeB", *rest, sys.prefix, str(folder)], ["nodeC", *rest, str(other), str(folder)]
            ]  # fmt: skip
            while subprocess.run(["pgrep", "-f", f"run-{os.getpid()}$"], capture_output=True, check=False).stdout:
                time.sleep(0.05)
    finally:
        servers.end()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs openssh-client")
@needs_mpirun
def test_addresses_and_ports_that_are_none_of_ssh(folder, monkeypatch):
    """A port where nobody listens, one that another server has, and a name that is not known: one message of all."""
    monkeypatch.setenv(OWN, str(folder / "own"))
    (folder / "own").write_text("Host nodeB nodeC\n  HostName 127.0.0.1\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    with socketserver.TCPServer(("127.0.0.1", 0), Web) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.05,))
        thread.start()
        taken = {"nodeB": {"port": closed}, "nodeC": {"port": other.server_address[1]}, "nodeD.invalid": {}}
        write(folder, taken, **taken)
        code, out, err = here(folder, "launch", "nodes.yaml", "toy.yaml", "--output", "out")
        other.shutdown()
        thread.join()
    assert code == 2, err
    assert [line.split()[0] for line in out.splitlines()] == ["node", platform.node(), *taken]  # the table of all
    first, *problems = err.splitlines()
    assert first == "error: 3 of 4 nodes are unusable:"
    assert [problem.split(":")[0].strip() for problem in problems] == list(taken)
    assert all(
        ": cannot be reached: " in problem and "check address, username, port" in problem for problem in problems
    )
    assert "Connection refused" in problems[0]
    assert problems[0].endswith(f"ssh -p {closed} nodeB")
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())


class Web(socketserver.BaseRequestHandler):
    """Answers as no SSH server does."""

    def handle(self):
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
