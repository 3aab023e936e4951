"""Tables of results for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import has_matplotlib, make_folder, write_text
from ..plan.report import Column, SplittableTable, format_seconds, format_size
from ..runtime.observers.clock import WORK_KINDS
from ..terminal.console import counted
from .noise import noise_warnings

_MAX_SHOWN_SHARE = 3.0  # larger ratios cannot be explained by caches

if TYPE_CHECKING:
    from rich.console import RenderableType


def step_table(results: dict[str, Any]) -> RenderableType:
    """Return the results of `bench_step` as a table."""
    from rich.console import Group
    from rich.text import Text

    rows = results["layers"]
    times = [
        Column(kind, [format_seconds(row[kind]) for row in rows], format_seconds(sum(row[kind] for row in rows)))
        for kind in WORK_KINDS
    ]
    table = SplittableTable(
        [
            Column("layer", [row["name"] for row in rows], "total", align_right=False),
            Column("class", [row["class"] for row in rows], align_right=False),
            *times,
            Column(
                "sent",
                [format_size(row["bytes_sent"]) for row in rows],
                format_size(sum(r["bytes_sent"] for r in rows)),
            ),
            *_roofline_columns(results),
        ],
        split_at=4,
    )
    head = "{}, backend {backend}, {dtype}, batches of {batch_size}".format(
        counted(results["ranks"], "rank"), **results
    )
    return Group(Text(head, style="bold"), Text(), table, Text(), *(Text(line) for line in _summary_lines(results)))


def share_text(share: float | None) -> str:
    """Return the share of a limit as text; '-' if it is far above 100%, because another layer does its work."""
    if share is None:
        return ""
    return f"{share:.0%}" if share <= _MAX_SHOWN_SHARE else "-"


def _roofline_columns(results: dict[str, Any]) -> list[Column]:
    if "machine" not in results:
        return []
    shares = [row.get("share_of_limit") for row in results["layers"]]
    return [
        Column("limit", [row.get("limit", "") for row in results["layers"]], align_right=False),
        Column("% of limit", [share_text(share) for share in shares]),
    ]


def _summary_lines(results: dict[str, Any]) -> list[str]:
    lines = [
        "Means over the ranks; exchange: copies into and out of message buffers; wait: inside MPI; sent: by all ranks",
        f"step    {format_seconds(results['seconds_per_step'])}  ({results['steps_per_second']:.4g} steps per second)",
        f"memory  {format_size(max(results['peak_bytes']))} peak per rank, excluding what the process used"
        " before loading data",
    ]
    if "machine" in results:
        machine = results["machine"]
        lines.append(
            f"limits  {machine['flops_per_second'] / 1e9:.4g} Gflop/s in a matrix product,"
            f" {format_size(machine['bytes_per_second'])}/s in a copy, by all ranks; % of limit: share of the limit"
            " achieved"
        )
    lines += noise_warnings(results["noise"])
    if "reading" in results:
        reading, ratios = results["reading"], results["reading"]["ratios"]
        lines.append(
            f"reading {format_seconds(reading['seconds_per_step'])} with batches of the data set,"
            f" {reading['ratio']:.3f} times as long as with batches in memory ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    baseline = results.get("against")
    if baseline:
        agreement = "agree" if baseline["agree"] else "DO NOT AGREE"
        lines += [
            f"{baseline['name']}   {format_seconds(baseline['seconds_per_step'])},"
            f" {counted(baseline['threads'], 'thread')},"
            f" memory {format_size(baseline['peak_bytes'])}",
            f"ratio   {baseline['ratio']:.3f}  ({min(baseline['ratios']):.3f} to {max(baseline['ratios']):.3f} in"
            f" {counted(len(baseline['ratios']), 'round')}; {baseline['ratio_of_fastest']:.3f} of the fastest);"
            f" memory {max(results['peak_bytes']) / max(1, baseline['peak_bytes']):.3f}",
            f"losses {baseline['loss'][0]:.7g} and {baseline['loss'][1]:.7g}, largest gradient difference"
            f" {baseline['gradients_worst']:.1e} ({baseline['worst_at']}): they {agreement}",
        ]
    return lines


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, ["---"] * len(heads), *rows])


def write_report(folder: Path, texts: Mapping[str, str], plots: Mapping[str, Callable[[Path], object]]) -> list[Path]:
    """Write text files and, if matplotlib is installed, plots, both by name in a folder; return the files."""
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    plots = plots if has_matplotlib() else {}
    for name, draw in plots.items():
        draw(folder / name)
    return [folder / name for name in (*texts, *plots)]


def halo_table(results: dict[str, Any]) -> RenderableType:
    """Return the results of `bench_halo` as a table."""
    from rich.console import Group
    from rich.text import Text

    sizes = results["sizes"]
    columns = [
        Column("image", ["×".join(map(str, size["shape"])) for size in sizes], align_right=False),
        Column("sent", [format_size(size["bytes_sent"]) for size in sizes]),
    ]
    for name in ("exchange", "with_tile", "scatter_add", "raw", "memcpy"):
        columns.append(Column(name.replace("_", " "), [format_seconds(size[f"{name}_seconds"]) for size in sizes]))
    columns.append(Column("÷ raw", [f"{size['exchange_over_raw']:.2f}" for size in sizes]))
    columns.append(Column("÷ memcpy", [f"{size['exchange_over_memcpy']:.1f}" for size in sizes]))
    legend = (
        "float32, halo of 1 cell, split along H; exchange: forward, with the tile already in place; with tile: the same"
        " plus copying the tile into place; scatter add: backward; raw: the same messages in plain mpi4py"
    )
    return Group(
        Text(f"{counted(results['ranks'], 'rank')}", style="bold"),
        Text(),
        SplittableTable(columns, split_at=7),
        Text(),
        Text(legend),
    )
