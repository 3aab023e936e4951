"""`neondist bench seams`: how far from the seams a scheme changes outputs and gradients."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...launcher.ranks import on_ranks
from .. import options
from ..experiment import validated
from .schemes import listed, named

if TYPE_CHECKING:
    from ...comm import Transport

DEFAULT = "tower,tower(fill=reflect),halo_oneway,quantised(bits=8)"


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("seams", help="errors of schemes by the distance to the seam", allow_abbrev=False)
    options.experiment(one)
    options.virtual(one)
    one.add_argument("--schemes", default=DEFAULT, metavar="A,B(x=1),...", help=f"which ones (default {DEFAULT})")
    one.add_argument("--output", metavar="DIR", help="where to write (default runs/NAME OF THE FILE-seams)")
    one.set_defaults(command=seams)


def seams(arguments: argparse.Namespace) -> int:
    """Compare every scheme with the exact exchange on one batch, with first weights."""

    def work(world: Transport, runs: dict[str, argparse.Namespace]) -> int:
        from ...bench.seams import seam_error, table, write

        folder = options.folder(arguments, "seams")
        found = {}
        for text, run in runs.items():
            pair = [validated(each, world, world.size) for each in (named(arguments, "halo", 1), run)]
            dataset, grid = pair[0].dataset, pair[0].open_grid(world)
            dataset.open(pair[0].model.reading_grid(dataset.sample_shape, grid))
            for experiment in pair:
                experiment.model.build(dataset.sample_shape, experiment.batch_size, grid)
            batches = [np.arange(pair[0].batch_size) % len(dataset.train) + shift for shift in (1, 0)]
            lo, hi = grid.sample_range(pair[0].batch_size)
            images = [dataset.train.images(b[lo:hi] % len(dataset.train), pair[0].model.dtype) for b in batches]
            found[text] = seam_error(pair[0].model, pair[1].model, images)
        if world.rank == 0:
            files = write(folder, found)
            print(table(found))
            print("written:", *(f"  {file}" for file in files), sep="\n")
        return 0

    return on_ranks(arguments, partial(_prepare, arguments), work)


def _prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> dict[str, argparse.Namespace]:
    runs = {text: named(arguments, text, 1) for text in listed(arguments)}
    for text, run in runs.items():
        if validated(run, world, ranks).model.scheme.run > 1:
            raise ConfigError(
                f"--schemes {text}: its tiles overlap and its numbers are exact; name approximate schemes"
            )
    return runs
