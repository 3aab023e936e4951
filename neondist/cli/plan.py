"""`neondist plan`: the predicted fastest grid and strategy on a machine, with the strategy of each parameter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import add_location
from ..errors import ConfigError, UserError
from ..terminal.console import emit
from ..terminal.progress_line import preparation_progress
from . import options
from .experiment import load_from_arguments

if TYPE_CHECKING:
    from ..cluster import ResourceSpec
    from ..system.machine import Machine

UNKNOWN_PREDICTION_ERROR_TEXT = (
    "predicted, not measured: `neondist bench model calibrate` measures the machine and the error of predictions"
)


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    cmd = commands.add_parser("plan", help="select a grid and a strategy with a cost model", allow_abbrev=False)
    options.add_experiment_options(
        cmd, "number of ranks to plan for (default: the replicas of --resources, or 1); none is started"
    )
    cmd.add_argument(
        "--resources", type=options.parse_as_path, metavar="FILE", help="resource specification: nodes and devices"
    )
    cmd.add_argument(
        "--machine", type=options.parse_as_path, metavar="FILE",
        help="machine file of `bench model calibrate` (default: typical values)",
    )  # fmt: skip
    cmd.add_argument(
        "--to", type=options.parse_as_path, metavar="FILE.yaml", help="write the strategy to a file for --strategy"
    )
    cmd.set_defaults(command=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Print the table and the choice; write the strategy to --to, if given."""
    from ..cluster import ResourceSpec
    from ..plan import search
    from ..strategies import AutoStrategy
    from ..terminal.rich_console import Console

    with preparation_progress(owns_process=arguments.signals.owns_process):
        experiment = load_from_arguments(arguments)
    resources = None if arguments.resources is None else ResourceSpec(arguments.resources)
    ranks = arguments.ranks or (resources.replicas if resources is not None else 1)
    auto_strategy = experiment.model.strategy if isinstance(experiment.model.strategy, AutoStrategy) else None
    chooser = auto_strategy or AutoStrategy()
    if arguments.machine is not None:
        chooser = AutoStrategy(machine=str(arguments.machine))
    if resources is not None:
        chooser = chooser.on_nodes(resources.ranks_by_node, resources.lowest_bandwidth)
    machine = chooser.machine
    try:
        if not experiment.dist_flag:
            raise ConfigError("dist_flag: false runs in one process; plan needs dist_flag: true")
        local_ranks = _max_ranks_of_node(ranks, machine, resources)
        limit, plan_within = _memory_limit_and_planner(experiment, local_ranks)
        builders = _candidate_builders(experiment.model)
        candidates = search.sort_choices(_plan_all_grids(experiment, ranks, machine), builders, machine, resources)
        if auto_strategy is not None:
            candidates = auto_strategy.select_fitting(candidates, list(map(search.held_parameter_bytes, candidates)))
        choice, runner_up, rejected = search.choose_fastest_grid(
            candidates, limit, plan_within, experiment.model.layer_backend_name, local_ranks
        )
    except UserError as error:
        raise add_location(error) from None
    Console(soft_wrap=True).print(search.choice_table(choice, runner_up, rejected, _describe_prediction_error(machine)))
    if arguments.to is not None:
        choice.strategy.save(arguments.to)
        emit(Path(arguments.to))
    return 0


def _describe_prediction_error(machine: Any) -> str:
    if not machine.error:
        return UNKNOWN_PREDICTION_ERROR_TEXT
    return f"predicted, not measured: steps of small networks were {machine.error:.0%} off on average on this machine"


def _candidate_builders(model: Any) -> Sequence[Any]:
    """Remove the model's strategy and return it, or the planner's candidates if it is automatic or missing."""
    from ..strategies import AutoStrategy
    from ..strategies.auto import create_candidate_builders

    strategy, model.strategy = model.strategy, None
    return create_candidate_builders() if strategy is None or isinstance(strategy, AutoStrategy) else [strategy]


def _max_ranks_of_node(ranks: int, machine: Machine, resources: ResourceSpec | None) -> int:
    """Return the largest number of ranks on a node."""
    if resources is None:
        return min(ranks, max(machine.cores_per_node, -(-ranks // machine.count_nodes(ranks))))
    return min(ranks, max(resources.ranks_by_node))


def _memory_limit_and_planner(experiment: Any, local_ranks: int) -> tuple[int | None, Any]:
    """Return the memory limit per rank in bytes, if any, and a function that plans strips within a limit."""
    from ..system.memory import model_bytes_per_rank

    model, memory = experiment.model, experiment.model.memory
    model.memory = model.available_bytes_per_rank = None
    if memory is None:
        return None, None
    limit = model_bytes_per_rank(memory, local_ranks, model.layer_backend_name)
    return limit, partial(_plan_in_strips, experiment)


def _plan_in_strips(experiment: Any, plan: Any, limit: int) -> Any:
    from ..system.memory import process_overhead_bytes

    model = experiment.model
    model.memory = (limit + process_overhead_bytes(model.layer_backend_name)) * plan.grid.size
    try:
        return model.fit_plan_to_memory(model.plan(experiment.dataset.sample_shape, plan.grid, experiment.batch_size))
    finally:
        model.memory = None


def _plan_with_cheapest_schemes(experiment: Any, grid: Any, machine: Any) -> Any:
    """Return the plan of a grid with the cheapest exact schemes; None if all are `halo`, or if the file sets others."""
    from ..halo import scheme_text
    from ..models import Model
    from ..plan.choices import choose_schemes, machine_profile_for, set_schemes
    from ..plan.search import PlanWithSchemes

    model, shape, batch = experiment.model, experiment.dataset.sample_shape, experiment.batch_size
    if not isinstance(model, Model) or {scheme_text(leaf.scheme or model.scheme) for leaf in model.leaves} != {"halo"}:
        return None
    profile = machine_profile_for(machine, grid, batch, model.dtype.itemsize)
    choices = choose_schemes(model.chain, shape, grid, profile)
    schemes = {choice.layer: choice.scheme for choice in choices if choice.scheme != "halo"}
    original_schemes = {leaf: leaf.scheme for leaf in model.leaves}
    try:
        return PlanWithSchemes(model.plan(shape, grid, batch), schemes) if set_schemes(model.leaves, schemes) else None
    finally:
        for leaf, scheme in original_schemes.items():
            leaf.scheme = scheme


def _plan_all_grids(experiment: Any, ranks: int, machine: Any) -> list[Any]:
    """Return the plans of all grids to compare; raise the last error if no grid is valid."""
    from ..plan.search import candidate_grids

    model, dataset, batch = experiment.model, experiment.dataset, experiment.batch_size
    dataset.check()
    shape, plans, last_error = dataset.sample_shape, [], None
    for grid in candidate_grids(ranks, experiment.grid, batch, shape[:-1]):
        try:
            plans.append(model.plan(shape, grid, batch))
            plans += (
                [variant]
                if grid.tiles > 1 and (variant := _plan_with_cheapest_schemes(experiment, grid, machine))
                else []
            )
        except UserError as problem:
            last_error = problem
    if not plans and last_error is not None:
        raise last_error
    return plans
