"""Reports of `neondist bench torch`: tables for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..plan.report import Column, SplittableTable, format_seconds, format_size, join_extents
from .suite_report import failure_lines, head_text, means_lines, ratio_text
from .tables import markdown_table

if TYPE_CHECKING:
    from rich.console import RenderableType

Results = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
TIME_KINDS = ("kernels", "messages", "copies", "sums", "other")
"""operators that compute; waiting inside MPI; views of tiles and operators that move data; reductions over ranks and
their preparation; Python, autograd and dispatch"""
MAX_SHOWN_OPERATORS = 3
VARIANT_LABELS = {"ranks": "a rank", "eager": "one process"}
BREAKDOWN_LEGEND = (
    "Breakdown of the step times above by PyTorch's profiler, mean over ranks. kernels: operators that compute;"
    " messages: time in MPI, including waiting for other ranks; copies: assembly of views and operators that move data;"
    " sums: reductions over ranks and their preparation; other: Python, autograd and dispatch."
)


def module_table(results: Results) -> RenderableType:
    """Return the tables for a rich console."""
    from rich.console import Group
    from rich.text import Text

    tables = [
        SplittableTable(
            [Column(head, [row[at] for row in rows], align_right=at > left) for at, head in enumerate(heads)],
            split_at=7,
        )
        for (heads, rows), left in ((_step_time_table(results), 1), (_time_breakdown_table(results), 1))
        if rows
    ]
    parts = [
        part
        for table, text in zip(tables, (_step_time_legend(results), BREAKDOWN_LEGEND), strict=False)
        for part in (table, Text(), text, "")
    ]
    return Group(Text(head_text(results), style="bold"), Text(), *parts, *map(Text, _note_lines(results)))


def module_markdown(results: Results) -> str:
    """Return the results in Markdown."""
    steps, places = _step_time_table(results), _time_breakdown_table(results)
    parts = [
        f"{head_text(results)}.", markdown_table(*steps), "\n".join(f"* {line}" for line in _note_lines(results)),
        _step_time_legend(results),
    ]  # fmt: skip
    parts += [markdown_table(*places), BREAKDOWN_LEGEND] if places[1] else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _note_lines(results: Results) -> list[str]:
    return [*means_lines(results), *results["notes"], *failure_lines(results)]


def _step_time_legend(results: Results) -> str:
    """Return the legend of the table of step times, for those variants that have been measured."""
    num_torch_variants, stars, ratio = len(results["variants"]) - 1, "", ""
    if num_torch_variants > 1:
        stars = " * marks PyTorch's faster variant."
    if num_torch_variants:
        reference = "that of this variant" if stars else "PyTorch's"
        ratio = f" ÷ best: step time divided by {reference} in the same round, median and range over the rounds."
    return (
        "Training step in float32 with PyTorch's default memory layout; in all variants, the allocator keeps freed"
        f" memory.{stars}{ratio} memory: peak memory of a process minus its memory before the module was created."
        " first step: includes distributing or compiling the module."
    )


def _step_time_table(results: Results) -> Table:
    variants, ranks_head = results["variants"], f"{results['ranks']} × {results['threads']}"
    compared = len(variants) > 1
    heads = ["model", "input", ranks_head, *variants[1:], *(["÷ best"] if compared else []), "memory"]
    heads += ["eager memory", "memory ÷ eager"] if "eager" in variants else []
    heads += ["first step", *(f"{variant} first step" for variant in variants[1:])]
    rows = []
    for row in results["networks"]:
        measurements: Mapping[str, Results] = row["variants"]
        cells = [row["network"], join_extents((row["batch_size"], *row["sample_shape"])) if "batch_size" in row else ""]
        for variant in variants:
            star = "*" * (variant == row["best"] and len(variants) > 2)
            cells.append(format_seconds(measurements[variant]["seconds"]) + star if variant in measurements else "-")
        cells += [ratio_text(row["ratios"].get("ranks"))] if compared else []
        cells += [format_size(measurements.get("ranks", {}).get("peak_bytes", 0))]
        if "eager" in variants:
            share = "-" if row["memory"] is None else f"{row['memory']:.2f}"
            cells += [format_size(measurements.get("eager", {}).get("peak_bytes", 0)), share]
        cells += [format_seconds(measurements.get(variant, {}).get("first_seconds", 0)) for variant in variants]
        rows.append(cells)
    return heads, rows


def _time_breakdown_table(results: Results) -> Table:
    rows = []
    for row in results["networks"]:
        for variant, label in VARIANT_LABELS.items():
            measurement = row["variants"].get(variant, {})
            if "kinds" not in measurement:
                continue
            seconds, largest = measurement["seconds"], list(measurement["operators"].items())[:MAX_SHOWN_OPERATORS]
            times = [format_seconds(seconds * measurement["kinds"][kind]) for kind in TIME_KINDS]
            top = ", ".join(f"{name} {format_seconds(seconds * share)}" for name, share in largest)
            rows.append([row["network"], label, *times, top])
    return ["model", "", *TIME_KINDS, "most expensive operators"], rows
