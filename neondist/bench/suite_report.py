"""Reports of `neondist bench suite`: tables for a terminal and in Markdown, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import write_figure
from ..plan.report import Column, SplittableTable, format_seconds, format_size, join_extents
from ..terminal.console import counted
from .suite import NEONDIST_VARIANTS, TORCH_VARIANTS
from .tables import markdown_table, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType

Results = dict[str, Any]
LEGEND = (
    "n × m: n ranks with m threads each; ÷ best: step time divided by that of PyTorch's fastest variant in the same"
    " round, median and range over the rounds; memory: peak memory of the single process, including libraries"
)
ROOFLINE_LEGEND = (
    "Time of each layer in a training step, and its speed as a percentage of the limit, which is the speed of matrix"
    " products (GEMM) or of copies on all ranks together. Percentages exceed 100% if arrays stay in cache or Winograd's"
    " algorithm reduces the number of products; a dash marks layers that are computed as part of another layer."
)


def suite_table(results: Results) -> RenderableType:
    """Return the table of networks and its notes, for a rich console."""
    from rich.console import Group
    from rich.text import Text

    heads, rows = _network_table(results)
    columns = [Column(head, [row[at] for row in rows], align_right=at > 1) for at, head in enumerate(heads)]
    lines = [*means_lines(results), *_note_lines(results)]
    return Group(
        Text(head_text(results), style="bold"), Text(), SplittableTable(columns, split_at=7), Text(),
        *map(Text, lines), Text(), Text(LEGEND, style="dim"),
    )  # fmt: skip


def suite_markdown(results: Results) -> str:
    """Return the results in Markdown, with the roofline of each layer or segment of every network."""
    parts = [
        f"{head_text(results)}.",
        markdown_table(*_network_table(results)),
        "\n".join(f"* {line}" for line in means_lines(results)),
        LEGEND + ".",
    ]
    parts += ["\n".join(f"* {note}" for note in _note_lines(results))]
    details = [part for row in results["networks"] for part in _roofline_sections(row)]
    parts += ["## Layer by layer", ROOFLINE_LEGEND, *details] if details else []
    return "\n\n".join(part for part in parts if part) + "\n"


def head_text(results: Results) -> str:
    """Return a heading with date, machine and settings of the measurement."""
    about = results["environment"]
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("numpy", "torch") if name in about["versions"]
    )
    return (
        f"{about['started'][:10]}, {about['processor']}, {counted(about['cores'], 'core')}, Python"
        f" {about['python']}, {versions};"
        f" {counted(results['ranks'], 'rank')} with {counted(results['threads'], 'thread')} each,"
        f" or one process on all cores; {counted(results['rounds'], 'round')}"
    )


def _network_table(results: Results) -> tuple[list[str], list[list[str]]]:
    own_heads = {"ranks": f"{results['ranks']} × {results['threads']}", "one": f"1 × {results['cores']}"}
    variants = [variant for variant in (*own_heads, *TORCH_VARIANTS) if variant in results["variants"]]
    own_variants = [variant for variant in own_heads if variant in variants]
    compared = any(row["ratios"] for row in results["networks"])
    heads = ["network", "input", *(own_heads.get(variant, variant) for variant in variants)]
    heads += [f"{own_heads[variant]} ÷ best" for variant in own_variants if compared]
    heads += ["memory", *(["eager memory", "memory ÷ eager"] if compared else [])]
    rows = []
    for row in results["networks"]:
        cells = [row["network"], join_extents((row["batch_size"], *row["sample_shape"])) if "layers" in row else ""]
        for variant in variants:
            measurement = row["variants"].get(variant)
            star = "*" * (variant == row["best"])
            cells.append(format_seconds(measurement["seconds"]) + star if measurement else "-")
        if compared:
            cells += [ratio_text(row["ratios"].get(variant)) for variant in own_variants]
        peaks = [row["variants"].get(variant, {}).get("peak_bytes", 0) for variant in ("one", "eager")]
        cells += [format_size(peaks[0])]
        if compared:
            cells += [format_size(peaks[1]), "-" if row["memory"] is None else f"{row['memory']:.2f}"]
        rows.append(cells)
    return heads, rows


def ratio_text(ratios: Results | None) -> str:
    """Return a ratio, and its range over the rounds."""
    return f"{ratios['ratio']:.2f} ({min(ratios['all']):.2f} to {max(ratios['all']):.2f})" if ratios else "-"


def means_lines(results: Results) -> list[str]:
    """Return a line for each group of networks."""
    ranks, threads, cores = (results[name] for name in ("ranks", "threads", "cores"))
    labels = {"ranks": f"{ranks} × {threads} ÷ best", "one": f"1 × {cores} ÷ best", "memory": "memory ÷ eager"}
    return [
        f"geometric mean, {group}: " + ", ".join(f"{labels[kind]} = {value:.2f}" for kind, value in ratios.items())
        for group, ratios in results["means"].items()
    ]


def _note_lines(results: Results) -> list[str]:
    notes = list(results["notes"])
    if any(row["best"] for row in results["networks"]):
        notes.append(
            "PyTorch's variants: "
            + "; ".join(f"{name}: {text}" for name, text in TORCH_VARIANTS.items() if name in results["variants"])
            + "; * marks the fastest"
        )
    return notes + failure_lines(results)


def failure_lines(results: Results) -> list[str]:
    """Return a line for each variant of a network that could not be measured."""
    return [
        f"{row['network']}, {', '.join(name for name, reason in row['why'].items() if reason == problem)}: {problem}"
        for row in results["networks"]
        for problem in dict.fromkeys(row["why"].values())
    ]


def _roofline_sections(row: Results) -> list[str]:
    if "machine" not in row:
        return []
    machine = row["machine"]
    flops, bandwidth = machine["flops_per_second"] / 1e9, machine["bytes_per_second"] / 1e9
    head = f"### {row['network']}\n\nLimits: {flops:.0f} Gflop/s in matrix products, {bandwidth:.1f} GB/s in copies."
    heads = ["layer or segment", "forward", "backward", "exchange", "wait", "Gflop/s", "limit", "% of limit"]
    rows = []
    for layer in row["layers"]:
        times = [format_seconds(layer[kind]) for kind in ("forward", "backward", "exchange", "wait")]
        speed, share = layer.get("flops_per_second"), layer.get("share_of_limit")
        speeds = [f"{speed / 1e9:.0f}" if speed else "", layer.get("limit", ""), share_text(share)]
        rows.append([layer["name"], *times, *speeds])
    return [head, markdown_table(heads, rows)]


def draw_suite(file: Path, results: Results) -> None:
    """Draw the ratios of all networks, and the layers of all networks in a roofline plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = results["networks"]
    _draw_bars(left, results)
    marks = "osD^v<>Ph*Xd"
    machines = [row["machine"] for row in rows if "machine" in row]
    for at, row in enumerate(rows):
        layers = [layer for layer in row.get("layers", []) if layer.get("flops_per_second")]
        intensities = [layer["flops"] / layer["bytes_moved"] for layer in layers]
        speeds = [layer["flops_per_second"] / 1e9 for layer in layers]
        right.plot(intensities, speeds, marks[at % len(marks)], label=row["network"], color=f"C{at % 10}", alpha=0.8)
    if machines:
        flops, moved = (max(layer[f"{unit}_per_second"] for layer in machines) / 1e9 for unit in ("flops", "bytes"))
        ends = [0.1, flops / moved, max(1e3, 10 * flops / moved)]
        right.plot(ends, [ends[0] * moved, flops, flops], "k-", label="limits")
    right.set(
        xscale="log", yscale="log", xlabel="flops per byte of memory", ylabel="Gflop/s", title="layers and segments"
    )
    right.legend(fontsize="small", ncols=2)
    write_figure(file, figure)


def _draw_bars(axes: Any, results: Results) -> None:
    rows = results["networks"]
    labels = {
        "ranks": f"{counted(results['ranks'], 'rank')} × {results['threads']} ÷ best",
        "one": f"1 process × {results['cores']} ÷ best",
        "memory": "memory ÷ eager",
    }
    kinds = [kind for kind in labels if any(_bar_height(row, kind) is not None for row in rows)]
    if not kinds:  # neondist alone
        kinds = [s for s in NEONDIST_VARIANTS if s in results["variants"]]
        labels = {"ranks": "ranks, s", "one": "one process, s"}
        axes.set(yscale="log", title="a training step", ylabel="seconds")
    else:
        axes.axhline(1, color="k", linewidth=0.8)
        axes.set(title="a training step ÷ PyTorch's best", ylabel="ratio")
    width = 0.8 / max(1, len(kinds))
    for at, kind in enumerate(kinds):
        values = [_bar_height(row, kind, not results["compared"]) or 0 for row in rows]
        axes.bar([x + (at - (len(kinds) - 1) / 2) * width for x in range(len(rows))], values, width, label=labels[kind])
    axes.set_xticks(range(len(rows)), labels=[row["network"] for row in rows], rotation=45, ha="right")
    axes.legend(fontsize="small")


def _bar_height(row: Results, kind: str, seconds: bool = False) -> float | None:
    if seconds:
        value = row["variants"].get(kind, {}).get("seconds")
    else:
        value = row["memory"] if kind == "memory" else row["ratios"].get(kind, {}).get("ratio")
    return None if value is None else float(value)
