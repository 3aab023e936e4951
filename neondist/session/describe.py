"""The plan of every layer, as a table: what `neondist check` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..geometry import Box, GridShape
from ..halo import scheme_text
from .costing import LayerCosts, layer_costs, planned_memory, pretraining_bytes
from .summing import sums_of_step
from .validate import validate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from ..models.plan import LayerPlan, ModelPlan
    from .experiment import FitExperiment

LEGEND = """\
tile: output cells of a rank; view: input cells that it looks at, with padding
halo: cells of the view that other ranks own, per sample; the most of any rank
sent: halo bytes of a training step, both ways; by the busiest rank, and by all
memory: view and its gradient, parameters, optimiser of the fullest rank; a layer
writes its outputs into the next one's view"""
KEPT_HEAD = "on a rank"
KEPT = f"\n{KEPT_HEAD}: parameters of the fullest rank, where each keeps those of its own tile"


@dataclass(frozen=True)
class Column:
    """One column: its head, a cell per layer, and the foot under them."""

    head: str
    cells: list[str]
    foot: str = ""
    right: bool = True


class LayerTable:
    """A table that is never cut; on a terminal too narrow for all columns it becomes two."""

    def __init__(self, columns: Sequence[Column], left: int) -> None:
        self.columns, self.left = columns, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=10_000)
        halves = [self.columns[: self.left], [self.columns[0], *self.columns[self.left :]]]
        fits = console.measure(self._table(self.columns), options=unlimited).maximum <= options.max_width
        for at, columns in enumerate([self.columns] if fits or not console.is_terminal else halves):
            yield from [""] * bool(at)
            table = self._table(columns)
            needed = console.measure(table, options=unlimited).maximum
            yield from console.render(table, options.update(width=needed))

    def _table(self, columns: Sequence[Column]) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", footer_style="bold")
        table.show_footer = any(column.foot for column in columns[1:])
        for column in columns:
            table.add_column(column.head, column.foot, justify="right" if column.right else "left", no_wrap=True)
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        return table


def describe(experiment: FitExperiment, ranks: int = 1) -> Any:
    """Return what every layer of an experiment would do on `ranks` ranks, for a rich console to print; needs no MPI.

    Raises
    ------
    UserError
        As `FitExperiment.validate`.
    """
    from rich.console import Group
    from rich.text import Text

    shape, plans = validate(experiment, ranks)
    costs = layer_costs(experiment.model, plans, experiment.batch_size, shape)
    table = LayerTable([*_shapes(plans), *_costs(plans, costs)], left=5)
    head, legend = _head(experiment, shape), LEGEND + (KEPT if any(c.head == KEPT_HEAD for c in table.columns) else "")
    planned = planned_memory(experiment.model, plans, experiment.batch_size, shape)
    notes = [
        f"planned peak: {_size(planned)} for views and gradients, which share memory, on the fullest rank",
        *_sums(experiment, plans, shape),
        *(
            f"a step of pretraining '{name}' sends {_size(most)} (the busiest rank), {_size(total)} (all)"
            for name, most, total in pretraining_bytes(experiment.model, plans, experiment.batch_size, shape)
        ),
    ]
    return Group(Text(head, style="bold"), Text(), table, Text(), *map(Text, notes), Text(), Text(legend, style="dim"))


def _head(experiment: FitExperiment, shape: GridShape) -> str:
    ranks = "1 rank" if shape.size == 1 else f"{shape.size} ranks"
    parts = {"replicas": shape.replicas, "planes": shape.planes, "rows": shape.rows, "cols": shape.cols}
    grid = ", ".join(f"{count} {name}" for name, count in parts.items() if name != "planes" or count > 1)
    data = f"{type(experiment.dataset).__name__} {_by(experiment.dataset.sample_shape)}"
    model = f"{type(experiment.model).__name__} ({experiment.model.dtype})"
    return f"{model} on {ranks} ({grid}), {data}, batches of {experiment.batch_size}"


def _shapes(plans: Sequence[LayerPlan]) -> list[Column]:
    schemes = [scheme_text(p.scheme) if p.window is not None or p.reverse else "-" for p in plans]
    plain = all(text in ("halo", "-") for text in schemes)
    views = [_spread(p.views, p.input_shape[-1]) if p.window is not None else "-" for p in plans]
    return [
        Column("layer", [p.name for p in plans], "total", right=False),
        Column("class", [p.cls for p in plans], right=False),
        Column("output", [_by(p.output_shape) for p in plans], right=False),
        Column("tile", [_spread(p.tiles, p.output_shape[-1]) for p in plans], right=False),
        Column("view", views, right=False),
        *([] if plain else [Column("scheme", schemes, right=False)]),
    ]


def _costs(plans: Sequence[LayerPlan], costs: Sequence[LayerCosts]) -> list[Column]:
    total = sum(costs, LayerCosts())
    halo = [f"{max(p.halo_cells):,}" if any(p.halo_cells) else "-" for p in plans]
    kept = Column(KEPT_HEAD, [f"{max(p.held):,}" for p in plans], f"{sum(max(p.held) for p in plans):,}")
    return [
        Column("halo", halo),
        Column("sent, most", [_size(c.sent_most) for c in costs], _size(total.sent_most)),
        Column("sent, all", [_size(c.sent_all) for c in costs], _size(total.sent_all)),
        Column("parameters", [f"{c.parameters:,}" for c in costs], f"{total.parameters:,}"),
        *([kept] if any(max(p.held) < p.parameters for p in plans) else []),
        Column("memory", [_size(c.memory) for c in costs], _size(total.memory)),
    ]


def _sums(experiment: FitExperiment, plans: ModelPlan, shape: GridShape) -> list[str]:
    """Return what a rank of the fullest replica gives into sums, the largest first."""
    given = sums_of_step(experiment.model, plans, experiment.batch_size, shape, 0)
    if not given:
        return []
    parts = [f"{name} {_size(count)}" for name, count in sorted(given.items(), key=lambda pair: -pair[1])]
    return [f"sums over ranks: a rank gives {_size(sum(given.values()))} a step: {', '.join(parts)}"]


def _by(shape: Iterable[object]) -> str:
    return "×".join(map(str, shape))


def _spread(boxes: Sequence[Box], channels: int) -> str:
    """Return the extents of all tiles: '9-10×14×16'."""
    axes = zip(*(box.shape for box in boxes), strict=True)
    ranges = [(min(axis), max(axis)) for axis in axes]
    return _by([*(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges), channels])


def _size(count: float) -> str:
    if not count:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"
