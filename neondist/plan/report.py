"""Plan as text: the table that `neondist check` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from ..geometry import Box, GridShape
from ..halo import scheme_text
from ..terminal.console import counted
from .layer import LayerPlan, TrainingCosts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

TABLE_LEGEND = """\
tile: output cells of a rank; view: input cells that they depend on, with padding
halo: cells of the view owned by other ranks, per sample; maximum over ranks
sent: halo bytes per training step, forward and backward; maximum and sum over ranks
memory: view, its gradient, parameters and optimiser state on the rank using the most memory;
a layer writes its outputs into the view of the next layer"""
_BYTE_COLUMNS = {"sent (max)": "max_sent_bytes", "sent (total)": "total_sent_bytes", "summed": "max_summed_bytes"}
_UNITS_PER_SECOND = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
PER_RANK_HEAD = "parameters/rank (max)"
PER_RANK_LEGEND = "\nparameters/rank: maximum over ranks; each rank keeps the parameters of its own tile"


@dataclass(frozen=True)
class Column:
    """A column: its header, one cell per row, and the footer."""

    head: str
    cells: list[str]
    foot: str = ""
    align_right: bool = True


class SplittableTable:
    """A table that is never truncated; on a terminal too narrow for all columns it is split into two."""

    def __init__(self, columns: Sequence[Column], split_at: int) -> None:
        self.columns, self.split_at = columns, split_at

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited_options = options.update(width=10_000)
        halves = [self.columns[: self.split_at], [self.columns[0], *self.columns[self.split_at :]]]
        fits = console.measure(self._table(self.columns), options=unlimited_options).maximum <= options.max_width
        for at, columns in enumerate([self.columns] if fits or not console.is_terminal else halves):
            yield from [""] * bool(at)
            table = self._table(columns)
            table_width = console.measure(table, options=unlimited_options).maximum
            yield from console.render(table, options.update(width=table_width))

    def _table(self, columns: Sequence[Column]) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", footer_style="bold")
        table.show_footer = any(column.foot for column in columns[1:])
        for column in columns:
            table.add_column(column.head, column.foot, justify="right" if column.align_right else "left", no_wrap=True)
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        return table


def layer_table(
    plans: Sequence[LayerPlan],
    costs: Sequence[TrainingCosts],
    peak_bytes: int,
    bytes_by_heading: Mapping[str, Mapping[str, int]],
    pretraining_stages: Iterable[tuple[str, int, int]],
    stream_text: str = "",
) -> Any:
    """Return a table of the layers, their totals, and a legend.

    Parameters
    ----------
    peak_bytes : int
        Maximum bytes for views and gradients on a rank.
    bytes_by_heading : dict of text to dict of name to int
        Bytes per layer on a rank of the largest replica, by heading.
    pretraining_stages : iterable of (str, int, int)
        Name of each pretraining stage, and the bytes that the busiest rank and all ranks send in one of its steps.
    stream_text : str
        Description of the stream, if there is one.
    """
    from rich.console import Group
    from rich.text import Text

    table = SplittableTable([*_shape_columns(plans), *_cost_columns(plans, costs)], split_at=5)
    notes = [
        f"planned peak: {format_size(peak_bytes)} for views and gradients, which share memory, on the rank using the"
        " most memory",
        *filter(None, [stream_text]),
        *(f"{heading}: {_format_total_and_parts(counts)}" for heading, counts in bytes_by_heading.items() if counts),
        *(
            f"a pretraining step of '{name}' sends {format_size(most)} (busiest rank), {format_size(total)} in total"
            for name, most, total in pretraining_stages
        ),
    ]
    legend = TABLE_LEGEND + (PER_RANK_LEGEND if any(column.head == PER_RANK_HEAD for column in table.columns) else "")
    return Group(table, Text(), *map(Text, notes), Text(), Text(legend, style="dim"))


def module_costs_table(
    rows: Sequence[tuple[str, TrainingCosts, str]], total: TrainingCosts, notes: Sequence[str], legend: str
) -> Any:
    """Return a table of the costs of modules, notes, and a legend.

    Parameters
    ----------
    rows : sequence of (str, TrainingCosts, str)
        Name, costs and output shape of each module.
    total : TrainingCosts
        Totals; each is the maximum over ranks.
    """
    from rich.console import Group
    from rich.text import Text

    costs = [cost for _, cost, _ in rows]
    columns = [
        Column("module", [name for name, _, _ in rows], "total", align_right=False),
        Column("crosses", [", ".join(cost.message_kinds) or "-" for cost in costs], align_right=False),
        Column("output", [shape for _, _, shape in rows], align_right=False),
        *(
            Column(head, [format_size(getattr(c, name)) for c in costs], format_size(getattr(total, name)))
            for head, name in _BYTE_COLUMNS.items()
        ),
        Column("flops", [format_count(cost.flops) for cost in costs], format_count(total.flops)),
        Column("parameters", [f"{cost.parameters:,}" for cost in costs], f"{total.parameters:,}"),
        Column("memory", [format_size(cost.memory) for cost in costs], format_size(total.memory)),
    ]
    return Group(SplittableTable(columns, split_at=3), Text(), *map(Text, notes), Text(), Text(legend, style="dim"))


def render_plain_text(headline: str, content: Any) -> str:
    """Return the output of a rich console as plain text, below a headline."""
    from ..terminal.rich_console import Console

    console = Console(file=StringIO(), soft_wrap=True, color_system=None)
    console.print(f"{headline}\n")
    console.print(content)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def plan_headline(dtype: Any, grid: GridShape, input_shape: Sequence[int], batch_size: int) -> str:
    """Return the headline of a plan."""
    return f"{dtype} on {grid_text(grid)}, inputs {join_extents(input_shape)}, batches of {batch_size}"


def grid_text(grid: GridShape) -> str:
    """Return a grid as text, such as '6 ranks (1 replica, 3 rows, 2 cols)'."""
    rank_count = counted(grid.size, "rank")
    factors = {"replica": grid.replicas, "plane": grid.planes, "row": grid.rows, "col": grid.cols}
    return f"{rank_count} ({', '.join(counted(n, name) for name, n in factors.items() if name != 'plane' or n > 1)})"


def _shape_columns(plans: Sequence[LayerPlan]) -> list[Column]:
    schemes = [scheme_text(p.scheme) if p.window is not None or p.adds_output_halo else "-" for p in plans]
    is_plain_halo = all(text in ("halo", "-") for text in schemes)
    seen = [[p.view(tile).need for tile in p.representative_tiles] for p in plans]
    views = [
        "-" if p.window is None else _format_extents(v, p.input_shape[-1]) for p, v in zip(plans, seen, strict=True)
    ]
    return [
        Column("layer", [p.name for p in plans], "total", align_right=False),
        Column("class", [p.class_name for p in plans], align_right=False),
        Column("output", [join_extents(p.output_shape) for p in plans], align_right=False),
        Column(
            "tile",
            [_format_extents(map(p.tile, p.representative_tiles), p.output_shape[-1]) for p in plans],
            align_right=False,
        ),
        Column("view", views, align_right=False),
        *([] if is_plain_halo else [Column("scheme", schemes, align_right=False)]),
    ]


def _cost_columns(plans: Sequence[LayerPlan], costs: Sequence[TrainingCosts]) -> list[Column]:
    total = sum(costs, TrainingCosts())
    halo_cells = [f"{max(p.halo_cells_by_tile):,}" if any(p.halo_cells_by_tile) else "-" for p in plans]
    per_rank_column = Column(
        PER_RANK_HEAD,
        [f"{max(p.num_parameters_by_tile):,}" for p in plans],
        f"{sum(max(p.num_parameters_by_tile) for p in plans):,}",
    )
    return [
        Column("halo", halo_cells),
        Column("sent (max)", [format_size(c.max_sent_bytes) for c in costs], format_size(total.max_sent_bytes)),
        Column("sent (total)", [format_size(c.total_sent_bytes) for c in costs], format_size(total.total_sent_bytes)),
        Column("parameters", [f"{c.parameters:,}" for c in costs], f"{total.parameters:,}"),
        *([per_rank_column] if any(max(p.num_parameters_by_tile) < p.parameters for p in plans) else []),
        Column("memory", [format_size(c.memory) for c in costs], format_size(total.memory)),
    ]


def _format_total_and_parts(counts: Mapping[str, int]) -> str:
    """Return as text the total bytes of a rank in a step, and the bytes of each layer, largest first."""
    parts = [f"{name} {format_size(count)}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1])]
    return f"{format_size(sum(counts.values()))} per rank and step ({', '.join(parts)})"


def join_extents(shape: Iterable[object]) -> str:
    """Return a shape as text, such as '28×28×1'."""
    return "×".join(map(str, shape))


def _format_extents(boxes: Iterable[Box], channels: int) -> str:
    """Return the extents of all tiles as text, such as '9-10×14×16'."""
    extents_by_axis = zip(*(box.shape for box in boxes), strict=True)
    ranges = [(min(axis), max(axis)) for axis in extents_by_axis]
    return join_extents([*(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges), channels])


def format_size(nbytes: float) -> str:
    """Return a number of bytes as text, such as '12.3 kB'."""
    return _format_in_units(nbytes, ("B", "kB", "MB", "GB"), "TB")


def format_count(count: float) -> str:
    """Return a number as text, such as '12.3 M'."""
    return _format_in_units(count, ("", "k", "M", "G"), "T").rstrip()


def format_seconds(seconds: float) -> str:
    """Return a time as text, such as '12.3 ms'."""
    if not seconds:
        return "-"
    return next(
        (f"{seconds * per_second:.3g} {unit}" for unit, per_second in _UNITS_PER_SECOND if seconds * per_second >= 1),
        f"{seconds * 1e9:.3g} ns",
    )


def _format_in_units(count: float, units: Sequence[str], largest_unit: str) -> str:
    if not count:
        return "-"
    for unit in units:
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} {largest_unit}"
