"""`neondist launch`: one job on the nodes of a resource file, for an experiment or a script."""

from __future__ import annotations

import argparse
from typing import Any

from ..cluster import ResourceSpec
from ..cluster.hosts import HostSource
from ..errors import LaunchError
from . import options, run


def add_parser(commands: Any) -> None:
    """Add the command's arguments: a resource file, then those of `run`."""
    cmd = commands.add_parser(
        "launch", help="check the machines of a resource file, and run an experiment or a script on them",
        allow_abbrev=False,
        usage="neondist launch RESOURCES.yaml [options] FILE.yaml | SCRIPT.py [arguments of the script]",
    )  # fmt: skip
    cmd.add_argument(
        "resource_file", type=options.parse_path, metavar="RESOURCES.yaml",
        help="resource specification: nodes, devices, SSH settings",
    )  # fmt: skip
    run.add_run_options(cmd, launch=True)
    cmd.set_defaults(command=launch, virtual=None, stops=True, watched=True)


def launch(arguments: argparse.Namespace) -> int:
    """Check all nodes, then run the experiment or script on them under one mpirun."""
    if arguments.words[1] != arguments.resource_file:
        raise LaunchError(f"launch: give the resource file first, as in neondist launch {arguments.resource_file} ...")
    arguments.resources = ResourceSpec(arguments.resource_file)
    if arguments.restarts is not None or arguments.spares:
        arguments.source = HostSource(arguments.resource_file)
    if arguments.ranks is None:
        num_ranks = max(1, arguments.resources.replicas - arguments.spares)
        arguments.ranks = arguments.elastic[1] if arguments.elastic else num_ranks
    return run.run(arguments)
