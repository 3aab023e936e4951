"""Simulated cluster nodes on this machine: mpirun daemons with their own host names, which can be killed.

Instead of ssh, mpirun uses an agent script, which runs the daemon of a node in a UTS namespace.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import neondist

SSH_AGENT_SCRIPT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    case $1 in -[FlpioO]) shift;; esac
    shift
done
export FAKE_HOST="$1"; shift
[ -e "${0%/*}/off-$FAKE_HOST" ] && exit 255
# another file system, without neondist
[ -e "${0%/*}/bare-$FAKE_HOST" ] && exec unshare --mount sh -c 'mount -t tmpfs none PACKAGE; eval "$@"' sh "$@"
# as sshd does
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
unset PRTE_MCA_prte_default_hostfile
case "$*" in *prted*) wait=;; *) wait=--wait;; esac # mpirun's daemons leave this script at once
exec setsid $wait unshare --uts sh -c 'hostname "$FAKE_HOST"; eval "$@"' sh "$@"
"""
MARK_VARIABLE = "NEONDIST_FAKE_NODES"


def find_obstacle():
    """Return the reason that fake nodes are unavailable, or ''."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes on one machine need Linux and root"
    if not all(map(shutil.which, ("unshare", "setsid", "hostname"))):
        return "nodes on one machine need unshare, setsid and hostname"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        return "UTS namespaces are not allowed here"
    return ""


needs_fake_nodes = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


class FakeNodes:
    """Nodes whose processes are identified by a mark in their environment.

    Attributes
    ----------
    env : environment of mpirun for ranks on the nodes
    """

    def __init__(self, folder, *nodes, slots=1):
        agent, hosts = folder / "agent", folder / "hosts"
        agent.write_text(SSH_AGENT_SCRIPT.replace("PACKAGE", str(Path(neondist.__file__).parent)))
        agent.chmod(0o755)
        hosts.write_text("".join(f"{node} slots={slots}\n" for node in nodes))
        self.nodes, self.mark, self.folder = nodes, uuid.uuid4().hex, folder
        self.env = {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "PRTE_MCA_prte_do_not_resolve": "1",
            "PRTE_MCA_prte_default_hostfile": str(hosts),
            MARK_VARIABLE: self.mark,
        }

    def processes(self):
        """Return all processes as (kind, node, pid); kinds: mpirun, daemon, rank, supervisor, heartbeat and other."""
        result = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                env, command = process.environ(), process.cmdline()
                if env.get(MARK_VARIABLE) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    result.append((_kind(process, env, command), env.get("FAKE_HOST", ""), process.pid))
        return result

    def pids(self, kind, node=""):
        """Return the ids of all processes of a kind, on one node or all."""
        return [pid for other, host, pid in self.processes() if other == kind and node in ("", host)]

    def switch_off(self, *nodes):
        """Kill all processes of nodes and make the nodes unreachable."""
        for node in nodes:
            (self.folder / f"off-{node}").touch()
        for _, host, pid in self.processes():
            if host in nodes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self):
        """Kill all remaining processes."""
        for _, _, pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kind(process, env, command):
    name = process.name()
    if name in ("prterun", "mpirun"):
        return "mpirun"
    if name == "prted":
        return "daemon" if os.getsid(process.pid) == process.pid else "other"
    if name == "heartbeat":
        return "heartbeat"
    if "OMPI_COMM_WORLD_RANK" in env:
        return "rank"
    return "supervisor" if "run" in command else "other"
