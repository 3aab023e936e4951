"""`neondist bench`: measurements. One file for each, with `add(benches)`, which says what can be typed."""

from __future__ import annotations

from typing import Any

from . import halo, model, scaling, schemes, seams, step

BENCHES = (step, halo, scaling, schemes, seams, model)


def add(commands: Any) -> None:
    """Add the command and everything below it."""
    group = commands.add_parser("bench", help="measure steps, halo exchanges, scaling and schemes; predict steps")
    benches = group.add_subparsers(required=True, metavar="WHAT")
    for bench in BENCHES:
        bench.add(benches)
