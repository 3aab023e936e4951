"""The suite's results to read: tables for a terminal and for a page, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import write_figure
from ..plan.report import Column, LayerTable, by
from ..terminal.console import counted
from .suite import OURS, THEIRS
from .tables import bytes_text, markdown, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType

Made = dict[str, Any]
LEGEND = (
    "÷ best: time of a step divided by that of PyTorch's fastest variant in the same round, median and range over the"
    " rounds; memory: peak of one whole process, including libraries"
)
ROOFLINE = (
    "Time of each layer in a training step, and its speed as a percentage of its limit: the speed of matrix products"
    " (GEMM) or of copies, of all ranks together. Percentages above 100% occur where arrays stay in caches and where"
    " Winograd's algorithm needs fewer products; a dash marks layers whose work is done by another layer."
)


def suite_table(made: Made) -> RenderableType:
    """Return the networks, and what they have in common, for a rich console."""
    from rich.console import Group
    from rich.text import Text

    heads, rows = _networks(made)
    columns = [Column(head, [row[at] for row in rows], right=at > 1) for at, head in enumerate(heads)]
    lines = [*means_lines(made), *_notes(made)]
    return Group(
        Text(head_text(made), style="bold"), Text(), LayerTable(columns, left=7), Text(),
        *map(Text, lines), Text(), Text(LEGEND, style="dim"),
    )  # fmt: skip


def suite_markdown(made: Made) -> str:
    """Return the same in Markdown, with what limits each layer or segment of every network."""
    parts = [
        f"{head_text(made)}.",
        markdown(*_networks(made)),
        "\n".join(f"* {line}" for line in means_lines(made)),
        LEGEND + ".",
    ]
    parts += ["\n".join(f"* {note}" for note in _notes(made))]
    details = [part for row in made["networks"] for part in _roofline(row)]
    parts += ["## Layer by layer", ROOFLINE, *details] if details else []
    return "\n\n".join(part for part in parts if part) + "\n"


def head_text(made: Made) -> str:
    """Return when, on what and how it was measured."""
    about = made["environment"]
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("numpy", "torch") if name in about["versions"]
    )
    return (
        f"{about['started'][:10]}, {about['processor']}, {about['cores']} cores, Python {about['python']}, {versions};"
        f" {counted(made['ranks'], 'rank')} with {counted(made['threads'], 'thread')} each,"
        f" or one process on all cores; {counted(made['rounds'], 'round')}"
    )


def _networks(made: Made) -> tuple[list[str], list[list[str]]]:
    ours = {"ranks": f"{made['ranks']} × {made['threads']}", "one": f"1 × {made['cores']}"}
    sides = [side for side in (*ours, *THEIRS) if side in made["sides"]]
    inside = [side for side in ours if side in sides]
    compared = any(row["ratios"] for row in made["networks"])
    heads = ["network", "input", *(ours.get(side, side) for side in sides)]
    heads += [f"{ours[side]} ÷ best" for side in inside if compared]
    heads += ["memory", *(["eager memory", "memory ÷ eager"] if compared else [])]
    rows = []
    for row in made["networks"]:
        cells = [row["network"], by((row["batch_size"], *row["sample_shape"])) if "layers" in row else ""]
        for side in sides:
            found = row["sides"].get(side)
            cells.append(seconds_text(found["seconds"]) + "*" * (side == row["best"]) if found else "-")
        if compared:
            cells += [ratio_text(row["ratios"].get(side)) for side in inside]
        peaks = [row["sides"].get(side, {}).get("peak_bytes", 0) for side in ("one", "eager")]
        cells += [bytes_text(peaks[0])]
        if compared:
            cells += [bytes_text(peaks[1]), "-" if row["memory"] is None else f"{row['memory']:.2f}"]
        rows.append(cells)
    return heads, rows


def ratio_text(found: Made | None) -> str:
    """Return a ratio, and its range over the rounds."""
    return f"{found['ratio']:.2f} ({min(found['all']):.2f} to {max(found['all']):.2f})" if found else "-"


def means_lines(made: Made) -> list[str]:
    """Return a line for each group of networks."""
    words = {"ranks": f"{made['ranks']} × {made['threads']}", "one": f"1 × {made['cores']}", "memory": "memory"}
    return [
        f"geometric mean of {group}: " + ", ".join(f"{words[kind]} {value:.2f}" for kind, value in found.items())
        for group, found in made["means"].items()
    ]


def _notes(made: Made) -> list[str]:
    notes = list(made["notes"])
    if any(row["best"] for row in made["networks"]):
        notes.append(
            "PyTorch's variants: "
            + "; ".join(f"{side}: {THEIRS[side]}" for side in THEIRS if side in made["sides"])
            + "; * marks the fastest"
        )
    return notes + reasons(made)


def reasons(made: Made) -> list[str]:
    """Return why sides of a network could not be measured."""
    return [
        f"{row['network']}, {', '.join(side for side, one in row['why'].items() if one == why)}: {why}"
        for row in made["networks"]
        for why in dict.fromkeys(row["why"].values())
    ]


def _roofline(row: Made) -> list[str]:
    if "machine" not in row:
        return []
    machine = row["machine"]
    flops, moved = machine["flops_per_second"] / 1e9, machine["bytes_per_second"] / 1e9
    head = f"### {row['network']}\n\nLimits: {flops:.0f} Gflop/s in matrix products, {moved:.1f} GB/s in copies."
    heads = ["layer or segment", "forward", "backward", "exchange", "wait", "Gflop/s", "limit", "of limit"]
    rows = []
    for one in row["layers"]:
        times = [seconds_text(one[kind]) for kind in ("forward", "backward", "exchange", "wait")]
        speed, share = one.get("flops_per_second"), one.get("share_of_limit")
        speeds = [f"{speed / 1e9:.0f}" if speed else "", one.get("limit", ""), share_text(share)]
        rows.append([one["name"], *times, *speeds])
    return [head, markdown(heads, rows)]


def draw(file: Path, made: Made) -> None:
    """Draw the ratios of all networks, and where their layers are below the roofs of the machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = made["networks"]
    _draw_bars(left, made)
    marks = "osD^v<>Ph*Xd"
    machines = [row["machine"] for row in rows if "machine" in row]
    for at, row in enumerate(rows):
        found = [one for one in row.get("layers", []) if one.get("flops_per_second")]
        at_work = [one["flops"] / one["bytes_moved"] for one in found]
        speeds = [one["flops_per_second"] / 1e9 for one in found]
        right.plot(at_work, speeds, marks[at % len(marks)], label=row["network"], color=f"C{at % 10}", alpha=0.8)
    if machines:
        flops, moved = (max(one[f"{what}_per_second"] for one in machines) / 1e9 for what in ("flops", "bytes"))
        ends = [0.1, flops / moved, max(1e3, 10 * flops / moved)]
        right.plot(ends, [ends[0] * moved, flops, flops], "k-", label="limits")
    right.set(
        xscale="log", yscale="log", xlabel="flops for a byte of memory", ylabel="Gflop/s", title="layers and segments"
    )
    right.legend(fontsize="small", ncols=2)
    write_figure(file, figure)


def _draw_bars(axes: Any, made: Made) -> None:
    rows = made["networks"]
    labels = {
        "ranks": f"{made['ranks']} ranks × {made['threads']} ÷ best",
        "one": f"1 process × {made['cores']} ÷ best",
        "memory": "memory ÷ eager",
    }
    kinds = [kind for kind in labels if any(_value(row, kind) is not None for row in rows)]
    if not kinds:  # neondist alone
        kinds, labels = [side for side in OURS if side in made["sides"]], {"ranks": "ranks, s", "one": "one process, s"}
        axes.set(yscale="log", title="a training step", ylabel="seconds")
    else:
        axes.axhline(1, color="k", linewidth=0.8)
        axes.set(title="a training step ÷ PyTorch's best", ylabel="ratio")
    width = 0.8 / max(1, len(kinds))
    for at, kind in enumerate(kinds):
        values = [_value(row, kind, not made["compared"]) or 0 for row in rows]
        axes.bar([x + (at - (len(kinds) - 1) / 2) * width for x in range(len(rows))], values, width, label=labels[kind])
    axes.set_xticks(range(len(rows)), labels=[row["network"] for row in rows], rotation=45, ha="right")
    axes.legend(fontsize="small")


def _value(row: Made, kind: str, seconds: bool = False) -> float | None:
    if seconds:
        found = row["sides"].get(kind, {}).get("seconds")
    else:
        found = row["memory"] if kind == "memory" else row["ratios"].get(kind, {}).get("ratio")
    return None if found is None else float(found)
