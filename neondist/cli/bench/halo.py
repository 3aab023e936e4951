"""`neondist bench halo`: halo exchanges over sizes, against plain mpi4py and memcpy."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import ConfigError
from .. import options
from ..launch import launch
from ..ranks import attend, job_of, join, must_launch
from .tell import file_option, tell


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("halo", help="halo exchanges over sizes, against plain mpi4py and memcpy")
    options.ranks(one)
    file_option(one)
    one.set_defaults(command=halo)


def halo(arguments: argparse.Namespace) -> int:
    """Measure halo exchanges."""
    job = job_of(arguments)
    if must_launch(arguments, job):
        return launch(arguments)
    world = join(job)

    def check() -> None:
        if world.size < 2:
            raise ConfigError("bench halo: one rank has no neighbours; give -n 2 or more")

    def work(_: None) -> int:
        from ...bench.halo import bench_halo
        from ...bench.tables import halo_table

        tell(world, bench_halo(world), halo_table, arguments.json)
        return 0

    return attend(world, check, work)
