"""The machines of an asynchronous job: where each worker and each server runs, and how it is started there."""

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
from ..cluster.hosts import SSH_TIMEOUT, UNREACHABLE, host_command, slots_of, unusable
from ..cluster.preflight import NodeReport
from ..cluster.ssh_config import ssh_command
from ..errors import LaunchError
from ..terminal.console import counted
from .fork_server import ForkServer, Process
from .launch import ready
from .monitor import LOOPBACK
from .parent_watch import end_process
from .placement import Placement, list_addresses, placed
from .remote import MODULE, RemoteProcess, program
from .scaling import LOCAL, read_slots

_GRACE = 10.0
"""Seconds that a process has to end after a signal, before it is killed."""
_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""Options of ssh: a machine that is gone is noticed within the lease of a rank."""


@dataclass(frozen=True)
class JobNode:
    """A machine of a job.

    Attributes
    ----------
    name : str
    address : str
        At which others reach services there; '' if none may run there.
    connect : callable, optional
        From the words of a command to those that run it there; None: this is this machine.
    program : sequence of str
        Words that run the module `remote` there.
    variables : mapping of str to str
        Environment variables of its processes.
    """

    name: str = LOCAL
    address: str = LOOPBACK
    connect: Callable[[Sequence[str]], list[str]] | None = None
    program: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def any_port(self) -> str:
        """The address with port 0, at which a service listens on any free port."""
        return f"[{self.address}]:0" if ":" in self.address else f"{self.address}:0"

    def answers(self) -> bool:
        """Whether it can be reached."""
        if self.connect is None:
            return True
        try:
            done = subprocess.run(self.connect(["true"]), capture_output=True, timeout=SSH_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def start(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        name: str,
        forks: ForkServer | None,
        output: int | None,
    ) -> Process:
        """Start a `neondist` command there; `output` as `subprocess.Popen` has its stdout."""
        variables = {**self.variables, **variables}
        if self.connect is not None:
            return RemoteProcess(self.connect(self.program), words, variables, output)
        env = {**os.environ, **variables}
        if forks is not None and (process := forks.start(words, env, name, output)) is not None:
            return process
        return subprocess.Popen(
            safe_path.command("neondist", *words, bound=True),
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
        Its name.
    """

    def __init__(self, node: str) -> None:
        super().__init__(f"{node} cannot be reached; continue with --resume auto on the other machines")
        self.node = node


class JobNodes:
    """The machines of a job.

    Parameters
    ----------
    nodes : sequence of JobNode
        At least one.
    workers : sequence of str
        The name of the machine of each worker at the beginning. One that is not among the nodes is a host that ssh
        reaches, with the same files at the same paths.
    forks : ForkServer, optional
        Starts processes on this machine.

    Attributes
    ----------
    workers : list of str
    """

    def __init__(self, nodes: Sequence[JobNode], workers: Sequence[str], forks: ForkServer | None = None) -> None:
        self.workers = list(workers)
        self._nodes, self._forks = {node.name: node for node in nodes}, forks

    @property
    def services(self) -> list[JobNode]:
        """Machines for servers, in turn, this one first; the master is there."""
        nodes = self._nodes.values()
        own = [node for node in nodes if node.connect is None] or [JobNode(address=_own_address([]))]
        return own[:1] + [node for node in nodes if node.connect is not None and node.address]

    @contextmanager
    def process(
        self, node: JobNode | str, words: Sequence[str], variables: Mapping[str, str], name: str, output: int | None
    ) -> Iterator[Process]:
        """Start a `neondist` command on a machine, and end it when the block ends."""
        if isinstance(node, str):
            node = self._nodes.get(node) or _host(node)
        process = node.start(words, variables, name, self._forks, output)
        try:
            yield process
        finally:
            if process.poll() is None:
                end_process(process, _GRACE, signal.SIGTERM if output == subprocess.PIPE else signal.SIGINT)
            if process.stdout is not None:
                process.stdout.close()

    def drop(self, lost: str) -> None:
        """Leave out a machine from now on; its workers are divided among the others.

        Raises
        ------
        NodeLostError
            There is no other.
        """
        del self._nodes[lost]
        if not self._nodes:
            raise NodeLostError(lost)
        kept = [name for name in self.workers if name != lost]
        while len(kept) < len(self.workers):
            kept.append(min(self._nodes, key=kept.count))
        self.workers = kept

    def replace(self, lost: str, workers: Sequence[str]) -> str:
        """Return the machine for a worker whose machine cannot be reached: the one with the fewest of `workers`.

        It is the same one if that answers again, or if there is no other.
        """
        count = Counter(workers)
        others = sorted((node for node in self._nodes.values() if node.name != lost), key=lambda one: count[one.name])
        return next((node.name for node in (self._nodes[lost], *others) if node.answers()), lost)


def find_places(arguments: argparse.Namespace, workers: int, tiles: int) -> dict[str, int]:
    """Return how many of so many workers each host or node runs, in their order; a worker is on one of them.

    Parameters
    ----------
    arguments : Namespace
        With `resources`, or a `source` of hosts; with neither all are on this machine.
    workers, tiles : int
        Workers, and ranks of each.

    Raises
    ------
    LaunchError
        There is room for fewer.
    """
    if arguments.resources is not None:
        return place_workers(slots_of(arguments.resources), workers, tiles)
    if arguments.source is not None:
        return place_workers(read_slots(arguments.source), workers, tiles)
    return {LOCAL: workers}


def place_workers(slots: Mapping[str, int], workers: int, tiles: int) -> dict[str, int]:
    """Return how many workers each host runs, as `find_places`."""
    room = {node: count // tiles for node, count in slots.items()}
    if workers > sum(room.values()):
        each, most = f" of {tiles} tiles" if tiles > 1 else "", sum(room.values())
        raise LaunchError(
            f"-n {workers * tiles}: the nodes have room for {counted(most, 'worker')}{each}, each on one node; give at"
            f" most -n {most * tiles}, or list more cpus, gpus or slots"
        )
    found = {}
    for node, most in room.items():
        if count := min(most, workers):
            found[node] = count
        workers -= count
    return found


@contextmanager
def open_nodes(arguments: argparse.Namespace, hosts: Sequence[str], tiles: int) -> Iterator[JobNodes]:
    """Yield the machines of a job: its hosts, or the nodes of its resource file, which are checked and shown.

    Parameters
    ----------
    arguments : Namespace
        With `resources`, or a `source` of hosts, or of slots that come and go.
    hosts : sequence of str
        The host of each worker.
    tiles : int
        Ranks of each worker.

    Raises
    ------
    LaunchError
        Nodes cannot take part; the message names all of them.
    """
    if arguments.resources is None:
        source = arguments.slots_from or arguments.source
        listed = [LOCAL] if source is None else list(read_slots(source))
        others = (source is not None and source.is_script) or listed != [LOCAL]
        nodes = [JobNode(address=_own_address([]) if others else LOOPBACK)]
        nodes += [_host(name) for name in listed if name != LOCAL]
        reasons = {} if arguments.slots_from is not None else unusable(set(hosts) - {LOCAL}, os.environ)
        if reasons:
            gone = [host for host, why in reasons.items() if why == UNREACHABLE]
            texts = [f"{host} {why}" for host, why in reasons.items() if why != UNREACHABLE]
            texts += [f"{', '.join(gone)} {UNREACHABLE}"] if gone else []
            trial = f", or the error shown by `ssh {gone[0]}`" if gone else ""
            raise LaunchError(f"{arguments.source.path}: {'; '.join(texts)}; correct the list{trial}")
        yield JobNodes(nodes if LOCAL in listed else nodes[1:], hosts, arguments.fork_server)
        return
    arguments.hosts = {node: count * tiles for node, count in Counter(hosts).items()}
    with placed(arguments, ready(os.environ), len(hosts) * tiles) as placement:
        assert isinstance(placement, Placement)
        own = _own_address(placement.addresses()) if any(one.node.ssh_config for one in placement.reports) else LOOPBACK
        nodes = [_node(placement, report, own) for report in placement.reports]
        yield JobNodes(nodes, hosts, arguments.fork_server)


def _node(placement: Placement, report: NodeReport, own: str) -> JobNode:
    variables = placement.variables(report, os.environ)
    if report.node.ssh_config is None:
        return JobNode(report.node.address, own, variables=variables)
    words_there = report.python, f"{report.facts['package']}/safe_path.py", MODULE
    # servers write checkpoints to the folder of the run
    address = report.facts["address"] if report.facts["shared"] else ""

    def connect(words: Sequence[str]) -> list[str]:
        return ssh_command(report.node, placement.config, list(words), os.environ, _KEEP_ALIVE)

    return JobNode(report.node.address, address, connect, words_there, variables)


def _host(name: str) -> JobNode:
    def connect(words: Sequence[str]) -> list[str]:
        return host_command(name, words, os.environ, _KEEP_ALIVE)

    return JobNode(name, "", connect, program(name))


def _own_address(preferred: Sequence[str]) -> str:
    """Return the address at which other machines reach this one; the loopback address if it has no other."""
    every = [*preferred, *list_addresses()]
    return next((one for one in every if not ipaddress.ip_address(one.partition("%")[0]).is_loopback), LOOPBACK)
