"""`neondist bench schemes`: what border schemes cost, in accuracy, bytes and time."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .. import options
from ..launch import launch
from ..ranks import attend, job_of, join, must_launch, validated
from ..virtual import on_virtual_ranks
from ..virtual import option as virtual_option

if TYPE_CHECKING:
    from ...comm import Transport

DEFAULT = "halo,halo_oneway,tower,tower(fill=reflect),stale,every,quantised(bits=8)"


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("schemes", help="accuracy, bytes and time of border schemes", allow_abbrev=False)
    options.experiment(one)
    virtual_option(one)
    one.add_argument("--schemes", default=DEFAULT, metavar="A,B(x=1),...", help=f"which ones (default {DEFAULT})")
    one.add_argument("--epochs", type=options.positive, metavar="E", help="epochs of each run (default: the file's)")
    one.add_argument("--seeds", type=options.positive, default=1, metavar="S", help="runs of each scheme (default 1)")
    one.add_argument("--output", metavar="DIR", help="where to write (default runs/NAME OF THE FILE-schemes)")
    one.set_defaults(command=schemes)


def schemes(arguments: argparse.Namespace) -> int:
    """Train with every scheme and seed that has no result yet; then tell all results."""
    if arguments.virtual is not None:
        return on_virtual_ranks(arguments, lambda world: _measure(arguments, world))
    job = job_of(arguments)
    if must_launch(arguments, job):
        from ...comm import SingleTransport

        _prepare(arguments, arguments.ranks, SingleTransport())
        return launch(arguments)
    return _measure(arguments, join(job))


def _measure(arguments: argparse.Namespace, world: Transport) -> int:
    def work(runs: list[argparse.Namespace]) -> int:
        from ...bench.schemes import bench_schemes

        folder = Path(arguments.output or Path("runs") / f"{Path(arguments.file).stem}-schemes")
        table = bench_schemes(world, folder, [(run, partial(validated, run, world.size, world)) for run in runs])
        if world.rank == 0:
            print("", table, sep="\n")
            print("written:", *(f"  {file}" for file in sorted(folder.glob("*"))), sep="\n")
        return 0

    return attend(world, lambda: _prepare(arguments, world.size, world), work)


def _prepare(arguments: argparse.Namespace, ranks: int, world: Transport) -> list[argparse.Namespace]:
    """Return the command of every run, once all of them are right; collective."""
    texts = listed(arguments)
    for text in texts:
        validated(named(arguments, text, 1), ranks, world)
    return [named(arguments, text, seed + 1) for seed in range(arguments.seeds) for text in texts]


def listed(arguments: argparse.Namespace) -> list[str]:
    """Return the schemes of --schemes."""
    texts = [text.strip() for text in re.split(r",(?![^()]*\))", arguments.schemes) if text.strip()]
    if not texts:
        raise ConfigError("--schemes: names none; give for instance --schemes halo,tower")
    return texts


def named(arguments: argparse.Namespace, scheme: str, seed: int) -> argparse.Namespace:
    """Return the command for one scheme and seed."""
    said = [f"model.scheme={scheme}", f"seed={seed}"]
    if getattr(arguments, "epochs", None) is not None:
        said.append(f"epochs={arguments.epochs}")
    settings = [*arguments.settings, *said]
    return argparse.Namespace(**{**vars(arguments), "settings": settings, "scheme": scheme, "seed": seed})
