"""`neondist bench step`: training steps by layer, and against PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import threads
from ...errors import ConfigError
from ...job import detect
from ...launcher.ranks import on_ranks
from .. import options
from ..experiment import validated
from .tell import file_option, tell

if TYPE_CHECKING:
    from ...comm import Transport


def add(benches: Any) -> None:
    """Say what can be typed."""
    one = benches.add_parser("step", help="training steps, by layer", allow_abbrev=False)
    options.experiment(one)
    one.add_argument("--against", choices=["torch"], help="train the same network there too, in turn")
    one.add_argument("--steps", type=options.positive, default=10, metavar="K", help="steps to time (default 10)")
    one.add_argument("--roofline", action="store_true", help="tell what limits each layer: matrix products or memory")
    file_option(one)
    one.set_defaults(command=step)


def step(arguments: argparse.Namespace) -> int:
    """Measure the training steps of an experiment; 1 if PyTorch's gradients are others."""

    def work(world: Transport, experiment: Any) -> int:
        from ...bench.step import bench_step
        from ...bench.tables import step_table

        # PyTorch gets what all ranks of this machine have together, which a launcher may have taken from each of them
        together = threads.cores(os.getppid()) if detect(os.environ) is not None else threads.cores()
        how = (arguments.steps, arguments.against, together, arguments.roofline)
        made = bench_step(experiment, experiment.open_grid(world), *how)
        tell(world, made, step_table, arguments.json)
        return int(not made.get("against", {}).get("agree", True))

    return on_ranks(arguments, partial(_prepare, arguments), work)


def _prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    if arguments.against == "torch" and importlib.util.find_spec("torch") is None:
        raise ConfigError("--against torch: PyTorch is not installed; pip install 'neondist[torch]'")
    return validated(arguments, world, ranks)
