"""Parallel check of all nodes before the start of a job, over the connections that mpirun will use."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..terminal.console import counted
from .resources import Node, ResourceSpec, SSHConfig
from .ssh_config import (
    UNUSABLE_SHELL_PROBLEM,
    format_ssh_command,
    login_shells_for_mpirun,
    python_path_of,
    ssh_command,
    ssh_settings_of,
)

NODE_CHECK_TIMEOUT = 60.0
MAX_CLOCK_SKEW_SECONDS = 30.0
MAX_RANKS_PER_CORE = 16
"""Maximum number of ranks per core: more than any practical test needs, few enough to keep the machine responsive."""
MIN_BYTES_PER_RANK = 64 << 20
"""Memory of a rank that has loaded only its libraries, in bytes."""
_OUTPUT_PREFIX = "neondist-preflight "
# uses only the standard library; its argument is a JSON list: [path of mpirun, working folder, a file that exists there
# if the folder is shared, files to compare]
_CHECK_PROGRAM = """
import hashlib, importlib.util, json, os, re, subprocess, sys, time
from importlib import metadata
mpirun, folder, witness, files = json.loads(sys.argv[1])
def attempt(function, *words):
    try: return function(*words)
    except Exception: return None
def digest(path):
    with open(path, "rb") as file: return hashlib.sha256(file.read()).hexdigest()
def memory():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
def mpi():
    os.stat(os.path.join(os.path.dirname(mpirun), "prted"))
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20).stdout
    return version.splitlines()[0].split()[-1]
def is_missing(package):
    return "extra ==" not in package and attempt(metadata.version, re.match("[\\w.-]+", package)[0]) is None
spec = attempt(importlib.util.find_spec, "neondist")
print("MARK" + json.dumps({"host": os.uname().nodename, "python": "%d.%d" % sys.version_info[:2],
    "neondist": spec and attempt(metadata.version, "neondist"), "package": spec and os.path.dirname(spec.origin),
    "missing": list(filter(is_missing, attempt(metadata.requires, "neondist") or [])) if spec else ["neondist"],
    "mpi4py": attempt(metadata.version, "mpi4py"), "mpi": attempt(mpi), "memory": attempt(memory),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "clock": time.time(), "shell": os.environ.get("SHELL", ""),
    "address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
    "folder": os.path.isdir(folder), "shared": os.path.exists(witness),
    "files": [attempt(digest, path) for path in files]}))
""".replace("MARK", _OUTPUT_PREFIX)


@dataclass
class NodeReport:
    """Description of a node, and the problems that make it unusable.

    Attributes
    ----------
    node : Node
    ssh : SSHConfig
    ranks : int
        Number of ranks on the node.
    python : str
        Path of Python on the node.
    node_info : dict
        Results of the check; empty for a node that does not respond.
    problems : list of str
    clock_skew : float
        Seconds by which the node's clock is ahead of this machine's.
    """

    node: Node
    ssh: SSHConfig
    ranks: int
    python: str
    node_info: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    clock_skew: float = 0.0

    def table_row(self) -> tuple[str, ...]:
        """Return the row of the table for this node."""
        info = self.node_info
        if not info:
            return (self.node.address, str(self.ranks), *["-"] * (len(REPORT_COLUMNS) - 2))
        files = "shared" if info["shared"] else "copied" if info["folder"] and all(info["files"]) else "missing"
        free = "?" if info["memory"] is None else f"{info['memory'] / 2**30:.1f} GiB"
        versions = (str(info[name] or "none") for name in ("python", "neondist", "mpi4py", "mpi"))
        return (
            self.node.address, str(self.ranks), *versions, str(info["cores"]), free, f"{self.clock_skew:+.1f} s", files
        )  # fmt: skip


REPORT_COLUMNS = "node", "ranks", "python", "neondist", "mpi4py", "Open MPI", "cores", "free memory", "clock", "files"


def check_nodes(
    resources: ResourceSpec,
    ranks: Mapping[str, int],
    ssh_config_path: Path,
    mpirun: str,
    files: Sequence[Path],
    env: Mapping[str, str],
) -> list[NodeReport]:
    """Check all nodes of a job in parallel, without starting anything; return the reports.

    Parameters
    ----------
    resources : ResourceSpec
    ranks : mapping of str to int
        Number of ranks by address of a node; nodes without ranks are skipped.
    ssh_config_path : Path
        Path of an ssh_config written by `write_ssh_config`.
    mpirun : str
        Path of mpirun, the same on all nodes; prted must be in the same folder.
    files : sequence of Path
        Files that must exist on all nodes with the same content.
    env : mapping
        Environment of this process, which may name an agent instead of ssh.
    """
    folder = Path.cwd()
    witness_file = folder / f".neondist-{secrets.token_hex(8)}"
    check_arguments = [mpirun, str(folder), str(witness_file), [str(folder / file) for file in files]]
    reports = []
    for node in (node for node in resources.nodes if ranks.get(node.address)):
        location = f"ssh.{node.ssh_config}.python_venv"
        ssh = ssh_settings_of(resources, node)
        reports.append(NodeReport(node, ssh, ranks[node.address], python_path_of(ssh, location, sys.executable)))
    with suppress(OSError):
        witness_file.touch()
    try:
        asyncio.run(_check_all_nodes(reports, ssh_config_path, json.dumps(check_arguments), env))
    finally:
        with suppress(OSError):
            witness_file.unlink()
    chief = next((report.node_info for report in reports if report.node.chief and report.node_info), {})
    for report in reports:
        report.problems += list(_find_problems(report, chief, mpirun, folder, files))
    return reports


class UnusableNodesError(LaunchError):
    """Nodes of a job are unusable.

    Attributes
    ----------
    nodes : tuple of str
        Addresses of the unusable nodes.
    """

    nodes: tuple[str, ...] = ()


def raise_on_problems(reports: Iterable[NodeReport]) -> None:
    """Raise UnusableNodesError with the problems of all nodes, if any."""
    reports = list(reports)
    problems = [f"{report.node.address}: {problem}" for report in reports for problem in report.problems]
    if problems:
        nodes = tuple(report.node.address for report in reports if report.problems)
        error = UnusableNodesError("\n  ".join([f"{len(nodes)} of {len(reports)} nodes are unusable:", *problems]))
        error.nodes = nodes
        raise error


def reject_login_shells(reports: Sequence[NodeReport], env: Mapping[str, str]) -> None:
    """Raise UnusableNodesError if the login shell of a node cannot run the commands of mpirun."""
    shells = login_shells_for_mpirun(env)
    for report in reports:
        shell = report.node_info["shell"]
        if report.node.ssh_config is not None and shells and shell and Path(shell).name not in shells:
            report.problems.append(f"its login shell {shell} {UNUSABLE_SHELL_PROBLEM}")
    raise_on_problems(reports)


def reject_shared_host_names(reports: Sequence[NodeReport]) -> None:
    """Raise UnusableNodesError if nodes of an MPI job have the same host name, by which MPI identifies machines."""
    first_nodes: dict[str, str] = {}
    for report in reports:
        name, address = report.node_info["host"], report.node.address
        if (first := first_nodes.setdefault(name, address)) != address:
            report.problems.append(
                f"has the same host name as {first}, {name}, by which MPI identifies machines; list each machine once,"
                " with all its devices, or give the machines different host names"
            )
    raise_on_problems(reports)


async def _check_all_nodes(
    reports: Sequence[NodeReport], ssh_config_path: Path, check_arguments: str, env: Mapping[str, str]
) -> None:
    await asyncio.gather(*(_check_node(report, ssh_config_path, check_arguments, env) for report in reports))


async def _check_node(report: NodeReport, ssh_config_path: Path, check_arguments: str, env: Mapping[str, str]) -> None:
    """Run the check on a node, and record its result."""
    if ":" in report.node.address:
        report.problems.append("mpirun does not accept IPv6 addresses; give a host name, such as one of /etc/hosts")
        return
    command = [report.python, "-c", f"exec({_CHECK_PROGRAM!r})", check_arguments]  # csh accepts no quoted newlines
    if report.node.ssh_config is not None:
        command = ssh_command(report.node, ssh_config_path, command, env)
    start_time, pipe = time.time(), asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=dict(env)
        )
    except OSError as error:
        report.problems.append(f"{command[0]} cannot be run ({error.strerror}); give python_venv, or install OpenSSH")
        return
    try:
        out, err = await asyncio.wait_for(process.communicate(), NODE_CHECK_TIMEOUT)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        report.problems.append(f"no answer within {NODE_CHECK_TIMEOUT:g} s; check that it is up and not overloaded")
        return
    _, prefix, output = out.decode(errors="replace").partition(_OUTPUT_PREFIX)  # follows output of the login shell
    if prefix:
        report.node_info = json.loads(output.splitlines()[0])
        report.clock_skew = report.node_info["clock"] - (start_time + time.time()) / 2
        return
    message = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1][:300]
    if process.returncode == 255 and report.node.ssh_config is not None:
        message += f"; check address, username, port and key_file: {format_ssh_command(report.node, report.ssh, env)}"
        report.problems.append(f"cannot be reached: {message}")
    else:
        report.problems.append(f"{report.python} does not run ({message}); set python_venv for this node")


def _find_problems(
    report: NodeReport, chief: Mapping[str, Any], mpirun: str, folder: Path, files: Sequence[Path]
) -> Iterable[str]:
    """Yield the problems of a node that responded, compared to the chief."""
    info = report.node_info
    if not info:
        return
    if info["missing"]:
        yield f"{report.python} has no {', '.join(info['missing'])}; install it there, or set python_venv"
    if info["mpi"] is None:
        yield f"{mpirun} is missing or does not run; install Open MPI at the same path on all nodes"
    for name, title in (("python", "Python"), ("neondist", "neondist"), ("mpi4py", "mpi4py"), ("mpi", "Open MPI")):
        if chief and info[name] is not None and info[name] != chief[name]:
            yield f"{title} {info[name]} there, {chief[name]} on the chief; install the same version"
    if not info["folder"]:
        yield f"the folder {folder} is missing; share it, or copy it to the same path"
    else:
        for file, digest, expected in zip(files, info["files"], chief.get("files", info["files"]), strict=True):
            if digest is None or digest != expected:
                yield f"{file} {'cannot be read' if digest is None else 'has different content'}; share or copy it"
    ranks = f"{counted(report.ranks, 'rank')}; list fewer cpus or gpus for the node"
    if info["memory"] is not None and info["memory"] < report.ranks * MIN_BYTES_PER_RANK:
        yield f"{info['memory'] >> 20} MiB free, too little for {ranks}"
    if report.ranks > MAX_RANKS_PER_CORE * info["cores"]:
        yield f"{counted(info['cores'], 'core')}, too few for {ranks}"
    if abs(report.clock_skew) > MAX_CLOCK_SKEW_SECONDS:
        yield f"its clock is {report.clock_skew:+.0f} s from the chief's; synchronise it (chrony or ntpd)"
