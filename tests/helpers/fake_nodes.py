"""Nodes of a cluster on this machine: each is a daemon of mpirun with a host name of its own, which can be killed.

mpirun starts a node's daemon through an agent instead of ssh: a script that runs its words in a UTS namespace.
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
from present import needs_mpirun

import neondist

AGENT = """#!/bin/sh
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
MARK = "NEONDIST_FAKE_NODES"


def missing():
    """Return why there can be no fake nodes here, '' where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes on one machine need Linux and root"
    if not all(map(shutil.which, ("unshare", "setsid", "hostname"))):
        return "nodes on one machine need unshare, setsid and hostname"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        return "UTS namespaces are not allowed here"
    return ""


class FakeNodes:
    """Nodes whose processes are found by a mark in their environment.

    Attributes
    ----------
    env : what mpirun needs to start ranks there
    """

    def __init__(self, folder, *nodes, slots=1):
        agent, hosts = folder / "agent", folder / "hosts"
        agent.write_text(AGENT.replace("PACKAGE", str(Path(neondist.__file__).parent)))
        agent.chmod(0o755)
        hosts.write_text("".join(f"{node} slots={slots}\n" for node in nodes))
        self.nodes, self.mark, self.folder = nodes, uuid.uuid4().hex, folder
        self.env = {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "PRTE_MCA_prte_do_not_resolve": "1",
            "PRTE_MCA_prte_default_hostfile": str(hosts),
            MARK: self.mark,
        }

    def processes(self):
        """Return the processes that are there: (kind, node, pid), kinds mpirun, daemon, rank and others."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                env, words = process.environ(), process.cmdline()
                if env.get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((_kind(process, env, words), env.get("FAKE_HOST", ""), process.pid))
        return found

    def pids(self, kind, node=""):
        """Return the numbers of the processes of a kind, on a node or on all."""
        return [pid for each, where, pid in self.processes() if each == kind and node in ("", where)]

    def switch_off(self, *nodes):
        """Kill all processes of nodes, which cannot be reached from now on."""
        for node in nodes:
            (self.folder / f"off-{node}").touch()
        for _, where, pid in self.processes():
            if where in nodes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self):
        """Kill whatever is left."""
        for _, _, pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kind(process, env, words):
    name = process.name()
    if name in ("prterun", "mpirun"):
        return "mpirun"
    if name == "prted":
        return "daemon" if os.getsid(process.pid) == process.pid else "other"
    if name == "heartbeat":
        return "heartbeat"
    if "OMPI_COMM_WORLD_RANK" in env:
        return "rank"
    return "supervisor" if "run" in words else "other"


__all__ = ["FakeNodes", "missing", "needs_mpirun"]
