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
    """A plan, and the schemes chosen for its layers, by layer name."""

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
    grids = []
    for replicas in range(1, min(ranks, batch_size) + 1):
        if ranks % (replicas * planes) or replicas != fixed_factors.get("replicas", replicas):
            continue
        for rows, cols in factorisations(ranks // (replicas * planes), 2):
            if (rows, cols) == (fixed_factors.get("rows", rows), fixed_factors.get("cols", cols)):
                grids.append(GridShape(replicas, rows, cols, planes))

    def has_no_empty_tiles(grid: GridShape) -> bool:
        return all(parts <= n for parts, n in zip(grid.parts(len(extent)), extent, strict=True))

    grids = [grid for grid in grids if has_no_empty_tiles(grid)] or [grid_shape(ranks, **fixed_factors)]
    return sorted(grids, key=lambda grid: (max(grid.rows, grid.cols) / min(grid.rows, grid.cols), -grid.rows))[
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
        workload, ranks = plan.workload, plan.grid.size
        specs, untiled_specs = workload.parameters.specs, workload.untiled_specs
        num_slots = workload.parameters.slots_per_parameter
        for number, builder in enumerate(builders):
            strategy_key = str(number), specs
            if strategy_key not in strategies:
                if isinstance(builder, Strategy):
                    strategies[strategy_key] = builder
                elif resources is None:
                    strategies[strategy_key] = builder.build(specs, ranks)
                else:
                    device_counts = _DeviceCounts(min(resources.replicas, ranks), min(resources.servers, ranks))
                    strategies[strategy_key] = builder.build(specs, device_counts)
                strategies[strategy_key].check_parameters_match(specs)
                strategies[strategy_key].check_owners_exist(ranks)
            sync = estimate_sync_costs(strategies[strategy_key].parameters, untiled_specs, ranks, num_slots, machine)
            part_seconds = *_step_part_seconds(workload, plan.grid, machine), sync.seconds
            seconds = dict(zip(STEP_PARTS, part_seconds, strict=True))
            strategy = replace(strategies[strategy_key], grid=_grid_factors(plan.grid), schemes=schemes)
            candidates.append(GridChoice(plan, strategy, seconds, sync))
    return sorted(candidates, key=lambda choice: choice.sort_key)


def choose_fastest_grid(
    candidates: Sequence[GridChoice],
    max_bytes: int | None,
    fit_plan: Callable[[ModelPlan, int], ModelPlan] | None = None,
    backend: str | None = None,
    local_ranks: int | None = None,
) -> tuple[GridChoice, GridChoice | None, list[str]]:
    """Return the fastest choice within the memory limit, the runner-up, and the reasons for excluding faster choices.

    Parameters
    ----------
    max_bytes : int or None
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
    fitting_choices, exclusion_reasons = list[GridChoice](), list[str]()
    min_bytes = 1 << 62
    for choice in candidates:
        needed_bytes = max_needed_bytes(choice) if max_bytes is not None else 0
        min_bytes = min(min_bytes, needed_bytes)
        if max_bytes is None or needed_bytes <= max_bytes:
            fitting_choices.append(choice)
        elif not fitting_choices:
            exclusion_reasons.append(
                f"{choice_label(choice)}: needs {format_bytes(needed_bytes)} per rank,"
                f" more than {format_bytes(max_bytes)}"
            )
        if len(fitting_choices) == 2:
            break
    if not fitting_choices and max_bytes is not None and fit_plan is not None:
        for choice in candidates:
            if choice.strategy.schemes:  # strips require the scheme halo
                continue
            try:
                return replace(choice, plan=fit_plan(choice.plan, max_bytes)), None, exclusion_reasons
            except UserError:
                continue
    if not fitting_choices:
        sufficient_limit = format_limit_for(min_bytes, local_ranks or candidates[0].plan.grid.size, backend)
        raise ConfigError(
            f"memory: a rank may use {format_bytes(max_bytes or 0)}, but needs {format_bytes(min_bytes)} or more with"
            f" any grid and strategy; give memory: {sufficient_limit} or more, or use more ranks or smaller batches"
        )
    return fitting_choices[0], fitting_choices[1] if len(fitting_choices) > 1 else None, exclusion_reasons


def max_needed_bytes(choice: GridChoice) -> int:
    """Return an upper bound on a rank's bytes, as if the rank of the largest tile also owned the most parameters."""
    workload = choice.plan.workload
    replicated = sum(spec.nbytes for spec in workload.untiled_specs) * (2 + workload.parameters.slots_per_parameter)
    return choice.plan.max_training_memory - replicated + choice.sync.held_bytes


def held_parameter_bytes(choice: GridChoice) -> int:
    """Return the bytes of parameters, gradients and slots on the first rank, as if it owned the most parameters."""
    workload = choice.plan.workload
    tiled_elements = workload.parameters.num_parameters_on(0) - sum(spec.size for spec in workload.untiled_specs)
    slots_per_parameter = workload.parameters.slots_per_parameter
    return choice.sync.held_bytes + tiled_elements * workload.parameters.dtype.itemsize * (2 + slots_per_parameter)


def choice_label(choice: GridChoice) -> str:
    """Return a choice as text, such as '2×1×2 with PS': replicas, (planes,) rows and columns, and the strategy."""
    grid = choice.plan.grid
    factors = (grid.replicas, *([grid.planes] if grid.planes > 1 else []), grid.rows, grid.cols)
    schemes = ", planned schemes" if choice.strategy.schemes else ""
    return f"{report.join_extents(factors)} with {choice.strategy.builder}{schemes}"


def choice_table(choice: GridChoice, runner_up: GridChoice | None, reasons: Sequence[str], error_note: str) -> Any:
    """Return tables of the parameters, the choice and the runner-up, with the reason, for a rich console."""
    from rich.console import Group
    from rich.text import Text

    specs, parameter_strategies = choice.strategy.specs, choice.strategy.parameters
    rows = [(specs[name], part) for name, part in parameter_strategies.items()]
    total_bytes = sum(spec.nbytes for spec in specs.values())
    columns = [
        report.Column("parameter", [spec.name for spec, _ in rows], "total", align_right=False),
        report.Column("shape", [report.join_extents(spec.shape) or "scalar" for spec, _ in rows], align_right=False),
        report.Column("partition", [part.partition_text for _, part in rows], align_right=False),
        report.Column("owners", [part.owners_text for _, part in rows], align_right=False),
        report.Column("synchroniser", [part.kind for _, part in rows], align_right=False),
        report.Column("bytes", [report.format_size(spec.nbytes) for spec, _ in rows], report.format_size(total_bytes)),
    ]
    choices = [choice, *([runner_up] if runner_up else [])]
    comparison = [
        report.Column("", ["choice", "runner-up"][: len(choices)], align_right=False),
        report.Column("replicas, rows, cols; strategy", list(map(choice_label, choices)), align_right=False),
        *(
            report.Column(part, [report.format_seconds(option.seconds[part]) for option in choices])
            for part in STEP_PARTS
        ),
        report.Column("step", [report.format_seconds(option.step_seconds) for option in choices]),
    ]
    layers_by_scheme = defaultdict[str, list[str]](list)
    for name, scheme in (choice.strategy.schemes or {}).items():
        layers_by_scheme[scheme].append(name)
    notes = [f"scheme {scheme}: {', '.join(names)}" for scheme, names in layers_by_scheme.items()]
    notes += [choice_reason(choice, runner_up), *(f"excluded: {reason}" for reason in reasons[:3])]
    if len(reasons) > 3:
        notes.append(f"excluded: {len(reasons) - 3} more that need too much memory")
    stream = getattr(choice.plan, "stream", None)
    notes += [str(stream)] if stream is not None else []
    tables = report.SplittableTable(columns, split_at=3), Text(), report.SplittableTable(comparison, split_at=4), Text()
    return Group(*tables, *map(Text, notes), Text(error_note, style="dim"))


def choice_reason(choice: GridChoice, runner_up: GridChoice | None) -> str:
    """Return the reason for preferring the choice to the runner-up, as text."""
    if runner_up is None:
        return "reason: no other grid or strategy fits"
    saved_seconds = {part: runner_up.seconds[part] - choice.seconds[part] for part in STEP_PARTS}
    if runner_up.step_seconds == choice.step_seconds:
        return "reason: both take the same time; the choice is the first by strategy name, then by grid"
    part = max(STEP_PARTS, key=lambda name: saved_seconds[name])
    slowdown = runner_up.step_seconds / choice.step_seconds - 1
    saving_text = report.format_seconds(saved_seconds[part])
    return f"reason: {part} takes {saving_text} less; a step of the runner-up takes {slowdown:.1%} longer"


def _grid_factors(grid: GridShape) -> dict[str, int]:
    return {"replicas": grid.replicas, "planes": grid.planes, "rows": grid.rows, "cols": grid.cols}


def _step_part_seconds(workload: Workload, grid: GridShape, machine: Machine) -> tuple[float, float, float]:
    """Return the seconds of computation, exchanges and reductions, without gradient synchronisation."""
    ranks = grid.size
    seconds_alone = workload.flops / machine.speed + workload.memory_traffic / machine.memory_bandwidth
    compute_seconds = machine.compute_seconds(seconds_alone, ranks, workload.memory_traffic)
    compute_seconds += machine.expected_delay_seconds(ranks, compute_seconds)
    waiting = machine.waiting_seconds(ranks, round(workload.message_count > 0) + round(workload.reduction_count))
    exchange = machine.slowest_link(grid.tiles).message_seconds(workload.message_count, workload.sent_bytes) + waiting
    bytes_per_reduction = workload.reduction_bytes / workload.reduction_count if workload.reduction_count else 0
    return compute_seconds, exchange, workload.reduction_count * machine.allreduce_seconds(ranks, bytes_per_reduction)
