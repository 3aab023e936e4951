"""`neondist bench scaling`: the same step on more and more ranks, each in an MPI job of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import safe_path
from ...errors import LaunchError
from ...launcher.ranks import job_of
from ...threads import VARIABLES
from .. import options
from ..experiment import validated


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("scaling", help="the same step on more and more ranks", allow_abbrev=False)
    options.experiment(one)
    one.add_argument(
        "--ranks", dest="counts", type=options.counts, default=[1, 2, 4], metavar="1,2,4", help="rank counts"
    )
    one.add_argument("--weak", action="store_true", help="the batch grows with the ranks")
    one.add_argument("--steps", type=options.positive, default=10, metavar="K", help="steps of each turn (default 10)")
    one.add_argument("--rounds", type=options.positive, default=3, metavar="R", help="turns of each (default 3)")
    one.add_argument("--output", metavar="DIR", help="where to write (default runs/NAME OF THE FILE-scaling)")
    one.set_defaults(command=scaling)


def scaling(arguments: argparse.Namespace) -> int:
    """Measure each rank count in turn, several times, and write tables and a picture."""
    from ...bench.scaling import bench_scaling, scaling_table, write
    from ...comm import SingleTransport
    from ...session.output import prepare

    if job_of(arguments) is not None or arguments.ranks is not None:
        raise LaunchError("bench scaling starts MPI jobs itself; start it outside of one, with --ranks instead of -n")
    for count in arguments.counts:
        batch = validated(arguments, SingleTransport(), count).batch_size
    folder = options.folder(arguments, "scaling")
    prepare(SingleTransport(), folder)

    def measure(count: int) -> dict[str, Any]:
        grown = batch * count // arguments.counts[0] if arguments.weak else batch
        return step_of(arguments, count, [f"batch_size={grown}"], arguments.steps)

    rows = bench_scaling(measure, arguments.counts, arguments.rounds)
    kind = "weak" if arguments.weak else "strong"
    print(scaling_table(rows))
    print("written:")
    for file in write(folder, rows, f"{Path(arguments.file).name}, {kind} scaling"):
        print(f"  {file}")
    return 0


def step_of(
    arguments: argparse.Namespace, count: int, settings: Sequence[str], steps: int, threads: int | None = None
) -> dict[str, Any]:
    """Return what `neondist bench step` measures in a job of its own, on so many threads a rank, with more settings."""
    words = ["-n", str(count), "--steps", str(steps), "--set", *arguments.settings, *settings]
    env = dict(os.environ) | ({} if threads is None else dict.fromkeys(VARIABLES, str(threads)))
    words += [word for module in arguments.modules for word in ("--import", module)]
    with tempfile.TemporaryDirectory(prefix="neondist-bench-") as folder:
        file = Path(folder, "made.json")
        command = safe_path.command("neondist", "bench", "step", arguments.file, *words, "--json", file)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=env)
        if done.returncode:
            raise LaunchError(f"{count} ranks ended with exit code {done.returncode}; what they said is above")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
