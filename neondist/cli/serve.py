"""`neondist serve`: a parameter server or the master of a job in its own process, reached at its address."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from typing import Any

from ..errors import ConfigError
from ..io.files import make_folder
from ..io.output import TASKS
from ..terminal.console import say
from . import options


def add_parser(commands: Any) -> None:
    """Add the command and its services."""
    cmd = commands.add_parser(
        "serve", help="run a service of a job: a parameter server, or the master", allow_abbrev=False
    )
    services = cmd.add_subparsers(required=True, metavar="SERVICE")
    ps_parser = services.add_parser(
        "ps", help="a parameter server", allow_abbrev=False,
        description="Run a parameter server. NEONDIST_TOKEN must contain the secret of the job, the same for all"
                    " processes.",
    )  # fmt: skip
    _add_address_option(ps_parser)
    ps_parser.add_argument(
        "--checkpoint-dir", type=options.parse_as_path, metavar="DIR", help="checkpoint folder, shared by all servers"
    )
    ps_parser.set_defaults(command=serve_parameters)

    master_parser = services.add_parser(
        "master", help="the master, which dispatches the tasks of a job", allow_abbrev=False,
        description="Dispatch the tasks of a job, and restore its servers after one of them restarts. A master that is"
                    " restarted with the same folder resumes the job. NEONDIST_TOKEN must contain the secret of the"
                    " job, the same for all processes.",
    )  # fmt: skip
    _add_address_option(master_parser)
    master_parser.add_argument(
        "--servers", type=_parse_addresses, required=True, metavar="HOST:PORT,...",
        help="addresses of all parameter servers",
    )  # fmt: skip
    master_parser.add_argument(
        "--checkpoint-dir", type=options.parse_as_path, required=True, metavar="DIR",
        help="folder of the servers' checkpoints and of tasks.sqlite",
    )  # fmt: skip
    options.add_count_option(master_parser, "--num-minibatches-per-task", "N", "number of minibatches in a task", 8)
    master_parser.add_argument(
        "--checkpoint-steps", type=options.nonnegative_int, default=0, metavar="N",
        help="write a checkpoint of the servers every N updates (default 0: as often as possible within 2 %% of the run"
        " time)",
    )  # fmt: skip
    master_parser.set_defaults(command=serve_master)


def serve_parameters(arguments: argparse.Namespace) -> int:
    """Run a parameter server until the process is terminated."""
    from ..backends.allocator import keep_freed_memory
    from ..services.server import ParameterServer
    from ..services.wire import ServiceHost, read_token

    token = read_token(os.environ)
    keep_freed_memory()  # each message takes as much memory as the previous message
    with ServiceHost([ParameterServer(arguments.checkpoint_dir)], arguments.address, token) as host:
        say(f"PServer at {host.address}")
        host.wait_until_stopped()
    return 0


def serve_master(arguments: argparse.Namespace) -> int:
    """Run the master of a job until the process is terminated."""
    from ..services.group import ServerConnections
    from ..services.master import Master
    from ..services.recovery import ServerRecovery
    from ..services.wire import ServiceHost, read_token

    token, folder = read_token(os.environ), arguments.checkpoint_dir
    make_folder(folder)
    master = Master(arguments.num_minibatches_per_task, path=folder / TASKS)
    server_group = ServerConnections(arguments.servers, token, timeout=60.0, retry_seconds=1.0)
    recovery = ServerRecovery(server_group, folder, master, arguments.checkpoint_steps)
    with closing(master), server_group, ServiceHost([master, recovery], arguments.address, token) as host, recovery:
        say(f"Master at {host.address}")
        host.wait_until_stopped()
    return 0


def _add_address_option(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument(
        "--address", default="127.0.0.1:0", metavar="HOST:PORT",
        help="address to listen on; the service prints it (default: 127.0.0.1 and any free port)",
    )  # fmt: skip


def _parse_addresses(text: str) -> list[str]:
    from ..services.wire import split_address

    addresses = text.split(",")
    try:
        for address in addresses:
            split_address(address)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return addresses
