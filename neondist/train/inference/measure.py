"""The cost and the metrics of a checkpoint's network over files: images of any size, and their labels."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...costs.mean import mean_of, parts_of, weighted, weights_of
from ...errors import ConfigError, DataError
from ...metrics import Metric
from ..experiment import FitExperiment
from ..loop import counted
from ..state import told_of
from .images import Images, open_images
from .network import network
from .predict import through
from .routes import Route


def evaluate_files(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    labels: str | Path,
    grid: ProcessGrid | None = None,
    block: int | None = None,
) -> dict[str, Any]:
    """Return the cost and the metrics of a checkpoint's network over images and labels in files; collective.

    As `predict`, images may be of any size, and go whole or in blocks.

    Parameters
    ----------
    experiment, checkpoint, source, grid, block : as in `predict`
        Of the experiment's metrics those that add up over cells are measured.
    labels : path
        What `nd.open_source` reads: classes of the outputs' extent, whole numbers, or targets of the outputs' shape.

    Returns
    -------
    dict
        'samples', 'loss', 'error' (the misclassification) and the metrics by their names, equal on every rank; None
        where something does not suit the targets.

    Raises
    ------
    UserError
        As `predict`; ConfigError for a cost or a metric that needs whole samples.
    """
    grid = experiment.open_grid() if grid is None else grid
    with network(experiment, checkpoint, source, grid, block, None) as (route, images, _):
        with all_or_none(grid.world):
            targets = _targets(labels, route, images)
            sums = _Sums(experiment, route, targets)
        with closing(targets):
            through(route, range(route.parts), grid, sums)
        found = sums.result(grid, images.shape[0])
    return told_of(images.shape[0], found)


def _targets(labels: str | Path, route: Route, images: Images) -> Images:
    *extent, channels = route.output_shape
    try:
        found = open_images(labels, (*extent, 1))
    except DataError:
        found = open_images(labels, (*extent, channels))
    if found.shape[:-1] != (images.shape[0], *extent):
        found.close()
        raise DataError(
            f"{labels}: has labels for {list(found.shape[:-1])}; the outputs are {[images.shape[0], *extent]}"
        )
    return found


class _Sums:
    """Adds up what the cost and the metrics say of each part."""

    def __init__(self, experiment: FitExperiment, route: Route, targets: Images) -> None:
        self.cost, self.metrics, self.route, self.targets = experiment.model.cost, experiment.metrics, route, targets
        for metric in self.metrics:
            if type(metric).meter is not Metric.meter:
                raise ConfigError(f"metrics: {metric.name} needs whole samples; leave it out to measure over files")
        if any(part.sums_for(route.output_shape) for _, part in parts_of(self.cost)):
            raise ConfigError(
                f"cost: {type(self.cost).__name__} needs whole samples, and cannot be measured over files"
            )
        # of no samples, so that every rank has all sums
        empty = np.zeros((0, *route.output_shape), route.dtype), self._as_targets(np.zeros((0, *targets.shape[1:])))
        self.sums = self._of(*empty)

    def write(self, part: int, y: np.ndarray | None) -> None:
        """Add a part."""
        if y is not None:
            samples, box = self.route.place(part)
            found = self._of(y, self._as_targets(self.targets.raw(samples, box.slices)))
            self.sums = [before + more for before, more in zip(self.sums, found, strict=True)]

    def done(self, part: int) -> None:
        """Take note of nothing: there is no journal."""

    def result(self, grid: ProcessGrid, samples: int) -> dict[str, Any]:
        """Return the means, given what all ranks have added up; collective."""
        flat = np.concatenate([each.ravel() for each in self.sums])
        grid.world.allreduce(flat)
        ends = np.cumsum([each.size for each in self.sums])[:-1]
        costs, weights, *others = np.split(flat, ends)
        found: dict[str, Any] = {"loss": mean_of(self.cost, costs, weights, samples, self.route.output_shape)}
        for metric, total, mine in zip(self.metrics, others, self.sums[2:], strict=True):
            found |= metric.result(total.reshape(mine.shape))
        return found

    def _of(self, y: np.ndarray, targets: np.ndarray) -> list[np.ndarray]:
        costs = [float(part.value(y, targets)) for _, part in parts_of(self.cost)]
        weights = weights_of(self.cost, y.shape, targets) if weighted(self.cost) else []
        ignored = getattr(self.cost, "ignore_index", None)
        judged = counted(y, targets, ignored)
        measured = [np.asarray(metric.measure(*judged), "f8") for metric in self.metrics]
        return [np.array(costs), np.array(weights, "f8"), *measured]

    def _as_targets(self, raw: np.ndarray) -> np.ndarray:
        """Return classes (n, *cells), or numbers to be met (n, *cells, C)."""
        if self.targets.source.dtype.kind in "iub" and raw.shape[-1] == 1:
            return raw[..., 0].astype(np.int64)
        return raw
