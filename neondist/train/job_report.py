"""Section of report.html on the workers, tasks and servers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.output import SERVER_FOLDER
from ..services.job_status import STATUS_FILE, TASK_STATES, JobStatus
from ..system.memory import format_bytes
from .callbacks.master_statistics import JOB_STATISTICS_KEY
from .html_elements import escape_html, is_plottable, table_html, value_html
from .state import EpochRecord
from .svg_plot import line_plot_svg

_MAX_TABLE_ROWS = 1000
"""Maximum number of workers or servers in a table."""


def server_job_html(folder: Path, records: Sequence[EpochRecord]) -> list[str]:
    """Return the workers, tasks, server versions and throughput of each epoch, and the last state of the job.

    Empty if the run has no servers.
    """
    sections: list[str] = []
    statistics_by_epoch = [
        (r["epoch"], r[JOB_STATISTICS_KEY]) for r in records if isinstance(r.get(JOB_STATISTICS_KEY), dict)
    ]
    if statistics_by_epoch:
        rows = [[value_html(epoch), *_epoch_statistics_row(statistics)] for epoch, statistics in statistics_by_epoch]
        sections = ["<h2>Workers and servers</h2>"]
        for name, title in (("workers", "workers"), ("samples_per_second", "samples/s of all workers")):
            points = [(at, record[name]) for at, record in statistics_by_epoch if is_plottable(record.get(name))]
            if len({value for _, value in points}) > 1:
                sections.append(line_plot_svg(title, {title: points}, x_label="epoch"))
        tasks = [f"tasks {state}" for state in TASK_STATES]
        sections.append(table_html(["epoch", "workers", *tasks, "versions of servers", "samples/s, all workers"], rows))
    return sections + _job_status_html(folder / SERVER_FOLDER)


def _epoch_statistics_row(statistics: dict[str, Any]) -> list[str]:
    tasks, versions = statistics.get("tasks"), statistics.get("server_versions")
    count_by_state = tasks if isinstance(tasks, dict) else {}
    counts = [value_html(count_by_state.get(state)) for state in TASK_STATES]
    joined = ", ".join(map(value_html, versions[:_MAX_TABLE_ROWS])) if isinstance(versions, list) else ""
    return [value_html(statistics.get("workers")), *counts, joined, value_html(statistics.get("samples_per_second"))]


def _job_status_html(folder: Path) -> list[str]:
    if not (folder / STATUS_FILE).is_file():
        return []
    try:
        status = JobStatus.read(folder)
    except DataError:  # `neondist top` says why
        return []
    worker_steps = sorted(status.workers.items())[:_MAX_TABLE_ROWS]
    worker_rows = [[escape_html(name), value_html(count)] for name, count in worker_steps]
    server_rows = [
        [value_html(n) for n in (at, s.version, s.samples)]
        + [format_bytes(s.bytes), value_html(s.rows), value_html(s.rejected)]
        for at, s in enumerate(status.servers[:_MAX_TABLE_ROWS])
    ]
    return [
        "<h3>At the end</h3>" if status.ended else "<h3>Now</h3>",
        *([table_html(["worker", "steps"], worker_rows)] if worker_rows else []),
        table_html(["server", "version", "samples", "parameters", "rows", "rejected"], server_rows),
    ]
