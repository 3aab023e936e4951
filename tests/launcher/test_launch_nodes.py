"""Command `launch` on fake nodes, and with sshd on two ports, with paths and variables that need quoting."""

import json
import os
import platform
import shlex
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, run_command, run_in_process, start_command
from fake_nodes import FakeNodes, needs_fake_nodes
from processes import communicate
from sshd import SshServers, create_environment, needs_sshd

import yaml
from neondist.cluster.ssh_config import USER_CONFIG_VARIABLE

SCRIPT = """
import json, os, socket, sys, time
import neondist as nd
grid = nd.ProcessGrid()
environment = [socket.gethostname(), sys.argv[1:], os.environ.get("ODD"), sys.prefix, os.getcwd()]
environments = grid.world.allgather(environment)
if grid.rank == 0:
    print(json.dumps(environments), flush=True)
if "--wait" in sys.argv:
    time.sleep(300)
"""
SPECIAL = "a b '\" $HOME `id`, ; %"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "toy.yaml").write_text(EXPERIMENT)
    return folder


def write_nodes(folder, addresses, **ssh):
    nodes = [{"address": platform.node(), "chief": True}]
    nodes += [{"address": address, "ssh_config": f"of {address}"} for address in addresses]
    groups = {f"of {address}": {"shared_envs": {"ODD": SPECIAL}, **ssh.get(address, {})} for address in addresses}
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "ssh": groups}))


@needs_fake_nodes
@needs_mpirun
@pytest.mark.long
def test_script_and_experiment_on_fake_nodes(folder, tmp_path):
    nodes = FakeNodes(tmp_path, "nodeB", "nodeC")
    write_nodes(folder, nodes.nodes)
    try:
        code, out, err = run_command(
            build_command("launch", "nodes.yaml", "script.py", "x y", "--flag"), folder, **nodes.env
        )
        assert code == 0, err
        *_, last = out.splitlines()
        environment = [["x y", "--flag"], SPECIAL, sys.prefix, str(folder)]
        assert json.loads(last)[1:] == [["nodeB", *environment], ["nodeC", *environment]]
        assert json.loads(last)[0][:2] == [platform.node(), ["x y", "--flag"]]
        assert [line.split()[0] for line in out.splitlines()[:4]] == ["node", platform.node(), "nodeB", "nodeC"]
        code, out, err = run_command(
            build_command("launch", "nodes.yaml", "toy.yaml", "-n", 2, "--output", "out"), folder, **nodes.env
        )
        assert code == 0, err
        assert "ConvnetDist on 2 ranks" in out
        assert not nodes.processes()
    finally:
        nodes.end()


def test_unreachable_nodes(folder, monkeypatch):
    """Expect one message that names all nodes, and exit code 2; nothing is started."""
    write_nodes(folder, ["nodeB", "nodeC"])
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "false")
    code, _, err = run_in_process(folder, "launch", "nodes.yaml", "toy.yaml", "--output", "out")
    assert code == 2, err
    assert [line.split(":")[0].strip() for line in err.splitlines()] == ["error", "nodeB", "nodeC"]
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())


@needs_mpirun
def test_nodes_with_the_same_host_name(folder, tmp_path):
    """Expect an error instead of ranks that wait for each other in the start of MPI."""
    (tmp_path / "agent").write_text('#!/bin/sh\nshift 3\nexec sh -c "$*"\n')  # each node is this machine
    (tmp_path / "agent").chmod(0o755)
    write_nodes(folder, ["nodeB", "nodeC"])
    code, _, err = run_command(
        build_command("launch", "nodes.yaml", "script.py"), folder, PRTE_MCA_plm_ssh_agent=str(tmp_path / "agent")
    )
    first, *lines = err.splitlines()
    assert (code, first) == (2, "error: 2 of 3 nodes are unusable:")
    name = platform.node()
    start = f"has the same host name as {name}, {name}, by which MPI identifies machines; list each machine once"
    assert [line.strip().partition(start)[0] for line in lines] == ["nodeB: ", "nodeC: "]


@pytest.mark.parametrize(("words", "message"), [
    (["-n", 9], "-n 9: the resource file has 3 devices"),
    (["--elastic", "1:2"], "also give --restarts"), (["--spares", 3], "and the ranks need at least 1"),
])  # fmt: skip
def test_conflicting_options(folder, words, message):
    write_nodes(folder, ["nodeB", "nodeC"])
    code, _, err = run_in_process(folder, "launch", "nodes.yaml", "toy.yaml", *words)
    assert (code, message in err) == (2, True), err


def test_errors_with_scripts(folder):
    write_nodes(folder, ["nodeB"])
    for words, message in (
        (["no.py"], "no.py: no such script"),
        (["--snapshot", "1", "--restarts", "2", "script.py"], "--snapshot: applies to experiments"),
    ):
        code, _, err = run_in_process(folder, "launch", "nodes.yaml", *words)
        assert (code, message in err) == (2, True), err


@needs_mpirun
@pytest.mark.long
def test_lost_script_is_restarted(folder):
    (folder / "nodes.yaml").write_text(f"nodes: [{{address: {platform.node()}, cpus: [0]}}]")
    (folder / "dies.py").write_text(
        "import os\nprint('generation', os.environ['NEONDIST_GENERATION'], flush=True)\n"
        "if os.environ['NEONDIST_GENERATION'] == '1':\n    os.kill(os.getpid(), 9)\n"
    )
    code, out, err = run_command(build_command("launch", "nodes.yaml", "--restarts", 1, "dies.py"), folder)
    assert code == 0, err
    assert "; restarting the script, on 1 rank" in out
    assert [line for line in out.splitlines() if line in ("generation 1", "generation 2")] == [
        "generation 1",
        "generation 2",
    ]


@needs_sshd
@needs_mpirun
@pytest.mark.long
def test_sshd_on_two_ports_with_two_virtual_environments(folder, tmp_path):
    # a variable of the node leads to the MPI library
    environment, servers = create_environment(tmp_path), SshServers(tmp_path, "nodeB", "nodeC")
    envs = {"ODD": SPECIAL, "LD_LIBRARY_PATH": f"{sys.prefix}/lib", "OMPI_MCA_mpi_yield_when_idle": "1"}
    venvs = {"nodeB": f"source {sys.prefix}/bin/activate", "nodeC": f"source '{environment}/bin/activate'"}
    write_nodes(
        folder, venvs, **{n: servers.settings(n, python_venv=venv, shared_envs=envs) for n, venv in venvs.items()}
    )
    try:
        servers.wait()
        words = build_command("launch", "nodes.yaml", "script.py", "--wait", f"run-{os.getpid()}")
        for number in (signal.SIGTERM, signal.SIGINT):
            job, lines = start_command(words, folder, **servers.env), []
            while not lines or (lines[-1] and not lines[-1].startswith("[")):
                lines.append(job.stdout.readline())
            job.send_signal(number)
            _, err = communicate(job, 60)
            assert job.returncode == 128 + number, err
            arguments = list(words[-2:]), SPECIAL
            assert json.loads(lines[-1])[1:] == [
                ["nodeB", *arguments, sys.prefix, str(folder)], ["nodeC", *arguments, str(environment), str(folder)]
            ]  # fmt: skip
            while subprocess.run(["pgrep", "-f", f"run-{os.getpid()}$"], capture_output=True, check=False).stdout:
                time.sleep(0.05)
    finally:
        servers.end()


@needs_sshd
@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize("killed", ["prted", "sshd"])
def test_lost_daemon_of_a_node_with_sshd(folder, tmp_path, killed):
    """Name the node, although the first rank to exit is one that mpirun ended; ssh reports the loss of its command."""
    servers = SshServers(tmp_path, "nodeB", "nodeC")
    write_nodes(folder, ["nodeB", "nodeC"], **{name: servers.settings(name) for name in ("nodeB", "nodeC")})
    try:
        servers.wait()
        job = start_command(build_command("launch", "nodes.yaml", "script.py", "--wait"), folder, **servers.env)
        while not job.stdout.readline().startswith("["):
            pass
        (session,) = servers.sessions("nodeB", "ess_base_vpid")
        daemons = [process for process in session.children(recursive=True) if process.name() == "prted"]
        (daemons[0] if killed == "prted" else session).kill()
        out, err = communicate(job, 60)
        assert (job.returncode > 128, out) == (True, ""), err
        assert "error: node nodeB was lost: its daemon was killed, or the network to it failed; " in err
    finally:
        servers.end()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs openssh-client")
@needs_mpirun
def test_addresses_without_an_ssh_server(folder, monkeypatch):
    """Report a closed port, the port of another server, and an unknown name in one message."""
    monkeypatch.setenv(USER_CONFIG_VARIABLE, str(folder / "own"))
    (folder / "own").write_text("Host nodeB nodeC\n  HostName 127.0.0.1\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    with socketserver.TCPServer(("127.0.0.1", 0), WebHandler) as web_server:
        thread = threading.Thread(target=web_server.serve_forever, args=(0.05,))
        thread.start()
        settings = {"nodeB": {"port": closed}, "nodeC": {"port": web_server.server_address[1]}, "nodeD.invalid": {}}
        write_nodes(folder, settings, **settings)
        code, out, err = run_in_process(folder, "launch", "nodes.yaml", "toy.yaml", "--output", "out")
        web_server.shutdown()
        thread.join()
    assert code == 2, err
    assert [line.split()[0] for line in out.splitlines()] == [
        "node",
        platform.node(),
        *settings,
    ]  # the table lists all nodes
    first, *problems = err.splitlines()
    assert first == "error: 3 of 4 nodes are unusable:"
    assert [problem.split(":")[0].strip() for problem in problems] == list(settings)
    assert all(
        ": cannot be reached: " in problem and "check address, username, port" in problem for problem in problems
    )
    assert "Connection refused" in problems[0]
    own_config = shlex.quote(str(folder / "own"))
    assert problems[0].endswith(f": ssh -F {own_config} -p {closed} nodeB")
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())


class WebHandler(socketserver.BaseRequestHandler):
    """Handler that responds with HTTP."""

    def handle(self):
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
