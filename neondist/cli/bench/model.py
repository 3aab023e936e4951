"""`neondist bench model calibrate | predict`: how long a step would take elsewhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, LaunchError
from .. import options, threads
from ..experiment import load, validated
from ..ranks import job_of, on_ranks
from .scaling import step_of

if TYPE_CHECKING:
    from ...comm import Transport


def add(benches: Any) -> None:
    """Say what can be typed."""
    two = benches.add_parser("model", help="predict steps on other machines and rank counts")
    parts = two.add_subparsers(required=True, metavar="WHAT")

    one = parts.add_parser("calibrate", help="measure this machine, with a rank on each core", allow_abbrev=False)
    options.ranks(one)
    one.add_argument("--output", default="machine.yaml", metavar="FILE", help="where to write (default machine.yaml)")
    one.set_defaults(command=calibrate)

    one = parts.add_parser("predict", help="predict training steps", allow_abbrev=False)
    options.experiment(one, "use --ranks")
    one.add_argument("--machine", default="machine.yaml", metavar="FILE", help="the machine (default machine.yaml)")
    one.add_argument("--ranks", dest="counts", type=span, default=[1, 2, 4], metavar="1..4096", help="or 1,2,4")
    one.add_argument(
        "--measure", type=options.counts, default=[], metavar="1,2", help="measure these too, and tell the error"
    )
    one.add_argument("--json", metavar="FILE", help="write JSON lines there as well")
    one.set_defaults(command=predict)


def span(text: str) -> list[int]:
    """Read '1,2,4', or '1..4096': the powers of two times the first."""
    first, dots, last = text.partition("..")
    if not dots:
        return options.counts(text)
    low, high = options.positive(first), options.positive(last)
    return [low << power for power in range((high // low).bit_length())]


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    if job_of(arguments) is None and arguments.ranks is None:
        arguments.ranks = max(2, threads.cores())

    def check(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench model calibrate: messages need two ranks; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.model.calibrate import calibrate as measure
        from ...bench.model.machine import write

        machine = measure(world, world.size)
        if world.rank == 0:
            write(Path(arguments.output), machine, f"measured by neondist bench model calibrate on {world.size} ranks")
            print(Path(arguments.output).read_text(encoding="utf-8"), end="")
        return 0

    return on_ranks(arguments, check, work)


def predict(arguments: argparse.Namespace) -> int:
    """Predict steps; with --measure, tell how wrong the predictions are."""
    from threadpoolctl import threadpool_limits

    from ...bench.model import machine as machines
    from ...bench.model import predict as model
    from ...bench.model.table import prediction_table
    from ...comm import SingleTransport

    if job_of(arguments) is not None or arguments.ranks is not None:
        raise LaunchError("bench model predict runs in one process; start it outside of a job, with --ranks, not -n")
    machine = machines.read(Path(arguments.machine))
    asked = sorted({*arguments.counts, *arguments.measure})
    batch = validated(arguments, SingleTransport(), 1).batch_size
    with threadpool_limits(1):  # a rank for each core
        rows = model.predict(lambda: load(arguments), asked, machine)
    measured = {count: step_of(arguments, count, batch, steps=5)["fastest_seconds"] for count in arguments.measure}
    for row in rows:
        row["measured_seconds"] = measured.get(row["ranks"])
    print(prediction_table(rows))
    print(f"\nno faster with more than {model.turning_point(rows)} ranks")
    if measured:
        print(f"mean error of the prediction: {model.error(rows, measured):.1%}")
    if arguments.json:
        Path(arguments.json).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0
