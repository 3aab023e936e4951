"""The search for a grid and a strategy: predicted seconds of a step, under a limit of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ..errors import ConfigError, UserError
from ..geometry import GridShape, grid_shape
from ..geometry.split import factorisations
from ..strategies import ParameterSpec, Strategy, StrategyBuilder
from ..strategies.auto import SyncCosts, sync_costs
from ..strategies.builder import Resources
from ..system.machine import Machine
from ..system.memory import words
from . import report
from .model_plan import ModelPlan, Workload

PARTS = "compute", "exchange", "sums", "synchronise"
MOST = 24
"""grids that are compared at most"""


class PlanWithSchemes(NamedTuple):
    """A plan, and the halo schemes that a planner has chosen for its layers, by name."""

    plan: ModelPlan
    schemes: dict[str, str]


@dataclass(frozen=True)
class Choice:
    """A grid with a strategy, and the seconds that a step is predicted to take with them.

    Attributes
    ----------
    plan : ModelPlan
    strategy : Strategy
    seconds : dict of str to float
        By what takes them: PARTS.
    sync : SyncCosts
    """

    plan: ModelPlan
    strategy: Strategy
    seconds: dict[str, float]
    sync: SyncCosts

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def order(self) -> tuple[float, str, tuple[int, ...]]:
        """The faster first; of equal ones by builder, then the grid with fewer replicas, then plain halos."""
        grid, schemes = self.plan.grid, len(self.strategy.schemes or ())
        return self.total, self.strategy.builder, (grid.replicas, grid.planes, -grid.rows, grid.cols, schemes)


def grids(ranks: int, given: dict[str, int], batch_size: int, extent: Sequence[int]) -> list[GridShape]:
    """Return the grids to compare: those with the factors that are given, without tiles that have no cell.

    Of very many, the most square ones are kept; if all have tiles without cells, the most square one.
    """
    planes = given.get("planes", 1)
    found = []
    for replicas in range(1, min(ranks, batch_size) + 1):
        if ranks % (replicas * planes) or replicas != given.get("replicas", replicas):
            continue
        for rows, cols in factorisations(ranks // (replicas * planes), 2):
            if (rows, cols) == (given.get("rows", rows), given.get("cols", cols)):
                found.append(GridShape(replicas, rows, cols, planes))

    def fits(grid: GridShape) -> bool:
        return all(parts <= n for parts, n in zip(grid.parts(len(extent)), extent, strict=True))

    found = [grid for grid in found if fits(grid)] or [grid_shape(ranks, **given)]
    return sorted(found, key=lambda grid: (max(grid.rows, grid.cols) / min(grid.rows, grid.cols), -grid.rows))[:MOST]


def choices(
    plans: Iterable[ModelPlan | PlanWithSchemes],
    builders: Sequence[StrategyBuilder | Strategy],
    machine: Machine,
    resources: Resources | None = None,
) -> list[Choice]:
    """Return every plan with every strategy, the fastest first; strategies carry the schemes of a plan."""
    made: dict[tuple[str, tuple[ParameterSpec, ...]], Strategy] = {}
    found = []
    for one in plans:
        plan, schemes = one if isinstance(one, PlanWithSchemes) else (one, None)
        load, ranks = plan.workload, plan.grid.size
        specs, shared, slots = load.parameters.specs, load.shared, load.parameters.slots
        for number, builder in enumerate(builders):
            key = str(number), specs
            if key not in made:
                given = isinstance(builder, Strategy)
                made[key] = builder if given else builder.build(specs, resources or ranks)  # type: ignore[union-attr, assignment]
                made[key].check_model(specs)
            sync = sync_costs(made[key].parameters, shared, ranks, slots, machine)
            seconds = dict(zip(PARTS, (*_seconds(load, plan.grid, machine), sync.seconds), strict=True))
            strategy = replace(made[key], grid=_factors(plan.grid), schemes=schemes)
            found.append(Choice(plan, strategy, seconds, sync))
    return sorted(found, key=lambda choice: choice.order)


def best(
    found: Sequence[Choice], limit: int | None, within: Callable[[ModelPlan, int], ModelPlan] | None = None
) -> tuple[Choice, Choice | None, list[str]]:
    """Return the fastest choice that fits into the limit, the one after it, and why faster ones were left out.

    Parameters
    ----------
    limit : int or None
        Bytes of a rank.
    within : callable, optional
        Makes a plan that fits, of strips, where none of the choices does.

    Raises
    ------
    ConfigError
        None fits.
    """
    kept, left = list[Choice](), list[str]()
    least = inf
    for choice in found:
        needed = held(choice) if limit is not None else 0
        least = min(least, needed)
        if limit is None or needed <= limit:
            kept.append(choice)
        elif not kept:
            left.append(f"{named(choice)}: needs {words(needed)} of a rank, more than {words(limit)}")
        if len(kept) == 2:
            break
    if not kept and limit is not None and within is not None:
        for choice in found:
            if choice.strategy.schemes:  # strips come with plain halos
                continue
            try:
                return replace(choice, plan=within(choice.plan, limit)), None, left
            except UserError:
                continue
    if not kept:
        raise ConfigError(
            f"memory: a rank may use {words(limit or 0)}, but needs {words(least)} at least with any grid and strategy;"
            " give more memory, or use more ranks or smaller batches"
        )
    return kept[0], kept[1] if len(kept) > 1 else None, left


def held(choice: Choice) -> int:
    """Return the bytes that a rank needs at most with a strategy, as if that with most cells owned most, too."""
    load = choice.plan.workload
    everywhere = sum(spec.nbytes for spec in load.shared) * (2 + load.parameters.slots)
    return choice.plan.trained_in - everywhere + choice.sync.held


def named(choice: Choice) -> str:
    """Return '2 × 1 × 2 with PS': replicas, (planes,) rows and columns."""
    grid = choice.plan.grid
    parts = (grid.replicas, *([grid.planes] if grid.planes > 1 else []), grid.rows, grid.cols)
    schemes = ", planned schemes" if choice.strategy.schemes else ""
    return f"{report.by(parts)} with {choice.strategy.builder}{schemes}"


def table(choice: Choice, runner_up: Choice | None, left: Sequence[str], error: str) -> Any:
    """Return a table of the parameters for a rich console, the choice and the one after it, and the reason."""
    from rich.console import Group
    from rich.text import Text

    specs, parts = choice.strategy.specs, choice.strategy.parameters
    rows = [(specs[name], one) for name, one in parts.items()]
    total = sum(spec.nbytes for spec in specs.values())
    columns = [
        report.Column("parameter", [spec.name for spec, _ in rows], "total", right=False),
        report.Column("shape", [report.by(spec.shape) or "scalar" for spec, _ in rows], right=False),
        report.Column("partition", [one.division for _, one in rows], right=False),
        report.Column("owners", [one.holders for _, one in rows], right=False),
        report.Column("synchroniser", [one.kind for _, one in rows], right=False),
        report.Column("bytes", [report.size(spec.nbytes) for spec, _ in rows], report.size(total)),
    ]
    both = [choice, *([runner_up] if runner_up else [])]
    compared = [
        report.Column("", ["choice", "runner-up"][: len(both)], right=False),
        report.Column("replicas, rows, cols; strategy", list(map(named, both)), right=False),
        *(report.Column(part, [_time(one.seconds[part]) for one in both]) for part in PARTS),
        report.Column("step", [_time(one.total) for one in both]),
    ]
    layers = defaultdict[str, list[str]](list)
    for name, scheme in (choice.strategy.schemes or {}).items():
        layers[scheme].append(name)
    notes = [f"scheme {scheme}: {', '.join(names)}" for scheme, names in layers.items()]
    notes += [reason(choice, runner_up), *(f"left out: {why}" for why in left[:3])]
    if len(left) > 3:
        notes.append(f"left out: {len(left) - 3} more that need too much memory")
    streamed = getattr(choice.plan, "stream", None)
    notes += [str(streamed)] if streamed is not None else []
    found = report.LayerTable(columns, left=3), Text(), report.LayerTable(compared, left=4), Text()
    return Group(*found, *map(Text, notes), Text(error, style="dim"))


def reason(choice: Choice, runner_up: Choice | None) -> str:
    """Return why the choice is better than the one after it."""
    if runner_up is None:
        return "reason: no other grid or strategy fits"
    saved = {part: runner_up.seconds[part] - choice.seconds[part] for part in PARTS}
    if runner_up.total == choice.total:
        return "reason: both take as long; the first by name is taken"
    part = max(PARTS, key=lambda name: saved[name])
    more = runner_up.total / choice.total - 1
    return f"reason: {part} takes {_time(saved[part])} less; a step of the runner-up takes {more:.1%} longer"


def _factors(grid: GridShape) -> dict[str, int]:
    return {"replicas": grid.replicas, "planes": grid.planes, "rows": grid.rows, "cols": grid.cols}


def _seconds(load: Workload, grid: GridShape, machine: Machine) -> tuple[float, float, float]:
    """Return the seconds of computing, of exchanges, and of sums, without those of gradients."""
    ranks = grid.size
    alone = load.flops / machine.speed + load.moved / machine.memory_bandwidth
    compute = machine.compute(alone, ranks, load.moved)
    compute += machine.lateness(ranks, compute)
    meetings = machine.waiting(ranks, round(load.messages > 0) + round(load.sums))
    exchange = machine.link(grid.tiles).seconds(load.messages, load.sent) + meetings
    each = load.summed / load.sums if load.sums else 0
    return compute, exchange, load.sums * machine.allreduce(ranks, each)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"
