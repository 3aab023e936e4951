"""`neondist serve`: a service of a job as a process of its own. Jobs start them; their workers find them by address."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..console import say
from . import options


def add(commands: Any) -> None:
    """Add the command and its services."""
    one = commands.add_parser("serve", help="run a service of a job: a parameter server", allow_abbrev=False)
    services = one.add_subparsers(required=True, metavar="SERVICE")
    ps = services.add_parser(
        "ps", help="a parameter server, until it is ended", allow_abbrev=False,
        description="Run a parameter server. NEONDIST_TOKEN has the job's secret, the same for all its processes.",
    )  # fmt: skip
    ps.add_argument(
        "--address", default="127.0.0.1:0", metavar="HOST:PORT",
        help="of this machine, to listen on; it is printed (default: 127.0.0.1 and any free port)",
    )  # fmt: skip
    ps.add_argument(
        "--checkpoint-dir", type=options.file, metavar="DIR", help="folder of checkpoints, which all servers see"
    )
    ps.set_defaults(command=serve_parameters)


def serve_parameters(arguments: argparse.Namespace) -> int:
    """Run a parameter server until the process is ended."""
    from ..services.server import ParameterServer
    from ..services.wire import ServiceHost, read_token

    token = read_token(os.environ)
    with ServiceHost([ParameterServer(arguments.checkpoint_dir)], arguments.address, token) as host:
        say(f"PServer at {host.address}")
        host.wait()
    return 0
