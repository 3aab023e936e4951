"""Search for the grid and strategy with the shortest predicted step within a memory limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import ConfigError, UserError
from ..geometry import GridShape, grid_shape
from ..geometry.partition import factorisations
from ..strategies import ParameterSpec, Strategy, StrategyBuilder
from ..strategies.auto import SyncCosts, estimate_sync_costs
from ..strategies.builder import DeviceCounts
from ..system.machine import Machine
from ..system.memory import format_bytes, format_limit_for
from . import report
from .model_plan import ModelPlan, Workload

STEP_PARTS = "compute", "exchange", "sums", "synchronise"
MAX_COMPARED_GRIDS = 24  # maximum number of grids compared


class PlanWithSchemes(NamedTuple):
    """A plan, and the halo schemes chosen for its layers, by name."""

    plan: ModelPlan
    schemes: dict[str, str]


@dataclass(frozen=True)
class GridChoice:
    """A grid with a strategy, and the predicted seconds of a step.

    Attributes
    ----------
    plan : ModelPlan
    strategy : Strategy
    seconds : dict of str to float
        By part of the step: STEP_PARTS.
    sync : SyncCosts
    """

    plan: ModelPlan
    strategy: Strategy
    seconds: dict[str, float]
    sync: SyncCosts

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def sort_key(self) -> tuple[float, str, tuple[int, ...]]:
        """Sort key: seconds, then builder, then grid (fewer replicas first), then the number of planned schemes."""
        grid, schemes = self.plan.grid, len(self.strategy.schemes or ())
        return self.step_seconds, self.strategy.builder, (grid.replicas, grid.planes, -grid.rows, grid.cols, schemes)


class _DeviceCounts(NamedTuple):
    """Devices of a resource spec that a number of ranks can use."""

    replicas: int
    servers: int


def candidate_grids(
    ranks: int, fixed_factors: dict[str, int], batch_size: int, extent: Sequence[int]
) -> list[GridShape]:
    """Return the grids to compare: those with the fixed factors and without empty tiles, the most square first.

    At most MAX_COMPARED_GRIDS are returned; if all have empty tiles, the most square one.
    """
    planes = fixed_factors.get("planes", 1)
    shapes = []
    for replicas in range(1, min(ranks, batch_size) + 1):
        if ranks % (replicas * planes) or replicas != fixed_factors.get("replicas", replicas):
            continue
        for rows, cols in factorisations(ranks // (replicas * planes), 2):
            if (rows, cols) == (fixed_factors.get("rows", rows), fixed_factors.get("cols", cols)):
                shapes.append(GridShape(replicas, rows, cols, planes))

    def fits(grid: GridShape) -> bool:
        return all(parts <= n for parts, n in zip(grid.parts(len(extent)), extent, strict=True))

    shapes = [grid for grid in shapes if fits(grid)] or [grid_shape(ranks, **fixed_factors)]
    return sorted(shapes, key=lambda grid: (max(grid.rows, grid.cols) / min(grid.rows, grid.cols), -grid.rows))[
        :MAX_COMPARED_GRIDS
    ]


def sort_choices(
    plans: Iterable[ModelPlan | PlanWithSchemes],
    builders: Sequence[StrategyBuilder | Strategy],
    machine: Machine,
    resources: DeviceCounts | None = None,
) -> list[GridChoice]:
    """Return every combination of plan and strategy, fastest first; each strategy contains the schemes of its plan."""
    strategies: dict[tuple[str, tuple[ParameterSpec, ...]], Strategy] = {}
    candidates = []
    for item in plans:
        plan, schemes = item if isinstance(item, PlanWithSchemes) else (item, None)
        load, ranks = plan.workload, plan.grid.size
        specs, shared, slots = load.parameters.specs, load.untiled_specs, load.parameters.slots_per_parameter
        for number, builder in enumerate(builders):
            key = str(number), specs
            if key not in strategies:
                if isinstance(builder, Strategy):
                    strategies[key] = builder
                elif resources is None:
                    strategies[key] = builder.build(specs, ranks)
                else:
                    counts = _DeviceCounts(min(resources.replicas, ranks), min(resources.servers, ranks))
                    strategies[key] = builder.build(specs, counts)
                strategies[key].check_parameters_match(specs)
                strategies[key].check_owners_exist(ranks)
            sync = estimate_sync_costs(strategies[key].parameters, shared, ranks, slots, machine)
            seconds = dict(zip(STEP_PARTS, (*_step_part_seconds(load, plan.grid, machine), sync.seconds), strict=True))
            strategy = replace(strategies[key], grid=_grid_factors(plan.grid), schemes=schemes)
            candidates.append(GridChoice(plan, strategy, seconds, sync))
    return sorted(candidates, key=lambda choice: choice.sort_key)


def choose_fastest_grid(
    candidates: Sequence[GridChoice],
    limit: int | None,
    fit_plan: Callable[[ModelPlan, int], ModelPlan] | None = None,
    backend: str | None = None,
    local_ranks: int | None = None,
) -> tuple[GridChoice, GridChoice | None, list[str]]:
    """Return the fastest choice within the memory limit, the runner-up, and the reasons for excluding faster choices.

    Parameters
    ----------
    limit : int or None
        Bytes per rank; None: no limit.
    fit_plan : callable, optional
        Returns a plan in strips that fits in memory; called if no choice fits.
    backend : str, optional
        Name of the backend of the layers; None: PyTorch module.
    local_ranks : int, optional
        Number of ranks on a machine; default: all.

    Raises
    ------
    ConfigError
        Nothing fits.
    """
    fitting, excluded = list[GridChoice](), list[str]()
    least = 1 << 62
    for choice in candidates:
        needed = max_needed_bytes(choice) if limit is not None else 0
        least = min(least, needed)
        if limit is None or needed <= limit:
            fitting.append(choice)
        elif not fitting:
            excluded.append(
                f"{choice_label(choice)}: needs {format_bytes(needed)} per rank, more than {format_bytes(limit)}"
            )
        if len(fitting) == 2:
            break
    if not fitting and limit is not None and fit_plan is not None:
        for choice in candidates:
            if choice.strategy.schemes:  # strips require the scheme halo
                continue
            try:
                return replace(choice, plan=fit_plan(choice.plan, limit)), None, excluded
            except UserError:
                continue
    if not fitting:
        enough = format_limit_for(least, local_ranks or candidates[0].plan.grid.size, backend)
        raise ConfigError(
            f"memory: a rank may use {format_bytes(limit or 0)}, but needs {format_bytes(least)} or more with any grid"
            f" and strategy; give memory: {enough} or more, or use more ranks or smaller batches"
        )
    return fitting[0], fitting[1] if len(fitting) > 1 else None, excluded


def max_needed_bytes(choice: GridChoice) -> int:
    """Return an upper bound on a rank's bytes, as if the rank of the largest tile also owned the most parameters."""
    load = choice.plan.workload
    replicated = sum(spec.nbytes for spec in load.untiled_specs) * (2 + load.parameters.slots_per_parameter)
    return choice.plan.max_training_memory - replicated + choice.sync.held_bytes


def held_parameter_bytes(choice: GridChoice) -> int:
    """Return the bytes of parameters, gradients and slots on the first rank, as if it owned the most parameters."""
    load = choice.plan.workload
    tiled = load.parameters.num_parameters_on(0) - sum(spec.size for spec in load.untiled_specs)
    slots = load.parameters.slots_per_parameter
    return choice.sync.held_bytes + tiled * load.parameters.dtype.itemsize * (2 + slots)


def choice_label(choice: GridChoice) -> str:
    """Return a choice as text, such as '2×1×2 with PS': replicas, (planes,) rows and columns, and the strategy."""
    grid = choice.plan.grid
    parts = (grid.replicas, *([grid.planes] if grid.planes > 1 else []), grid.rows, grid.cols)
    schemes = ", planned schemes" if choice.strategy.schemes else ""
    return f"{report.join_extents(parts)} with {choice.strategy.builder}{schemes}"


def choice_table(choice: GridChoice, runner_up: GridChoice | None, excluded: Sequence[str], error_note: str) -> Any:
    """Return, for a rich console, tables of the parameters and of the choice and the runner-up, and the reason."""
    from rich.console import Group
    from rich.text import Text

    specs, parts = choice.strategy.specs, choice.strategy.parameters
    rows = [(specs[name], part) for name, part in parts.items()]
    total = sum(spec.nbytes for spec in specs.values())
    columns = [
        report.Column("parameter", [spec.name for spec, _ in rows], "total", align_right=False),
        report.Column("shape", [report.join_extents(spec.shape) or "scalar" for spec, _ in rows], align_right=False),
        report.Column("partition", [part.partition_text for _, part in rows], align_right=False),
        report.Column("owners", [part.owners_text for _, part in rows], align_right=False),
        report.Column("synchroniser", [part.kind for _, part in rows], align_right=False),
        report.Column("bytes", [report.format_size(spec.nbytes) for spec, _ in rows], report.format_size(total)),
    ]
    options = [choice, *([runner_up] if runner_up else [])]
    compared = [
        report.Column("", ["choice", "runner-up"][: len(options)], align_right=False),
        report.Column("replicas, rows, cols; strategy", list(map(choice_label, options)), align_right=False),
        *(
            report.Column(part, [report.format_seconds(option.seconds[part]) for option in options])
            for part in STEP_PARTS
        ),
        report.Column("step", [report.format_seconds(option.step_seconds) for option in options]),
    ]
    layers = defaultdict[str, list[str]](list)
    for name, scheme in (choice.strategy.schemes or {}).items():
        layers[scheme].append(name)
    notes = [f"scheme {scheme}: {', '.join(names)}" for scheme, names in layers.items()]
    notes += [choice_reason(choice, runner_up), *(f"excluded: {cause}" for cause in excluded[:3])]
    if len(excluded) > 3:
        notes.append(f"excluded: {len(excluded) - 3} more that need too much memory")
    streamed = getattr(choice.plan, "stream", None)
    notes += [str(streamed)] if streamed is not None else []
    tables = report.SplittableTable(columns, split_at=3), Text(), report.SplittableTable(compared, split_at=4), Text()
    return Group(*tables, *map(Text, notes), Text(error_note, style="dim"))


def choice_reason(choice: GridChoice, runner_up: GridChoice | None) -> str:
    """Return why the choice is better than the runner-up."""
    if runner_up is None:
        return "reason: no other grid or strategy fits"
    saved = {part: runner_up.seconds[part] - choice.seconds[part] for part in STEP_PARTS}
    if runner_up.step_seconds == choice.step_seconds:
        return "reason: both take the same time; the choice is the first by strategy name, then by grid"
    part = max(STEP_PARTS, key=lambda name: saved[name])
    slowdown = runner_up.step_seconds / choice.step_seconds - 1
    less = report.format_seconds(saved[part])
    return f"reason: {part} takes {less} less; a step of the runner-up takes {slowdown:.1%} longer"


def _grid_factors(grid: GridShape) -> dict[str, int]:
    return {"replicas": grid.replicas, "planes": grid.planes, "rows": grid.rows, "cols": grid.cols}


def _step_part_seconds(load: Workload, grid: GridShape, machine: Machine) -> tuple[float, float, float]:
    """Return the seconds of computation, exchanges and reductions, without gradient synchronisation."""
    ranks = grid.size
    alone = load.flops / machine.speed + load.memory_traffic / machine.memory_bandwidth
    compute = machine.compute_seconds(alone, ranks, load.memory_traffic)
    compute += machine.expected_delay_seconds(ranks, compute)
    meetings = machine.waiting_seconds(ranks, round(load.message_count > 0) + round(load.reduction_count))
    exchange = machine.slowest_link(grid.tiles).message_seconds(load.message_count, load.sent_bytes) + meetings
    nbytes = load.reduction_bytes / load.reduction_count if load.reduction_count else 0
    return compute, exchange, load.reduction_count * machine.allreduce_seconds(ranks, nbytes)
