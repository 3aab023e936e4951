"""Nodes of cores, the links between them, and how long computing and messages take there."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from .figures import SPEED, Figures


@dataclass(frozen=True)
class Link:
    """A way between two ranks: a message of b bytes takes latency + b / bandwidth.

    Attributes
    ----------
    latency : seconds
    bandwidth : bytes per second
    """

    latency: float
    bandwidth: float

    def seconds(self, messages: float, count: float) -> float:
        """Return the time of messages of so many bytes together."""
        return messages * self.latency + count / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Nodes of equal cores, and the links inside and between them.

    Attributes
    ----------
    cores_per_node : int
        Cores (or GPUs): a rank each.
    node, network : Link
        Between ranks of one node, and of two.
    nodes : int or None
        None: as many as it takes. Ranks beyond the cores share them.
    compute_factor : float
        Seconds of computing there, over those on the machine that predicts: 0.05 for a GPU twenty times as fast.
    slowdown, memory_slowdown : float
        Seconds while all cores of a node work, over those of a core that works alone: of what the core limits, and of
        what the memory limits.
    memory_bandwidth : float
        Bytes per second that a core alone reads and writes; it tells what the memory limits.
    speed : float
        Floating point operations per second of convolutions in training, one rank.
    shared_slowdown, shared_latency : float
        Where ranks share cores: what computing takes, over its fair share of a core; and seconds until all go on,
        for each exchange or sum, with two ranks on a core.
    host : str
        Where it was measured.
    """

    cores_per_node: int
    node: Link
    network: Link
    nodes: int | None = None
    compute_factor: float = 1.0
    slowdown: float = 1.0
    memory_slowdown: float = 1.0
    memory_bandwidth: float = 1e10
    speed: float = SPEED
    shared_slowdown: float = 1.0
    shared_latency: float = 0.0
    host: str = ""

    def compute(self, alone: float, ranks: int, moved: float = 0.0) -> float:
        """Return the seconds of computing that took `alone` on one core here, and moved so many bytes."""
        by_memory = min(1.0, moved / self.memory_bandwidth / alone) if alone else 0.0
        most = (1 - by_memory) * self.slowdown + by_memory * self.memory_slowdown
        # between one busy core and all of them, what they share is taken a part at a time
        busy = min(ranks, self.cores_per_node) - 1
        slowdown = 1 + (most - 1) * busy / max(1, self.cores_per_node - 1)
        sharing = self.sharing(ranks)
        return alone * self.compute_factor * slowdown * sharing * (self.shared_slowdown if sharing > 1 else 1.0)

    def sharing(self, ranks: int) -> float:
        """Return how many ranks share a core."""
        return max(1.0, ranks / (self.cores_per_node * self.nodes)) if self.nodes else 1.0

    def waiting(self, ranks: int, meetings: int) -> float:
        """Return the seconds until all go on, at so many exchanges or sums, where ranks share cores."""
        return meetings * self.shared_latency * (self.sharing(ranks) - 1)

    def link(self, ranks: int) -> Link:
        """Return the slowest link that so many ranks use."""
        return self.node if ranks <= self.cores_per_node or self.nodes == 1 else self.network

    def allreduce(self, ranks: int, count: float) -> float:
        """Return the seconds to sum so many bytes over ranks: a reduce-scatter and an allgather."""
        if ranks == 1:
            return 0.0
        return self.link(ranks).seconds(self.steps(ranks), 2 * count * (ranks - 1) / ranks)

    def steps(self, ranks: int) -> int:
        """Return the messages, one after the other, of a sum over ranks."""
        return 2 * ceil(log2(ranks))

    def figures(self, ranks: int) -> Figures:
        """Return what a planner needs for so many ranks."""
        link = self.link(ranks)
        return Figures(link.latency, link.bandwidth, self.speed / self.compute_factor)
