"""From the words on the command line to an experiment."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import load_experiment
from .modules import import_module


def load(arguments: argparse.Namespace) -> Any:
    """Return the experiment of `file`, with `--import` and `--set` applied."""
    import neondist.session  # noqa: F401  registers the classes that a file may name

    for module in arguments.modules:
        import_module(module)
    return load_experiment(arguments.file, arguments.settings)
