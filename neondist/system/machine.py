"""Machine description for planning (cores, latency, bandwidth, speed), stored as YAML, and times derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import get_type_hints

import yaml

from ..errors import ConfigError
from ..io.files import write_text
from ..registry.ranges import Count, NotNegative, Positive
from ..yaml_nodes import Node, parse_file
from ..yaml_nodes.convert import convert_fields

DEFAULT_FLOPS_PER_SECOND = 2e10
"""Default floating point operations per second of a rank."""
DEFAULT_SAMPLES_PER_REPLICA = 32
"""Default batch size of a replica."""
_EXAMPLES_HINT = "see the two examples in docs/predicting.md"


@dataclass(frozen=True)
class MachineProfile:
    """Profile of a machine for a planner of segments of layers.

    Attributes
    ----------
    latency, bandwidth, flops_per_second : float
        Seconds per message, bytes per second, and floating point operations per second of one rank.
    samples_per_replica, itemsize : int
        Batch size of a replica, and bytes per number.
    seconds_per_cell : mapping of str to float, by layer name
        Measured seconds of a training step per output cell and sample; `flops_per_second` applies to the other layers.
    """

    latency: float = 2e-5
    bandwidth: float = 5e9
    flops_per_second: float = DEFAULT_FLOPS_PER_SECOND
    samples_per_replica: int = DEFAULT_SAMPLES_PER_REPLICA
    itemsize: int = 4
    seconds_per_cell: Mapping[str, float] = field(default_factory=dict)

    def message_seconds(self, messages: float, elements: float) -> float:
        """Return the seconds of messages with `elements` numbers per sample in total."""
        return messages * self.latency + elements * self.samples_per_replica * self.itemsize / self.bandwidth


@dataclass(frozen=True)
class Link:
    """Link between two ranks: a message of b bytes takes latency + b / bandwidth.

    Attributes
    ----------
    latency, bandwidth : float
        Seconds, and bytes per second.
    """

    latency: Positive
    bandwidth: Positive

    def message_seconds(self, messages: float, count: float) -> float:
        """Return the seconds of messages with `count` bytes in total."""
        return messages * self.latency + count / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Nodes with equal cores, and the links within and between nodes.

    Attributes
    ----------
    cores_per_node : int
        Cores (or GPUs) per node; each runs one rank.
    node, network : Link
        Links within a node, and between nodes.
    nodes : int or None
        Number of nodes; None: unlimited. If there are more ranks than cores, ranks share cores.
    compute_factor : float
        Compute time relative to the predicting machine: 0.05 for a GPU twenty times as fast.
    slowdown, memory_slowdown : float
        Compute time with all cores of a node busy, relative to a single busy core, for compute-bound and for
        memory-bound work.
    memory_bandwidth : float
        Bytes per second that a single core reads and writes; classifies work as memory-bound.
    speed : float
        Floating point operations per second of one rank, for convolutions in training.
    shared_slowdown, shared_latency : float
        For ranks that share cores: compute time relative to that expected from a fair share of a core; and seconds of
        waiting per exchange or reduction, with two ranks on a core.
    jitter : float
        Mean random delay of a node per step, relative to its compute time. All nodes wait for the slowest one: if
        delays are exponentially distributed, it is (1/2 + ... + 1/n) mean delays later than a single node.
    host : str
        Name of the measured host.
    error : float
        Mean relative error of the predicted step times of small networks at calibration; 0: unknown.
    """

    cores_per_node: Count
    node: Link
    network: Link
    nodes: Count | None = None
    compute_factor: Positive = 1.0
    slowdown: Positive = 1.0
    memory_slowdown: Positive = 1.0
    memory_bandwidth: Positive = 1e10
    speed: Positive = DEFAULT_FLOPS_PER_SECOND
    shared_slowdown: Positive = 1.0
    shared_latency: NotNegative = 0.0
    jitter: NotNegative = 0.0
    host: str = ""
    error: NotNegative = 0.0

    @classmethod
    def default(cls) -> Machine:
        """Return a machine with typical values: 8 cores per node, 25 Gbit/s network."""
        return cls(8, Link(2e-6, 5e9), Link(2e-5, 3e9))

    def on_nodes(self, ranks_by_node: Sequence[int], network_gbits: float | None) -> Machine:
        """Return the machine with other nodes and, unless it is None, another network bandwidth in Gbit/s."""
        network = self.network if network_gbits is None else replace(self.network, bandwidth=network_gbits * 1e9 / 8)
        return replace(self, cores_per_node=max(ranks_by_node), nodes=len(ranks_by_node), network=network)

    def compute_seconds(self, uncontended_seconds: float, ranks: int, memory_traffic: float = 0.0) -> float:
        """Return the seconds of work that takes `uncontended_seconds` on one core of the predicting machine.

        `memory_traffic` is the number of bytes that the work reads and writes.
        """
        memory_seconds = memory_traffic / self.memory_bandwidth
        memory_fraction = min(1.0, memory_seconds / uncontended_seconds) if uncontended_seconds else 0.0
        max_slowdown = (1 - memory_fraction) * self.slowdown + memory_fraction * self.memory_slowdown
        # interpolated linearly between one busy core and all cores busy
        other_busy_cores = min(ranks, self.cores_per_node) - 1
        slowdown = 1 + (max_slowdown - 1) * other_busy_cores / max(1, self.cores_per_node - 1)
        ranks_per_core = self.ranks_per_core(ranks)
        contention = slowdown * ranks_per_core * (self.shared_slowdown if ranks_per_core > 1 else 1.0)
        return uncontended_seconds * self.compute_factor * contention

    def ranks_per_core(self, ranks: int) -> float:
        """Return the number of ranks per core."""
        return max(1.0, ranks / (self.cores_per_node * self.nodes)) if self.nodes else 1.0

    def waiting_seconds(self, ranks: int, synchronisation_count: int) -> float:
        """Return the seconds that ranks sharing cores wait in a number of exchanges and reductions."""
        return synchronisation_count * self.shared_latency * (self.ranks_per_core(ranks) - 1)

    def expected_delay_seconds(self, ranks: int, compute_seconds: float) -> float:
        """Return the expected delay in seconds of the slowest node, for work of `compute_seconds`."""
        return self.jitter * compute_seconds * self.slowest_node_relative_delay(ranks)

    def slowest_node_relative_delay(self, ranks: int) -> float:
        """Return the additional delay of the slowest node, as a multiple of the mean delay of a node."""
        return sum(1 / at for at in range(2, self.count_nodes(ranks) + 1))

    def count_nodes(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks occupy."""
        return min(ceil(ranks / self.cores_per_node), self.nodes or ranks)

    def slowest_link(self, ranks: int) -> Link:
        """Return the slowest link among `ranks` ranks."""
        return self.node if self.count_nodes(ranks) == 1 else self.network

    def allreduce_seconds(self, ranks: int, count: float) -> float:
        """Return the seconds of an allreduce of `count` bytes: within each node, then between the nodes.

        Each stage is a reduce-scatter and an allgather: each of n members sends and receives 2 (n - 1) / n times the
        bytes, in 2 log2(n) messages.
        """
        nodes = self.count_nodes(ranks)
        ranks_per_node = ceil(ranks / nodes)
        return sum(
            link.message_seconds(2 * ceil(log2(members)), 2 * count * (members - 1) / members)
            for link, members in ((self.node, ranks_per_node), (self.network, nodes))
            if members > 1
        )

    def planner_profile(self, ranks: int) -> MachineProfile:
        """Return a planner's profile for `ranks` ranks."""
        link = self.slowest_link(ranks)
        return MachineProfile(link.latency, link.bandwidth, self.speed / self.compute_factor)


def read_machine(path: Path) -> Machine:
    """Read a machine from a YAML file; raise ConfigError if it is invalid."""
    machine, link = (get_type_hints(cls, include_extras=True) for cls in (Machine, Link))
    required_fields = "cores_per_node", "node", "network"
    try:
        root = parse_file(path) or Node(None, f"{path}:1")
        values = convert_fields(root, "", machine | {"node": Node, "network": Node}, required_fields)
        links = {name: Link(**convert_fields(values[name], name, link, link)) for name in ("node", "network")}
    except ConfigError as error:
        raise ConfigError(f"{error}; {_EXAMPLES_HINT}") from None
    return Machine(**values | links)


def write_machine(path: Path, machine: Machine, comment: str) -> None:
    """Write a machine as YAML."""
    text = yaml.safe_dump(asdict(machine), sort_keys=False)
    write_text(path, f"# {comment}\n# seconds, bytes per second\n{text}")
