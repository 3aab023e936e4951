"""Validation of an experiment before ranks are started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from ..backends import memory_per_rank
from ..costs import Cost
from ..costs.mean import parts_of
from ..data import Dataset
from ..data.augment import Transform
from ..errors import ConfigError, GridError, UserError, set_error_subject
from ..geometry import GridShape, grid_shape, part_range
from ..metrics import Metric
from ..models import TrainableModel
from ..plan import Plan
from ..strategies import Strategy, StrategyBuilder
from ..system.memory import require_memory
from ..terminal.console import counted
from .callbacks.best_epoch import Best
from .callbacks.checkpoint import CheckpointSchedule
from .callbacks.loggers import MetricLogger

_BATCHES_IN_MEMORY = 3  # the current one, the next one, and the view of the first layer


class Experiment(Protocol):
    """Settings of an experiment that are validated before a run."""

    dataset: Dataset
    model: TrainableModel
    batch_size: int
    epochs: int
    dist_flag: bool
    grid: dict[str, Any]
    metrics: list[Metric]
    augment: list[Transform]
    checkpoint: CheckpointSchedule
    best: Best | None
    loggers: list[MetricLogger]
    overridden_model_fields: frozenset[str]
    server_strategy: StrategyBuilder | Strategy | None


def validate_experiment(
    experiment: Experiment, ranks: int, grid: GridShape | None = None, available_bytes: int | None = None
) -> Plan:
    """Validate an experiment on `ranks` ranks and return its plan; needs no MPI.

    Parameters
    ----------
    grid : GridShape, optional
        Default: the experiment's grid.
    available_bytes : int, optional
        Bytes available to a rank; default: those of a single rank on this machine.

    Raises
    ------
    UserError
        GridError, DataError, ShapeError or ConfigError; `subject`, if set, is the object at fault.
    """
    model, dataset = experiment.model, experiment.dataset
    with set_error_subject(experiment):
        default_shape = experiment_grid_shape(experiment, ranks)
        shape = grid or default_shape
    with set_error_subject(dataset):
        dataset.check()
    with set_model_as_error_subject(experiment):
        get_free_bytes_per_rank = memory_per_rank(model.backend)
        model.available_bytes_per_rank = get_free_bytes_per_rank(1) if available_bytes is None else available_bytes
        plan = model.plan(dataset.sample_shape, shape, experiment.batch_size)
        plan = model.fit_plan_to_memory(plan)
        if model.precision.has_16_bit_operands:
            model.array_backend()
        if not plan.is_streamed:
            _check_memory_for_layers(plan, get_free_bytes_per_rank)
    with set_error_subject(dataset):
        if not plan.is_streamed:
            _check_memory_for_batches(dataset, shape, experiment.batch_size, model.dtype.itemsize)
    with set_error_subject(model.output_error_subject):
        model.cost.check_output_shape(plan.output_shape, dataset.classes)
    for part in [part for _, part in parts_of(model.cost) if isinstance(part, Cost)]:
        with set_error_subject(part):
            part.check_cell_weights_available(plan.output_shape, dataset.fields)
    model.optimizer.check_schedule_covers(experiment.epochs)
    if model.num_pretrain_epochs:
        model.pretrain_optimizer.check_schedule_covers(model.num_pretrain_epochs)
    for transform in experiment.augment:
        with set_error_subject(transform):
            transform.check_shape(dataset.sample_shape)
    for metric in experiment.metrics:
        with set_error_subject(metric):
            metric.check_class_count(dataset.classes)
            metric.check_output_shape(plan.output_shape)
            metric.check_field_metadata(plan.output_shape, dataset.fields)
    with set_error_subject(model.output_error_subject):
        model.check_targets(plan, dataset.classes, dataset.target_shape)
    dataset.has_vector_targets = plan.has_vector_output
    for logger in experiment.loggers:
        with set_error_subject(logger):
            logger.check_package_installed()
    if experiment.best is not None:
        with set_error_subject(experiment.best):
            experiment.best.check_metric_is_recorded(experiment.metrics, dataset.fields)
            if (splits := dataset.known_splits()) is not None:
                experiment.best.check_split_exists(splits)
    if experiment.server_strategy is not None:
        _check_server_support(experiment, experiment.server_strategy, plan)
    return plan


def _check_server_support(experiment: Experiment, strategy: StrategyBuilder | Strategy, plan: Plan) -> None:
    """Raise ConfigError if the strategy, optimiser or early stopping cannot be used with parameter servers."""
    from ..services.placement import place_parameters
    from ..services.updates import check_server_optimizer

    built_strategy = strategy.build(plan.parameters.specs, 1) if isinstance(strategy, StrategyBuilder) else strategy
    with set_error_subject(experiment):
        place_parameters(built_strategy, built_strategy.servers)
    with set_error_subject(experiment.model.optimizer):
        check_server_optimizer(experiment.model.optimizer, built_strategy)
    if experiment.best is not None and experiment.best.patience is not None:
        with set_error_subject(experiment.best):
            raise ConfigError(
                "patience: workers of parameter servers do not stop early; leave it out, or use sync: true and"
                " staleness: 0 in the strategy"
            )


def _check_memory_for_batches(dataset: Dataset, shape: GridShape, batch_size: int, itemsize: int) -> None:
    """Raise DataError if a batch's tile does not fit in the memory of this machine."""
    extent, channels = dataset.sample_shape[:-1], dataset.sample_shape[-1]
    num_samples = part_range(batch_size, shape.replicas, 0)[1]
    num_elements = shape.partition(extent).box(0).size * channels  # the first tile is the largest
    needed = _BATCHES_IN_MEMORY * num_samples * num_elements * itemsize
    require_memory(needed, f"a rank's tile of {counted(num_samples, 'sample')}", "use more ranks, or smaller batches")


def _check_memory_for_layers(plan: Plan, get_free_bytes_per_rank: Callable[[int], int | None]) -> None:
    """Raise DataError if a layer's view or parameters do not fit in the memory of this machine."""
    remedy = "use more ranks, smaller batches, or fewer outputs"
    for name, needed_bytes in plan.memory_by_layer():
        require_memory(needed_bytes, f"layer '{name}'", remedy, partial(get_free_bytes_per_rank, 1))


@contextmanager
def set_model_as_error_subject(experiment: Experiment) -> Iterator[None]:
    """Set the subject of a UserError to the model, or to the experiment if that sets the field at fault."""
    try:
        with set_error_subject(experiment.model):
            yield
    except UserError as error:
        field = re.match(r"\w*", str(error))
        if error.subject is experiment.model and field is not None and field[0] in experiment.overridden_model_fields:
            error.subject = experiment
        raise


def experiment_grid_shape(experiment: Experiment, ranks: int) -> GridShape:
    """Return the grid of an experiment on `ranks` ranks; raise GridError or ConfigError if it is impossible."""
    if not experiment.dist_flag:
        if ranks > 1:
            raise GridError(
                f"dist_flag: false runs in one process, not on {ranks} ranks; use 1 rank or dist_flag: true"
            )
        return GridShape()
    strategy = experiment.server_strategy or experiment.model.strategy
    try:
        shape = grid_shape(ranks, **experiment.grid)
    except GridError as error:
        if isinstance(strategy, Strategy) and strategy.grid == experiment.grid:  # chosen by neondist plan
            raise strategy.create_error(f"{error}; or set the experiment's own grid", "grid") from None
        raise
    if experiment.batch_size < shape.replicas:
        raise ConfigError(
            f"batch_size: {experiment.batch_size} is less than the number of replicas, {shape.replicas}; give at"
            f" least {shape.replicas}, or use fewer replicas"
        )
    class_name = type(experiment.model).__name__
    if ranks > 1 and not experiment.model.distributed:
        raise ConfigError(f"model: {class_name} runs in one process, not on {ranks} ranks; use {class_name}Dist")
    return shape
