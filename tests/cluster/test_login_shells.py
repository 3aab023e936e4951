"""Login shells of other machines: csh and fish, and shells that print a message."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import neondist as nd
from neondist.cluster.hosts import find_unusable_hosts
from neondist.cluster.preflight import check_nodes, reject_login_shells
from neondist.cluster.ssh_config import login_shells_for_mpirun
from neondist.errors import LaunchError
from neondist.launcher.job_nodes import _create_ssh_node
from neondist.launcher.remote import RemoteProcess
from neondist.launcher.service_process import ServiceProcess
from neondist.services.wire import TOKEN_VARIABLE

SSH_SCRIPT = """#!/bin/sh
for command do :; done
case "$command" in *"
"*) echo "Unmatched '." >&2; exit 1;; esac # as csh does
echo Welcome at my machine
SHELL=$LOGIN_SHELL exec sh -c "$command"
"""
pytestmark = pytest.mark.skipif(os.name != "posix", reason="a shell script")


@pytest.fixture
def login(tmp_path, monkeypatch):
    """Return a function that sets the login shells of this and other machines, and returns the environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH_SCRIPT)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(nd.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)

    def set_shells(own_shell, login_shell):
        monkeypatch.setenv("LOGIN_SHELL", login_shell)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_shell=own_shell))
        return dict(os.environ)

    return set_shells


@pytest.mark.parametrize(("own_shell", "login_shell", "problem"), [
    ("/bin/bash", "/usr/bin/zsh", ""), ("/usr/bin/fish", "/bin/sh", ""), ("/bin/csh", "/bin/tcsh", ""),
    ("/bin/bash", "", ""), ("/bin/bash", "/bin/tcsh", "login shell"), ("/bin/tcsh", "/bin/bash", "login shell"),
    ("/usr/bin/fish", "/usr/bin/fish", "login shell"),
])  # fmt: skip
def test_login_shells_that_mpirun_cannot_use(login, own_shell, login_shell, problem):
    env = login(own_shell, login_shell)
    reason = find_unusable_hosts(["a"], env, login_shells_for_mpirun(env)).get("a", "")
    assert (problem in reason, bool(reason)) == (True, bool(problem)), reason
    assert not find_unusable_hosts(["a"], env)
    assert not find_unusable_hosts(["a"], env, login_shells_for_mpirun({**env, "PRTE_MCA_plm_ssh_agent": "rsh"}))
    nodes = [{"address": "here", "chief": True}, {"address": "a", "ssh_config": "g"}]
    resources = nd.ResourceSpec({"nodes": nodes, "ssh": {"g": {"python_venv": sys.prefix}}})
    reports = check_nodes(resources, {"a": 1}, Path("ssh_config"), "mpirun", [], env)
    assert reports[0].node_info, reports[0].problems
    reports[0].problems.clear()
    if problem:
        with pytest.raises(LaunchError, match=rf"a: its login shell {login_shell} cannot run the commands of mpirun;"):
            reject_login_shells(reports, env)
    else:
        reject_login_shells(reports, env)


def test_address_after_an_unfinished_line_of_a_login_shell():
    words = ["sh", "-c", r"printf 'welcome\n\033]0;caf\351\007'; echo PServer at 127.0.0.1:7; sleep 60"]
    process = RemoteProcess(words, [], {}, subprocess.PIPE)
    node = SimpleNamespace(name="a", any_port_address="127.0.0.1:0")
    service = ServiceProcess("server", ["ps"], node, lambda _: process)
    service.wait_until_listening()
    assert service.address == "127.0.0.1:7"
    process.kill()
    process.wait()
    process.stdout.close()
    process._process.stdin.close()


@pytest.mark.long
def test_servers_of_machines_with_another_login_shell(login, monkeypatch):
    login("/bin/bash", "/bin/tcsh")
    monkeypatch.setenv(TOKEN_VARIABLE, "x" * 40)
    node = _create_ssh_node("a")

    def start(words):
        return node.start(["serve", *words], {}, "", None, subprocess.PIPE)

    service = ServiceProcess("server", ["ps"], SimpleNamespace(name="a", any_port_address="127.0.0.1:0"), start)
    try:
        service.wait_until_listening()
        assert service.address.startswith("127.0.0.1:")
    finally:
        service._process.kill()
        service._process.wait()
        service._process.stdout.close()
        service._process._process.stdin.close()
