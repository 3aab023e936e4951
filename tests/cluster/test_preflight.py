"""Check of nodes before a job starts, and the ssh_config that it shares with mpirun."""

import os
import subprocess
import sys

import pytest

import neondist as nd
from neondist.cluster import Node, SSHConfig
from neondist.cluster.preflight import REPORT_COLUMNS, check_nodes, raise_on_problems
from neondist.cluster.ssh_config import (
    SSH_AGENT_VARIABLE,
    USER_CONFIG_VARIABLE,
    python_path_of,
    ssh_command,
    write_ssh_config,
)
from neondist.errors import ConfigError, LaunchError
from neondist.launcher.placement import assign_ranks

# each node is this machine under another name
AGENT_SCRIPT = """#!/bin/sh
[ "$1" = -F ] && [ -f "$2" ] || exit 3
host=$3; shift 3
case $host in
    gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255;;
    older) export PYTHONPATH="$OLDER:$PYTHONPATH" MPI_THERE=4.1.6;;
    bare) unset PYTHONPATH;;
    chatty) printf 'welcome\\n\\033]0;title\\007';;
esac
exec sh -c "cd /; $*"
"""
MPIRUN_SCRIPT = """#!/bin/sh
echo "mpirun (Open MPI) ${MPI_THERE:-5.0.11}"
echo
echo "Report bugs to https://www.open-mpi.org/community/help/"
"""
OLDER_METADATA = """Name: neondist
Version: 0.0.1
Requires-Dist: numpy>=1.24
Requires-Dist: no-such_package>=1.5
Requires-Dist: no-other-package; extra == "plot"
"""
SPECIAL_WORDS = ["a b", "$HOME", "`id`", "'", '"', ";#", "$(touch x)", "*", "ü", "-x", ""]
posix = pytest.mark.skipif(os.name != "posix", reason="a shell script")


def resources(*addresses, **ssh):
    nodes = [{"address": "here", "chief": True}, *({"address": address, "ssh_config": "g"} for address in addresses)]
    return nd.ResourceSpec({"nodes": nodes, "ssh": {"g": ssh}})


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks nodes, run in a folder with special characters that holds file.yaml."""
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "file.yaml").write_text("text")
    (tmp_path / "agent").write_text(AGENT_SCRIPT)
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "mpirun").write_text(MPIRUN_SCRIPT)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "prted").touch()
    (tmp_path / "older" / "neondist-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "older" / "neondist-0.0.1.dist-info" / "METADATA").write_text(OLDER_METADATA)

    def run(spec, ranks=None, files=("file.yaml",), mpirun="mpirun"):
        env = {**os.environ, SSH_AGENT_VARIABLE: str(tmp_path / "agent"), "OLDER": str(tmp_path / "older")}
        config = tmp_path / "config"
        write_ssh_config(spec, config, env)
        counts = {node.address: 1 for node in spec.nodes} | (ranks or {})
        return check_nodes(spec, counts, config, str(tmp_path / mpirun), [folder / file for file in files], env)

    return run


@posix
def test_ipv6_addresses_are_rejected(check):
    [_, report] = check(resources("fe80::1"))
    assert report.problems == ["mpirun does not accept IPv6 addresses; give a host name, such as one of /etc/hosts"]


@posix
def test_report(check):
    reports = check(resources("a", "chatty"))  # the second one prints an unfinished line at login
    assert [report.problems for report in reports] == [[]] * 3
    for report in reports:
        row = dict(zip(REPORT_COLUMNS, report.table_row(), strict=True))
        assert (row["node"], row["files"], row["Open MPI"]) == (report.node.address, "shared", "5.0.11")
        assert row["neondist"] == nd.__version__
    raise_on_problems(reports)
    assert not [name for name in os.listdir() if name != "file.yaml"]


@posix
def test_all_problems_are_reported(check):
    reports = check(resources("gone", "older", "fine"), {"fine": 10**6}, ["file.yaml", "missing.py"], "no_mpirun")
    with pytest.raises(LaunchError) as error:
        raise_on_problems(reports)
    first, *lines = str(error.value).split("\n  ")
    assert first == "4 of 4 nodes are unusable:"
    assert any(line.startswith("gone: cannot be reached: ssh: connect to host gone") for line in lines)
    assert "older: neondist 0.0.1 there, " in str(error.value)
    assert f"older: {sys.executable} has no no-such_package>=1.5; install it there, " in str(error.value)
    assert any(line.startswith("fine: ") and "too little for 1000000 ranks" in line for line in lines)
    assert any(line.startswith("fine: ") and "too few for 1000000 ranks; list fewer cpus" in line for line in lines)
    assert sum("missing.py cannot be read" in line for line in lines) == 3
    assert sum("no_mpirun is missing or does not run" in line for line in lines) == 3


@posix
def test_other_version_of_mpi(check):
    """Read the version from the first of several lines."""
    (report,) = check(resources("older"))[1:]
    assert "Open MPI 4.1.6 there, 5.0.11 on the chief; install the same version" in report.problems


@posix
def test_missing_python_and_missing_neondist(check, tmp_path):
    (report,) = check(resources("a", python_venv="source /no/such/venv/bin/activate"))[1:]
    assert "/no/such/venv/bin/python does not run" in report.problems[0]
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    (report,) = check(resources("bare", python_venv=str(tmp_path / "venv")))[1:]
    assert any("has no neondist" in problem for problem in report.problems)


@pytest.mark.parametrize(("text", "python"), [
    ("source /opt/venv/bin/activate", "/opt/venv/bin/python"), (". '/a b/bin/activate'", "/a b/bin/python"),
    ("/opt/venv", "/opt/venv/bin/python"), ("", "default"),
])  # fmt: skip
def test_virtual_environments(text, python):
    assert python_path_of(SSHConfig(python_venv=text), "ssh.g.python_venv", "default") == python


@pytest.mark.parametrize("text", [
    "rm -rf /", "source /v/bin/activate; id", "source /v/bin/activate && id", "source venv/bin/activate", "'", "$(id)",
    "conda activate x", "source $HOME/bin/activate", "exec /v/bin/activate",
])  # fmt: skip
def test_invalid_virtual_environments(text):
    with pytest.raises(ConfigError, match=r"ssh\.g\.python_venv: .* is not a virtual environment"):
        python_path_of(SSHConfig(python_venv=text), "ssh.g.python_venv", "default")


@posix
@pytest.mark.parametrize("word", SPECIAL_WORDS)
def test_arguments_are_quoted(word, tmp_path):
    words = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", word, "end"]
    command = ssh_command(Node("a"), tmp_path, words, {SSH_AGENT_VARIABLE: "agent"})
    assert command[:4] == ["agent", "-F", str(tmp_path), "a"]
    process = subprocess.run(["sh", "-c", command[4]], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert process.stdout.strip() == ascii([word, "end"])


@pytest.mark.parametrize("name", ["key", "a b", "100%", "it's", "#x", "$HOME"])
def test_openssh_reads_the_written_file(name, tmp_path):
    """Compare with the options that OpenSSH itself reports for the file."""
    (tmp_path / name).touch()
    (tmp_path / "own").touch(0o600)
    config, key = tmp_path / "config", tmp_path / name
    write_ssh_config(
        resources("b", username="ana", port=2201, key_file=str(key)),
        config,
        {USER_CONFIG_VARIABLE: str(tmp_path / "own")},
    )
    try:
        process = subprocess.run(["ssh", "-F", config, "-G", "b"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs ssh")
    assert process.returncode == 0, process.stderr
    options = dict(line.split(" ", 1) for line in process.stdout.splitlines() if " " in line)
    assert (options["user"], options["port"], options["batchmode"]) == ("ana", "2201", "yes")
    assert (options["serveraliveinterval"], options["serveralivecountmax"]) == ("20", "3")
    assert options["identityfile"].replace("%%", "%") == str(key)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "${HOME}"])
def test_unquotable_key_files(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"ssh\.g\.key_file"):
        write_ssh_config(resources("b", key_file=str(tmp_path / name)), tmp_path / "config", {})


def test_assignment_of_ranks():
    spec = nd.ResourceSpec(
        {"nodes": [{"address": "a", "chief": True, "cpus": [0, 1]}, {"address": "b", "gpus": [0, 1, 2], "cpus": [0]}],
         "ssh": {"username": "x"}}
    )  # fmt: skip
    assert assign_ranks(spec, 5) == {"a": 2, "b": 3}
    assert assign_ranks(spec, 1) == {"a": 1}
    with pytest.raises(LaunchError, match="has 5 devices"):
        assign_ranks(spec, 6)
