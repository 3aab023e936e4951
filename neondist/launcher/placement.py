"""Ranks of a job on the nodes of a resource file, or on hosts of a list: what mpirun is given for each."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import safe_path
from ..cluster import ResourceSpec
from ..cluster.hosts import fill, slots_of
from ..cluster.preflight import COLUMNS, NodeReport, check_nodes, refuse
from ..cluster.ssh_config import settings_of, write_ssh_config
from ..errors import LaunchError
from ..system import threads
from ..terminal.console import say
from .monitor import LOOPBACK
from .mpirun import REMEDY, Mpirun

_SSH_ARGS, _HOST_FILE = "PRTE_MCA_plm_ssh_args", "PRTE_MCA_prte_default_hostfile"


@dataclass
class Placement:
    """Nodes that have passed the check, in the order of their ranks.

    Attributes
    ----------
    resources : ResourceSpec
    config : Path
        The ssh_config.
    reports : list of NodeReport
    """

    resources: ResourceSpec
    config: Path
    reports: list[NodeReport]

    def command(
        self, mpirun: Mpirun, words: Sequence[str], variables: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """Return the words that start the same command on every node, by its own Python, with its own variables.

        Threads are shared by the ranks of a node, where the user has not chosen their number.
        """
        parts: list[str] = []
        for report in self.reports:
            own = self.variables(report, env)
            names = [name for name in variables if name not in threads.VARIABLES]
            start = ["-n", str(report.ranks), *(word for name in names for word in ("-x", name))]
            start = mpirun.command(report.ranks, names)[1:] if not parts else start
            start += ["--host", f"{report.node.address}:{report.ranks}"]
            if own:
                start += ["env", *(f"{name}={value}" for name, value in own.items())]
            here = str(Path(report.facts["package"]) / "safe_path.py")
            parts += [":", *start, report.python, here, *words]
        return [mpirun.path, *parts[1:]]

    def variables(self, report: NodeReport, env: Mapping[str, str]) -> dict[str, str]:
        """Return a node's own environment variables; ranks share its cores where the user has not chosen threads."""
        own = settings_of(self.resources, report.node).shared_envs
        if threads.chosen({**env, **own}):
            return dict(own)
        return {**dict.fromkeys(threads.VARIABLES, str(max(1, report.facts["cores"] // report.ranks))), **own}

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for mpirun, whose daemons are started as the nodes were checked."""
        kept = {name: value for name, value in env.items() if name != _HOST_FILE}
        return {**kept, _SSH_ARGS: f"{env.get(_SSH_ARGS, '')} -F {self.config}".strip()}

    def addresses(self) -> list[str]:
        """Return the chief's addresses, if they are this machine's: where ranks on other nodes reach the supervisor."""
        found: list[str] = []
        try:
            infos = socket.getaddrinfo(self.resources.chief.address, None, type=socket.SOCK_STREAM)
        except OSError:
            infos = []
        for family, *_, place in infos:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                try:
                    trial.bind((place[0], 0))
                except OSError:
                    continue
            found.append(str(place[0]))
        return list(dict.fromkeys([LOOPBACK, *found]))


@dataclass
class HostPlacement:
    """Hosts of a list, in the order of their ranks.

    Attributes
    ----------
    hosts : dict of str to int
        Ranks of each.
    """

    hosts: dict[str, int]

    def command(
        self, mpirun: Mpirun, words: Sequence[str], variables: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """Return the words that start the same command on every host."""
        names = [name for name in variables if name not in threads.VARIABLES or threads.chosen(env)]
        parts: list[str] = []
        for host, ranks in self.hosts.items():
            start = ["-n", str(ranks), *(word for name in names for word in ("-x", name))]
            start = mpirun.command(ranks, names)[1:] if not parts else start
            parts += [":", *start, "--host", f"{host}:{ranks}", *safe_path.command(*words)]
        return [mpirun.path, *parts[1:]]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for mpirun, which must know no other hosts."""
        return {name: value for name, value in env.items() if name != _HOST_FILE}

    def addresses(self) -> list[str]:
        """Return the addresses of this machine at which ranks reach the supervisor."""
        return list_addresses()


def list_addresses() -> list[str]:
    """Return the addresses of this machine at which others may reach it, and the loopback address."""
    import psutil

    every = [one for interface in psutil.net_if_addrs().values() for one in interface]
    found = [one.address for one in every if one.family in (socket.AF_INET, socket.AF_INET6)]
    others = [one for one in found if not ipaddress.ip_address(one.partition("%")[0]).is_link_local and one != "::1"]
    return list(dict.fromkeys([LOOPBACK, *others]))


def place(resources: ResourceSpec, ranks: int) -> dict[str, int]:
    """Return how many of so many ranks each node runs, filled in the order of the file.

    Raises
    ------
    LaunchError
        The nodes take fewer.
    """
    if ranks > resources.replicas:
        raise LaunchError(
            f"-n {ranks}: the resource file has {resources.replicas} devices; give at most that many ranks, or list"
            " more cpus or gpus"
        )
    return fill(slots_of(resources), ranks)


@contextmanager
def placed(arguments: argparse.Namespace, mpirun: Mpirun, ranks: int) -> Iterator[Placement | HostPlacement | None]:
    """Give the place of each rank, None where mpirun decides; nodes of a resource file are checked and shown.

    Raises
    ------
    LaunchError
        Nodes cannot take part; the message names all of them.
    """
    resources = arguments.resources
    if resources is None and arguments.hosts is None:
        yield None
        return
    if not mpirun.is_open_mpi:
        raise LaunchError(f"several machines require Open MPI's mpirun, but {mpirun.path} is another one; {REMEDY}")
    if resources is None:
        yield HostPlacement(arguments.hosts)
        return
    counts = place(resources, ranks) if arguments.hosts is None else arguments.hosts
    with tempfile.TemporaryDirectory(prefix="neondist-", dir=_folder()) as folder:
        config = Path(folder, "ssh_config")
        write_ssh_config(resources, config, os.environ)
        files = [Path(arguments.file), *(Path(one) for one in arguments.modules if one.endswith(".py"))]
        reports = check_nodes(resources, counts, config, mpirun.path, files, os.environ)
        if arguments.generation in (None, 1):
            show(reports)
        refuse(reports)
        yield Placement(resources, config, reports)


def show(reports: Sequence[NodeReport]) -> None:
    """Print a table of what was found."""
    rows = [COLUMNS, *(report.row() for report in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _folder() -> str | None:
    """Return where temporary files go: mpirun splits the options of ssh at blanks."""
    return "/tmp" if " " in tempfile.gettempdir() else None
