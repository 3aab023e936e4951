"""Machines of an asynchronous job: placement and start of its workers and servers."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .. import safe_path
from ..cluster.hosts import SSH_TIMEOUT, UNREACHABLE_TEXT, command_on_host, find_unusable_hosts, slots_by_node
from ..cluster.preflight import NodeReport
from ..cluster.ssh_config import ssh_command, unreachable_host_remedy
from ..errors import LaunchError
from ..terminal.console import counted
from .fork_server import ForkServer, Process
from .launch import require_mpirun
from .monitor import LOOPBACK_ADDRESS
from .parent_watch import end_process
from .placement import JobPlacement, list_own_addresses, open_job_placement
from .remote import REMOTE_MODULE, RemoteProcess, remote_side_command
from .scaling import LOCAL_HOST, read_slots

_SIGKILL_AFTER_SECONDS = 10.0
_SSH_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""Options of ssh by which a lost machine is detected within the lease of a rank."""


@dataclass(frozen=True)
class JobNode:
    """A machine of a job.

    Attributes
    ----------
    name : str
    address : str
        Address of services on the machine; '' if none may run there.
    remote_command : callable, optional
        Returns the command that runs a given command on the machine. None: the local machine.
    remote_program : sequence of str
        Command that runs the module `remote` on the machine.
    variables : mapping of str to str
        Environment variables of its processes.
    """

    name: str = LOCAL_HOST
    address: str = LOOPBACK_ADDRESS
    remote_command: Callable[[Sequence[str]], list[str]] | None = None
    remote_program: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def any_port_address(self) -> str:
        """The address with port 0, for a service on any free port."""
        return f"[{self.address}]:0" if ":" in self.address else f"{self.address}:0"

    def is_reachable(self) -> bool:
        """Whether the machine can be reached."""
        if self.remote_command is None:
            return True
        try:
            process = subprocess.run(
                self.remote_command(["true"]), capture_output=True, timeout=SSH_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return process.returncode == 0

    def start(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        name: str,
        fork_server: ForkServer | None,
        output: int | None,
    ) -> Process:
        """Start a `neondist` command on the machine; `output` is the `stdout` of `subprocess.Popen`."""
        variables = {**self.variables, **variables}
        if self.remote_command is not None:
            return RemoteProcess(self.remote_command(self.remote_program), words, variables, output)
        env = {**os.environ, **variables}
        if fork_server is not None and (process := fork_server.start(words, env, name, output)) is not None:
            return process
        return subprocess.Popen(
            safe_path.python_command("neondist", *words, ends_with_parent=True),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            text=True,
            start_new_session=True,
        )


class NodeLostError(LaunchError):
    """A machine that runs a server cannot be reached.

    Attributes
    ----------
    node : str
        Name of the machine.
    """

    def __init__(self, node: str) -> None:
        super().__init__(f"{node} cannot be reached; continue with --resume auto on the other machines")
        self.node = node


class JobNodes:
    """Machines of a job.

    Parameters
    ----------
    nodes : sequence of JobNode
        At least one.
    workers : sequence of str
        Name of each worker's initial machine. A name that is not among the nodes is a host reached by ssh, with the
        same files at the same paths.
    fork_server : ForkServer, optional
        Starts processes on this machine.

    Attributes
    ----------
    workers : list of str
    """

    def __init__(self, nodes: Sequence[JobNode], workers: Sequence[str], fork_server: ForkServer | None = None) -> None:
        self.workers = list(workers)
        self._nodes, self._fork_server = {node.name: node for node in nodes}, fork_server

    @property
    def service_nodes(self) -> list[JobNode]:
        """Machines for servers, assigned in turn; the first is this machine, which also runs the master."""
        nodes = self._nodes.values()
        local_nodes = [node for node in nodes if node.remote_command is None] or [JobNode(address=_own_address([]))]
        return local_nodes[:1] + [node for node in nodes if node.remote_command is not None and node.address]

    @contextmanager
    def running_process(
        self, node: JobNode | str, words: Sequence[str], variables: Mapping[str, str], name: str, output: int | None
    ) -> Iterator[Process]:
        """Run a `neondist` command on a machine until the block ends."""
        if isinstance(node, str):
            node = self._nodes.get(node) or _create_ssh_node(node)
        process = node.start(words, variables, name, self._fork_server, output)
        try:
            yield process
        finally:
            if process.poll() is None:
                end_process(
                    process, _SIGKILL_AFTER_SECONDS, signal.SIGTERM if output == subprocess.PIPE else signal.SIGINT
                )
            if process.stdout is not None:
                process.stdout.close()

    def drop_node(self, lost_node: str) -> None:
        """Remove a machine; its workers are distributed over the others.

        Raises
        ------
        NodeLostError
            No other machine is left.
        """
        del self._nodes[lost_node]
        if not self._nodes:
            raise NodeLostError(lost_node)
        workers = [name for name in self.workers if name != lost_node]
        while len(workers) < len(self.workers):
            workers.append(min(self._nodes, key=workers.count))
        self.workers = workers

    def choose_replacement_node(self, lost_node: str, workers: Sequence[str]) -> str:
        """Return the machine for a worker of a lost machine: the reachable one with the fewest workers.

        `workers` are the machines of the other workers. The lost machine is returned if it is reachable again, or if no
        other machine is reachable.
        """
        worker_counts = Counter(workers)
        other_nodes = sorted(
            (node for node in self._nodes.values() if node.name != lost_node), key=lambda node: worker_counts[node.name]
        )
        return next((node.name for node in (self._nodes[lost_node], *other_nodes) if node.is_reachable()), lost_node)


def assign_workers(arguments: argparse.Namespace, workers: int, tiles: int) -> dict[str, int]:
    """Return the number of workers on each host or node, in order; a worker never spans several of them.

    Parameters
    ----------
    arguments : Namespace
        With `resources` or a `source` of hosts; without either, all workers run on this machine.
    workers, tiles : int
        Number of workers, and number of ranks of each worker.

    Raises
    ------
    LaunchError
        The machines have too few slots.
    """
    if arguments.resources is not None:
        return assign_workers_to_slots(slots_by_node(arguments.resources), workers, tiles)
    if arguments.source is not None:
        return assign_workers_to_slots(read_slots(arguments.source), workers, tiles)
    return {LOCAL_HOST: workers}


def assign_workers_to_slots(slots: Mapping[str, int], workers: int, tiles: int) -> dict[str, int]:
    """Return the number of workers on each host, as `assign_workers` does."""
    capacities = {node: count // tiles for node, count in slots.items()}
    if workers > sum(capacities.values()):
        tiles_text, limit = f" of {tiles} tiles" if tiles > 1 else "", sum(capacities.values())
        raise LaunchError(
            f"-n {workers * tiles}: the nodes have room for {counted(limit, 'worker')}{tiles_text}, each on one node;"
            f" give at most -n {limit * tiles}, or list more cpus, gpus or slots"
        )
    worker_counts = {}
    for node, limit in capacities.items():
        if count := min(limit, workers):
            worker_counts[node] = count
        workers -= count
    return worker_counts


@contextmanager
def checked_job_nodes(arguments: argparse.Namespace, hosts: Sequence[str], tiles: int) -> Iterator[JobNodes]:
    """Yield the machines of a job: its hosts, or the nodes of its resource file, which are checked and printed.

    Parameters
    ----------
    arguments : Namespace
        With `resources`, a `source` of hosts, or a source of changing slots.
    hosts : sequence of str
        Host of each worker.
    tiles : int
        Ranks of each worker.

    Raises
    ------
    LaunchError
        Some nodes are unusable; the message names all of them.
    """
    if arguments.resources is None:
        source = arguments.slots_from or arguments.source
        listed_hosts = [LOCAL_HOST] if source is None else list(read_slots(source))
        is_distributed = (source is not None and source.is_script) or listed_hosts != [LOCAL_HOST]
        nodes = [JobNode(address=_own_address([]) if is_distributed else LOOPBACK_ADDRESS)]
        nodes += [_create_ssh_node(name) for name in listed_hosts if name != LOCAL_HOST]
        reasons = {} if arguments.slots_from is not None else find_unusable_hosts(set(hosts) - {LOCAL_HOST}, os.environ)
        if reasons:
            unreachable = [host for host, reason in reasons.items() if reason == UNREACHABLE_TEXT]
            problems = [f"{host} {reason}" for host, reason in reasons.items() if reason != UNREACHABLE_TEXT]
            problems += [f"{', '.join(unreachable)} {UNREACHABLE_TEXT}"] if unreachable else []
            remedy = unreachable_host_remedy(unreachable[0], os.environ) if unreachable else "correct the list"
            raise LaunchError(f"{arguments.source.path}: {'; '.join(problems)}; {remedy}")
        yield JobNodes(nodes if LOCAL_HOST in listed_hosts else nodes[1:], hosts, arguments.fork_server)
        return
    arguments.hosts = {node: count * tiles for node, count in Counter(hosts).items()}
    with open_job_placement(arguments, require_mpirun(os.environ), len(hosts) * tiles) as placement:
        assert isinstance(placement, JobPlacement)
        has_remote_nodes = any(report.node.ssh_config for report in placement.reports)
        own_address = _own_address(placement.supervisor_addresses()) if has_remote_nodes else LOOPBACK_ADDRESS
        nodes = [_create_resource_node(placement, report, own_address) for report in placement.reports]
        yield JobNodes(nodes, hosts, arguments.fork_server)


def _create_resource_node(placement: JobPlacement, report: NodeReport, local_address: str) -> JobNode:
    variables = placement.node_variables(report, os.environ)
    if report.node.ssh_config is None:
        return JobNode(report.node.address, local_address, variables=variables)
    remote_program = report.python, f"{report.node_info['package']}/safe_path.py", REMOTE_MODULE
    # servers write checkpoints to the folder of the run
    address = report.node_info["address"] if report.node_info["shared"] else ""

    def remote_command(words: Sequence[str]) -> list[str]:
        return ssh_command(report.node, placement.ssh_config, list(words), os.environ, _SSH_KEEP_ALIVE)

    return JobNode(report.node.address, address, remote_command, remote_program, variables)


def _create_ssh_node(name: str) -> JobNode:
    def remote_command(words: Sequence[str]) -> list[str]:
        return command_on_host(name, words, os.environ, _SSH_KEEP_ALIVE)

    return JobNode(name, "", remote_command, remote_side_command(name))


def _own_address(preferred_addresses: Sequence[str]) -> str:
    """Return the address by which other machines reach this one; the loopback address if there is no other."""
    addresses = [*preferred_addresses, *list_own_addresses()]
    candidates = (one for one in addresses if not ipaddress.ip_address(one.partition("%")[0]).is_loopback)
    return next(candidates, LOOPBACK_ADDRESS)
