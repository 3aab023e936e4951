"""`neondist launch`: one job over the nodes of a resource file, for an experiment or a script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from ..cluster import ResourceSpec
from ..cluster.hosts import HostSource
from ..errors import LaunchError
from ..launcher.ranks import start_script
from . import options, run


def add(commands: Any) -> None:
    """Add the command's arguments: a resource file, then those of `run`."""
    one = commands.add_parser(
        "launch", help="check several machines, then run a file or a script over them", allow_abbrev=False,
        usage="neondist launch RESOURCES.yaml [options] FILE.yaml | SCRIPT.py [words of the script]",
    )  # fmt: skip
    one.add_argument("resource_file", type=options.path, metavar="RESOURCES.yaml", help="nodes, devices, SSH settings")
    run.add_options(one)
    one.set_defaults(command=launch, stops=True, watched=True)


def launch(arguments: argparse.Namespace) -> int:
    """Check all nodes, then run the same command on them under one mpirun."""
    if arguments.words[1] != arguments.resource_file:
        raise LaunchError(f"launch: the resource file comes first, as in neondist launch {arguments.resource_file} ...")
    if arguments.virtual is not None:
        raise LaunchError("--virtual runs all ranks in this process; use neondist run, or leave it out")
    arguments.resources = ResourceSpec(arguments.resource_file)
    if arguments.hosts_from is not None:
        raise LaunchError("--hosts-from: launch has the hosts of its resource file; leave it out, or use neondist run")
    if arguments.restarts is not None or arguments.spares:
        arguments.source = HostSource(arguments.resource_file)
    if arguments.ranks is None:
        fixed = max(1, arguments.resources.replicas - arguments.spares)
        arguments.ranks = arguments.elastic[1] if arguments.elastic else fixed
    if not arguments.script:
        return run.run(arguments)
    if arguments.snapshot is not None:
        raise LaunchError(
            "--snapshot: is for experiments; a script writes checkpoints of its own, as nd.DistributedSession does"
        )
    if not os.path.isfile(arguments.file):
        raise LaunchError(f"{arguments.file}: no such script")
    return start_script(arguments)


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of `launch` up to a script, and the script with its own words; [] where there is none."""
    if words[:1] == ["launch"]:
        for at in range(2, len(words)):
            if words[at].endswith(".py") and words[at - 1] != "--import" and not words[at].startswith("-"):
                return list(words[: at + 1]), list(words[at:])
    return list(words), []
