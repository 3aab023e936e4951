"""`neondist bench schemes`: what border schemes cost, in accuracy, bytes and time."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from ...comm import SingleTransport
from ...errors import ConfigError
from ...launcher.ranks import on_ranks
from .. import options
from ..experiment import validated

if TYPE_CHECKING:
    from ...comm import Transport

DEFAULT = "halo,halo_oneway,tower,tower(fill=reflect),stale,every,quantised(bits=8)"


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("schemes", help="accuracy, bytes and time of border schemes", allow_abbrev=False)
    options.experiment(one)
    options.virtual(one, many=True)
    one.add_argument("--schemes", default=DEFAULT, metavar="A,B(x=1),...", help=f"which ones (default {DEFAULT})")
    one.add_argument("--epochs", type=options.positive, metavar="E", help="epochs of each run (default: the file's)")
    one.add_argument("--seeds", type=options.positive, default=1, metavar="S", help="runs of each scheme (default 1)")
    one.add_argument("--output", metavar="DIR", help="where to write (default runs/NAME OF THE FILE-schemes)")
    one.set_defaults(command=schemes)


def schemes(arguments: argparse.Namespace) -> int:
    """Train with every scheme and seed that has no result yet; then tell all results."""
    counts = arguments.virtual or [None]
    for count in counts[1:]:  # whatever is wrong with a later one is found before the first trains
        _prepare(arguments, SingleTransport(), count)
    rows: list[dict[str, Any]] = []
    for count in counts:
        ranks = argparse.Namespace(**{**vars(arguments), "virtual": count})
        code = on_ranks(ranks, partial(_prepare, ranks), partial(_measure, arguments, rows, last=count == counts[-1]))
        if code:
            return code
    return 0


def _measure(
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
    world: Transport,
    runs: list[argparse.Namespace],
    last: bool,
) -> int:
    from ...bench.schemes import bench_schemes, report

    folder = options.folder(arguments, "schemes")
    measured = bench_schemes(world, folder, [(run, partial(validated, run, world, world.size)) for run in runs])
    if world.rank == 0:
        rows += measured
        table = report(rows, folder)
        if last:
            print("", table, sep="\n")
            print("written:", *(f"  {file}" for file in sorted(folder.glob("*"))), sep="\n")
    return 0


def _prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> list[argparse.Namespace]:
    """Return the command of every run, once all of them are right; collective."""
    texts = listed(arguments)
    for text in texts:
        validated(named(arguments, text, 1), world, ranks)
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
