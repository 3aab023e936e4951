"""From the words on the command line to an experiment."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from ..config import load_experiment, place
from ..errors import UserError
from .crowd import refuse_idle
from .modules import import_module

if TYPE_CHECKING:
    from ..comm import Transport


def load(arguments: argparse.Namespace) -> Any:
    """Return the experiment of `file`, with `--import` and `--set` applied."""
    import neondist.session  # noqa: F401  registers the classes that a file may name

    for module in arguments.modules:
        import_module(module)
    return load_experiment(arguments.file, arguments.settings)


def validated(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    """Return the experiment once it is right on every rank: file, data and grid; collective."""

    def check(experiment: Any) -> None:
        experiment.validate(ranks)
        if not arguments.force:
            refuse_idle(ranks, experiment.grid.get("replicas", 1), prod(experiment.dataset.sample_shape[:-1]))

    return loaded(arguments, world, check)


def loaded(arguments: argparse.Namespace, world: Transport, check: Callable[[Any], None] | None = None) -> Any:
    """Return the experiment of the file, once it passes `check` on every rank; collective."""
    from ..comm import agree

    experiment: Any = None
    error: Exception | None = None
    try:
        experiment = load(arguments)
        if check is not None:
            check(experiment)
    except UserError as problem:
        error = place(problem)  # now, because the message travels to the other ranks and its subject does not
    except Exception as problem:
        error = problem
    agree(world, error)
    return experiment
