"""Section of report.html on the workers, tasks and servers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.output import SERVER_FOLDER
from ..services.job_status import STATUS_FILE, TASK_STATES, JobStatus
from ..system.memory import format_bytes
from .callbacks.master_statistics import JOB_KEY
from .page import escape_text, format_value, is_finite, table_tag
from .state import Record
from .svg_plot import line_plot_svg

_MAX_ROWS = 1000
"""Limit of workers and servers in the tables."""


def job_section_html(folder: Path, records: Sequence[Record]) -> list[str]:
    """Return the workers, tasks, versions of servers and throughput of each epoch, and the last state of the job.

    Empty if the run has no servers.
    """
    parts, statistics_by_epoch = [], [(r["epoch"], r[JOB_KEY]) for r in records if isinstance(r.get(JOB_KEY), dict)]
    if statistics_by_epoch:
        rows = [[format_value(epoch), *_job_row(statistics)] for epoch, statistics in statistics_by_epoch]
        parts = ["<h2>Workers and servers</h2>"]
        for name, title in (("workers", "workers"), ("samples_per_second", "samples/s of all workers")):
            points = [(at, record[name]) for at, record in statistics_by_epoch if is_finite(record.get(name))]
            parts += (
                [line_plot_svg(title, {title: points}, x_label="epoch")]
                if len({value for _, value in points}) > 1
                else []
            )
        tasks = [f"tasks {state}" for state in TASK_STATES]
        parts.append(table_tag(["epoch", "workers", *tasks, "versions of servers", "samples/s, all workers"], rows))
    return parts + _job_status_html(folder / SERVER_FOLDER)


def _job_row(statistics: dict[str, Any]) -> list[str]:
    tasks, versions = statistics.get("tasks"), statistics.get("server_versions")
    by_state = tasks if isinstance(tasks, dict) else {}
    counts = [format_value(by_state.get(state)) for state in TASK_STATES]
    shown = ", ".join(map(format_value, versions[:_MAX_ROWS])) if isinstance(versions, list) else ""
    return [format_value(statistics.get("workers")), *counts, shown, format_value(statistics.get("samples_per_second"))]


def _job_status_html(folder: Path) -> list[str]:
    if not (folder / STATUS_FILE).is_file():
        return []
    try:
        status = JobStatus.read(folder)
    except DataError:  # `neondist top` says why
        return []
    workers = [[escape_text(name), format_value(steps)] for name, steps in sorted(status.workers.items())[:_MAX_ROWS]]
    servers = [
        [
            *map(format_value, (at, server.version, server.samples)),
            format_bytes(server.bytes),
            *map(format_value, (server.rows, server.refused)),
        ]
        for at, server in enumerate(status.servers[:_MAX_ROWS])
    ]
    return [
        "<h3>At the end</h3>" if status.ended else "<h3>Now</h3>",
        *([table_tag(["worker", "steps"], workers)] if workers else []),
        table_tag(["server", "version", "samples", "parameters", "rows", "refused"], servers),
    ]
