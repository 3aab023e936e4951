"""`neondist bench halo`: halo exchanges over sizes, against plain mpi4py and memcpy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...launcher.ranks import on_ranks
from .. import options
from .tell import file_option, tell

if TYPE_CHECKING:
    from ...comm import Transport


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("halo", help="halo exchanges over sizes, against plain mpi4py and memcpy")
    options.ranks(one)
    file_option(one)
    one.set_defaults(command=halo)


def halo(arguments: argparse.Namespace) -> int:
    """Measure halo exchanges."""

    def check(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench halo: one rank has no neighbours; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.halo import bench_halo
        from ...bench.tables import halo_table

        tell(world, bench_halo(world), halo_table, arguments.json)
        return 0

    return on_ranks(arguments, check, work)
