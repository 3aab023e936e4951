"""Fraction of the allreduce time hidden by bucketing, on a link of a given bandwidth.

One process trains one of two replicas; its transport simulates the delay of the link without using a core. Runs with
one allreduce at the end of a step (`sync: allreduce`) and in buckets (`sync: bucketed`) alternate with runs without
delay.

    python tools/hidden_sums.py --ratio 0.3 0.6 1.0
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

import neondist as nd
from neondist.bench.model.dry_run import DryRunMessageLog, DryRunTransport
from neondist.comm import ReduceOp, Request, Transport
from neondist.layers import ConvLayerDist, FCLayerDist, GlobalAvgPoolingLayerDist, MaxPoolingLayerDist, ReLU

NETWORKS: dict[str, tuple[tuple[int, ...], int, Callable[[], list]]] = {
    "even": ((32, 32, 128), 4, lambda: [*(_conv(128) for _ in range(8)), GlobalAvgPoolingLayerDist(), FCLayerDist(10)]),
    "pyramid": (
        (64, 64, 3),
        4,
        lambda: [
            *(layer for width in (64, 128, 256) for layer in (_conv(width), _conv(width), MaxPoolingLayerDist(2))),
            *(_conv(512), GlobalAvgPoolingLayerDist(), FCLayerDist(10)),
        ],
    ),
    "classifier": (
        (32, 32, 3),
        16,
        lambda: [
            _conv(64),
            MaxPoolingLayerDist(2),
            _conv(128),
            MaxPoolingLayerDist(2),
            FCLayerDist(512),
            FCLayerDist(10),
        ],
    ),
}
"""shape of a sample, batch of a replica, layers"""


def _conv(channels: int) -> ConvLayerDist:
    return ConvLayerDist(channels, 3, padding=1, activation=ReLU())


@dataclass
class Link:
    """Simulated link with sequential messages.

    Attributes
    ----------
    bandwidth : bytes per second; 0: no delay
    busy_until : arrival of the last message, in seconds of `time.perf_counter`
    busy_seconds : total seconds of all messages
    """

    bandwidth: float = 0.0
    busy_until: float = 0.0
    busy_seconds: float = 0.0

    def send(self, nbytes: int) -> float:
        """Send a message; return its time of arrival."""
        duration = nbytes / self.bandwidth if self.bandwidth else 0.0
        self.busy_seconds += duration
        self.busy_until = max(self.busy_until, time.perf_counter()) + duration
        return self.busy_until


class SlowTransport(DryRunTransport):
    """Transport of a single rank, whose reductions take as long as on the simulated link."""

    def __init__(self, rank: int, size: int, link: Link) -> None:
        super().__init__(rank, size, DryRunMessageLog())
        self.link = link

    def split_by(self, color: Callable[[int], int]) -> Transport:
        """Return the transport of the ranks with the same colour."""
        group = [rank for rank in range(self.size) if color(rank) == color(self.rank)]
        return SlowTransport(group.index(self.rank), len(group), self.link)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Wait for the duration of the allreduce; the array is unchanged."""
        self.iallreduce(array).wait()

    def iallreduce(self, array: np.ndarray) -> Request:
        """Start a simulated allreduce, without delay for one rank."""
        return _Arrival(self.link.send(array.nbytes) if self.size > 1 else 0.0)


class _Arrival(Request):
    def __init__(self, arrival: float) -> None:
        self.arrival = arrival

    def wait(self) -> None:
        time.sleep(max(0.0, self.arrival - time.perf_counter()))


class SyncModel:
    """Model with a synchroniser, and its simulated link."""

    def __init__(self, name: str, sync: str) -> None:
        shape, batch, layers = NETWORKS[name]
        self.link = Link()
        model = nd.ConvnetDist(layers(), cost=nd.CrossEntropy(), optimizer=nd.SGD(learning_rate=0.0), sync=sync)
        grid = nd.ProcessGrid(SlowTransport(0, 2, self.link), replicas=2)
        grid.tile_comm, grid.replica_comm = SlowTransport(0, 1, self.link), SlowTransport(0, 2, self.link)
        model.build(shape, 2 * batch, grid)
        x = np.random.default_rng(0).normal(size=(batch, *shape)).astype(np.float32)
        self.step = lambda: model.train_batch(x, np.arange(batch) % 10, batch_size=2 * batch)
        self.nbytes = sum(array.nbytes for array in model.gradients().values())
        self.step()

    def time_step(self, bandwidth: float) -> float:
        """Return the seconds of a step on a link of the given bandwidth."""
        self.link.bandwidth = bandwidth
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def measure(name: str, ratio: float, rounds: int) -> str:
    """Return a row of the table; one allreduce of all gradients takes `ratio` times the compute time of a step."""
    plain, buckets = SyncModel(name, "allreduce"), SyncModel(name, "bucketed")
    computing = median(plain.time_step(0.0) for _ in range(5))
    bandwidth = plain.nbytes / (ratio * computing)
    overlapped, step_ratios = [], []
    for _ in range(rounds):
        unbucketed = plain.time_step(bandwidth)
        without_delay, in_buckets = buckets.time_step(0.0), buckets.time_step(bandwidth)
        overlapped.append(1 - (in_buckets - without_delay) / (plain.nbytes / bandwidth))
        step_ratios.append(in_buckets / unbucketed)
    milliseconds = f"{1e3 * computing:.0f} ms | {1e3 * ratio * computing:.0f} ms"
    return (
        f"| {name} | {plain.nbytes / 1e6:.1f} MB | {milliseconds} | {median(overlapped):.0%} ({min(overlapped):.0%} to"
        f" {max(overlapped):.0%}) | {median(step_ratios):.2f} |"
    )


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ratio", type=float, nargs="+", default=[0.3, 0.6, 1.0], help="ratio of allreduce to compute time"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    arguments = parser.parse_args()
    print("| network | gradients | compute time | allreduce time | hidden, median (range) | step ÷ unbucketed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.networks:
        for ratio in arguments.ratio:
            print(measure(name, ratio, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
