"""`neondist check`: is the file right, and what would every layer do?"""

from __future__ import annotations

import argparse
import os

from .experiment import load
from .job import detect


def check(arguments: argparse.Namespace) -> int:
    """Validate the experiment for `ranks` ranks and print its plan; starts no MPI."""
    job = detect(os.environ)
    ranks = arguments.ranks or (job.size if job and job.size else 1)
    experiment = load(arguments)
    experiment.validate(ranks)
    if job is None or job.first:
        from rich.console import Console

        from ..session import describe

        Console(soft_wrap=True).print(describe(experiment, ranks))
    return 0
