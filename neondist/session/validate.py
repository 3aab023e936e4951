"""What can be wrong with an experiment, found before a rank is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..backends import get_backend
from ..errors import ConfigError, GridError, UserError
from ..geometry import GridShape, grid_shape
from ..registry import Distributed

if TYPE_CHECKING:
    from ..models.plan import LayerPlan
    from .experiment import FitExperiment


def validate(experiment: FitExperiment, ranks: int) -> tuple[GridShape, list[LayerPlan]]:
    """Return the grid and the layers' plan of an experiment on `ranks` ranks; needs no MPI.

    Raises
    ------
    UserError
        GridError, DataError, ShapeError or ConfigError; `subject`, where there is one, is the object it is about.
    """
    model, dataset = experiment.model, experiment.dataset
    with about(experiment):
        shape = grid_shape_of(experiment, ranks)
    with about(dataset):
        dataset.check()
    with about(model):
        plan = model.plan(dataset.sample_shape, shape, experiment.batch_size)
        get_backend(model.backend)
    with about(model.layers[-1] if model.layers else model):
        model.cost.check(plan[-1].output_shape, dataset.classes)
    for metric in experiment.metrics:
        with about(metric):
            metric.check(dataset.classes)
    return shape, plan


@contextmanager
def about(subject: Any) -> Iterator[None]:
    """Mark a UserError of the block as being about `subject`, unless it says already what it is about."""
    try:
        yield
    except UserError as error:
        if getattr(error, "subject", None) is None:
            error.subject = subject
        raise


def grid_shape_of(experiment: FitExperiment, ranks: int) -> GridShape:
    """Return the grid of an experiment on `ranks` ranks; GridError or ConfigError if there is none."""
    if not experiment.dist_flag:
        if ranks > 1:
            raise GridError(
                f"dist_flag: false runs in one process, not on {ranks} ranks; use 1 rank or dist_flag: true"
            )
        return GridShape()
    shape = grid_shape(ranks, **experiment.grid)
    if experiment.batch_size < shape.replicas:
        raise ConfigError(
            f"batch_size: {experiment.batch_size} samples are fewer than the {shape.replicas} replicas;"
            f" give at least {shape.replicas} or use fewer replicas"
        )
    name = type(experiment.model).__name__
    if ranks > 1 and not isinstance(experiment.model, Distributed):
        raise ConfigError(f"model: {name} runs in one process, not on {ranks} ranks; use {name}Dist")
    return shape
