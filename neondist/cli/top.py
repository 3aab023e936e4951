"""`neondist top`: live display of the workers, tasks and servers of a run."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ..io.output import SERVER_FOLDER
from ..system.memory import format_bytes
from . import options

STALE_STATUS_SECONDS = 10.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    cmd = commands.add_parser(
        "top", help="monitor the workers, tasks and servers of a run", allow_abbrev=False,
        description="Monitor the workers, tasks, servers and throughput of a run with parameter servers until it ends.",
    )  # fmt: skip
    cmd.add_argument("run", type=options.parse_path, metavar="RUN", help="the folder of the run")
    cmd.add_argument("--once", action="store_true", help="print the state once and exit")
    cmd.set_defaults(command=watch_run)


def watch_run(arguments: argparse.Namespace) -> int:
    """Show the state of the job until it has ended."""
    from rich.live import Live

    from ..services.job_status import JobStatus
    from ..terminal.rich_console import Console

    folder, console = Path(arguments.run) / SERVER_FOLDER, Console(soft_wrap=True)
    status = JobStatus.read(folder)
    if arguments.once or not console.is_terminal:
        console.print(render_status(status, time.time()))
        return 0
    with Live(render_status(status, time.time()), console=console, auto_refresh=False) as display:
        while not status.ended:
            time.sleep(0.5)
            status = JobStatus.read(folder)
            display.update(render_status(status, time.time()), refresh=True)
    return 0


def render_status(status: Any, now: float) -> Any:
    """Return a job's state as text and tables for a console."""
    from rich.console import Group
    from rich.table import Table

    tasks = ", ".join(f"{count} {state}" for state, count in status.tasks.items())
    lines = [f"tasks: {tasks}", f"throughput: {status.samples_per_second:.0f} samples/s"]
    if status.ended:
        lines.append("the job has ended")
    elif now - status.time > STALE_STATUS_SECONDS:
        lines.append(f"no new state for {now - status.time:.0f} s: the job was killed, or its machine is very busy")
    workers = Table("worker", "steps", title="workers", title_justify="left")
    for name, steps in sorted(status.workers.items()):
        workers.add_row(name, str(steps))
    servers = Table("server", "version", "samples", "parameters", "rows", "rejected", title_justify="left")
    servers.title = "servers"
    for at, ps in enumerate(status.servers):
        servers.add_row(
            str(at), str(ps.version), str(ps.samples), format_bytes(ps.bytes), str(ps.rows), str(ps.rejected)
        )
    return Group(*lines, workers, servers)
