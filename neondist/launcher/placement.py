"""Placement of ranks on the nodes of a resource file or a list of hosts, and the mpirun command for it."""

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
from ..cluster.hosts import ranks_per_host, slots_by_node
from ..cluster.preflight import (
    REPORT_COLUMNS,
    NodeReport,
    check_nodes,
    raise_on_problems,
    reject_login_shells,
    reject_shared_host_names,
)
from ..cluster.ssh_config import SSH_ARGS_VARIABLE, ssh_arguments_for_mpirun, ssh_settings_of, write_ssh_config
from ..errors import LaunchError
from ..system import threads
from ..terminal.console import counted, say
from .monitor import LOOPBACK_ADDRESS
from .mpirun import INSTALL_REMEDY, Mpirun

_HOST_FILE_VARIABLE = "PRTE_MCA_prte_default_hostfile"


@dataclass
class JobPlacement:
    """Placement of ranks on checked nodes, in the order of `reports`."""

    resources: ResourceSpec
    ssh_config: Path
    reports: list[NodeReport]

    def command(
        self, mpirun: Mpirun, words: Sequence[str], variables: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """Return the command that runs `words` on every node, with its own Python and environment variables.

        The ranks of a node share its cores unless the user has set the number of threads.

        Raises
        ------
        UnusableNodesError
            Several nodes have the same host name, or the login shell of a node is unsuitable.
        """
        reject_shared_host_names(self.reports)
        reject_login_shells(self.reports, env)
        names = [name for name in variables if name not in threads.THREAD_COUNT_VARIABLES]
        commands = []
        for report in self.reports:
            node_variables = [f"{name}={value}" for name, value in self.node_variables(report, env).items()]
            safe_path_file = str(Path(report.node_info["package"]) / "safe_path.py")
            command = [*(["env"] if node_variables else []), *node_variables, report.python, safe_path_file, *words]
            commands.append((report.node.address, report.ranks, command))
        return _command_on_hosts(mpirun, names, commands)

    def node_variables(self, report: NodeReport, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a node; its ranks share its cores unless the user sets threads."""
        shared_variables = ssh_settings_of(self.resources, report.node).shared_envs
        if threads.is_thread_count_set({**env, **shared_variables}):
            return dict(shared_variables)
        return {
            **dict.fromkeys(threads.THREAD_COUNT_VARIABLES, str(max(1, report.node_info["cores"] // report.ranks))),
            **shared_variables,
        }

    def mpirun_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which mpirun starts its daemons with the SSH settings of the check."""
        variables = {name: value for name, value in env.items() if name != _HOST_FILE_VARIABLE}
        return {**variables, SSH_ARGS_VARIABLE: f"{env.get(SSH_ARGS_VARIABLE, '')} -F {self.ssh_config}".strip()}

    def supervisor_addresses(self) -> list[str]:
        """Return the loopback address, and the chief's addresses on this machine, by which other nodes reach it."""
        addresses: list[str] = []
        try:
            candidates = socket.getaddrinfo(self.resources.chief.address, None, type=socket.SOCK_STREAM)
        except OSError:
            candidates = []
        for family, *_, socket_address in candidates:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((socket_address[0], 0))
                except OSError:
                    continue
            addresses.append(str(socket_address[0]))
        return list(dict.fromkeys([LOOPBACK_ADDRESS, *addresses]))


@dataclass
class HostListPlacement:
    """Placement of ranks on listed hosts: the number of ranks on each host, in order."""

    hosts: dict[str, int]

    def command(
        self, mpirun: Mpirun, words: Sequence[str], variables: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """Return the command that runs `words` on every host."""
        names = [
            name for name in variables if name not in threads.THREAD_COUNT_VARIABLES or threads.is_thread_count_set(env)
        ]
        command = safe_path.python_command(*words)
        return _command_on_hosts(mpirun, names, [(host, ranks, command) for host, ranks in self.hosts.items()])

    def mpirun_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of mpirun: without a host file, and with the user's ssh_config."""
        variables = {name: value for name, value in env.items() if name != _HOST_FILE_VARIABLE}
        ssh_arguments = ssh_arguments_for_mpirun(env)
        return {**variables, SSH_ARGS_VARIABLE: ssh_arguments} if ssh_arguments else variables

    def supervisor_addresses(self) -> list[str]:
        """Return the addresses of the supervisor on this machine."""
        return list_own_addresses()


def _command_on_hosts(
    mpirun: Mpirun, names: Sequence[str], commands: Sequence[tuple[str, int, list[str]]]
) -> list[str]:
    """Return the command that starts ranks on several hosts, given each host with its number of ranks and command."""
    words: list[str] = []
    for host, ranks, command in commands:
        rank_options = ["-n", str(ranks), *(word for name in names for word in ("-x", name))]
        rank_options = mpirun.command(ranks, names)[1:] if not words else rank_options
        words += [":", *rank_options, "--host", f"{host}:{ranks}", *command]
    return [mpirun.path, *words[1:]]


def list_own_addresses() -> list[str]:
    """Return the addresses by which other machines reach this one, and the loopback address."""
    import psutil

    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    local = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    others = [one for one in local if not ipaddress.ip_address(one.partition("%")[0]).is_link_local and one != "::1"]
    return list(dict.fromkeys([LOOPBACK_ADDRESS, *others]))


def assign_ranks(resources: ResourceSpec, ranks: int) -> dict[str, int]:
    """Return the number of ranks on each node, filled in the order of the file.

    Raises
    ------
    LaunchError
        The nodes have fewer devices than ranks.
    """
    if ranks > resources.replicas:
        raise LaunchError(
            f"-n {ranks}: the resource file has {counted(resources.replicas, 'device')}; give at most that many ranks,"
            " or list more cpus or gpus"
        )
    return ranks_per_host(slots_by_node(resources), ranks)


@contextmanager
def open_job_placement(
    arguments: argparse.Namespace, mpirun: Mpirun, ranks: int
) -> Iterator[JobPlacement | HostListPlacement | None]:
    """Yield the placement of ranks, or None if mpirun decides; nodes of a resource file are checked and printed.

    Raises
    ------
    LaunchError
        mpirun is not Open MPI's, or nodes are unusable; the message names all unusable nodes.
    """
    resources = arguments.resources
    if resources is None and arguments.hosts is None:
        yield None
        return
    if not mpirun.is_open_mpi:
        raise LaunchError(
            f"several machines require Open MPI's mpirun, but {mpirun.path} belongs to another MPI; {INSTALL_REMEDY}"
        )
    if resources is None:
        yield HostListPlacement(arguments.hosts)
        return
    counts = assign_ranks(resources, ranks) if arguments.hosts is None else arguments.hosts
    # mpirun splits the options of ssh at spaces
    with tempfile.TemporaryDirectory(
        prefix="neondist-", dir="/tmp" if " " in tempfile.gettempdir() else None
    ) as folder:
        ssh_config = Path(folder, "ssh_config")
        write_ssh_config(resources, ssh_config, os.environ)
        files = [Path(arguments.file), *(Path(module) for module in arguments.modules if module.endswith(".py"))]
        reports = check_nodes(resources, counts, ssh_config, mpirun.path, files, os.environ)
        if arguments.generation in (None, 1):
            print_node_reports(reports)
        raise_on_problems(reports)
        yield JobPlacement(resources, ssh_config, reports)


def print_node_reports(reports: Sequence[NodeReport]) -> None:
    """Print a table of the reports."""
    rows = [REPORT_COLUMNS, *(report.table_row() for report in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for table_row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(table_row, widths, strict=True)).rstrip())
