"""An experiment: a model, a data set and how to train the one on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..comm import ProcessGrid
from ..data import Dataset
from ..errors import ConfigError
from ..metrics import Metric, Misclassification
from ..models import Model
from ..registry import Registered, suggest
from ..registry.arguments import checked
from ..registry.ranges import Count, Index
from .callbacks.checkpoint import CheckpointSchedule
from .callbacks.hook import Hook, opened
from .callbacks.progress import ProgressBar
from .session import RunResult, train
from .validate import validate


class FitExperiment(Registered):
    """Train a model on a data set and judge it after every epoch.

    Parameters
    ----------
    dataset : Dataset
    model : Model
    batch_size : int
        Samples per update, over all replicas.
    epochs : int
    dist_flag : bool
        True: the image is cut over the ranks. False: the serial classes, in one process.
    grid : mapping, optional
        replicas, rows, cols, planes; what is not given follows from the number of ranks.
    backend, dtype, seed : optional
        Instead of the model's own.
    metrics : sequence of Metric, optional
        Measured beside the misclassification.
    checkpoint : mapping, optional
        every_steps, every_epochs, every_minutes: when checkpoints are written, default every epoch, and one at the end
        in any case; keep: how many stay, default 1.
    nonfinite : {'stop', 'skip'}
        What happens where a loss or gradient is not finite: an error that names the layer and the step, or the step
        changes nothing.
    accumulate, sync, recompute, strips : optional
        How a step is executed, as in Model; instead of the model's own.

    Raises
    ------
    ConfigError
        A field has the wrong type or is out of range.

    Examples
    --------
    >>> nd.FitExperiment(nd.MNIST(), model, epochs=3).run(output="runs/first")  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Dataset,
        model: Model,
        *,
        batch_size: Count = 128,
        epochs: Count = 1,
        dist_flag: bool = True,
        grid: Mapping[str, Count | None] | None = None,
        backend: str | None = None,
        dtype: Literal["float32", "float64"] | None = None,
        seed: Index | None = None,
        metrics: Sequence[Metric] | None = None,
        checkpoint: Mapping[str, float | int | None] | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        accumulate: Count | None = None,
        sync: Literal["allreduce", "bucketed"] | None = None,
        recompute: bool | None = None,
        strips: Count | Literal["auto"] | None = None,
    ) -> None:
        self.dataset, self.model = dataset, model
        self.batch_size, self.epochs, self.dist_flag = int(batch_size), int(epochs), bool(dist_flag)
        self.grid = grid_factors(grid)
        self.metrics = all_metrics(metrics)
        self.checkpoint = CheckpointSchedule.of(checkpoint)
        settle(model, backend, dtype, seed)
        model.execute(accumulate, sync, recompute, strips)
        model.nonfinite = nonfinite

    @checked
    def validate(self, ranks: int = 1) -> None:
        """Find everything that can be wrong before a rank is started; needs no MPI.

        Raises
        ------
        UserError
            GridError, DataError, ShapeError or ConfigError; `subject`, where there is one, is the object it is about.
        """
        validate(self, ranks)

    def open_grid(self, comm: Any = None) -> ProcessGrid:
        """Return the grid that the experiment asks for, over all ranks of `comm` (default all; collective)."""
        return ProcessGrid(comm, **self.grid) if self.dist_flag else ProcessGrid.serial()

    @checked
    def run(
        self,
        grid: ProcessGrid | None = None,
        output: str | Path | None = None,
        resume: bool | str = False,
        init_from: str | Path | None = None,
        resolved: str | None = None,
        hooks: Iterable[Hook] | None = None,
        overwrite: bool = False,
    ) -> RunResult:
        """Train; collective, every rank gets the same result.

        Parameters
        ----------
        grid : ProcessGrid, optional
            Default `open_grid()`.
        output : path, optional
            Folder for experiment.yaml, environment.json, metrics.jsonl, ledger.jsonl, checkpoint.h5, curves.png and
            tiles.png, which no other run may write to meanwhile. Default: nothing is written.
        resume : bool or 'auto'
            Continue from checkpoint.h5 in `output`, which any number of ranks may have written; 'auto': or begin, where
            there is no run yet.
        init_from : path, optional
            A checkpoint whose weights (and running statistics) are the first ones, for arrays of the same name and
            shape; a note says what was missing and left over.
        resolved : str, optional
            Text of experiment.yaml.
        hooks : iterable of Hook, optional
            Called beside those that write the files; default a ProgressBar.
        overwrite : bool
            The files of an earlier run in `output` are replaced; without it, that is an error.

        Raises
        ------
        UserError
            As `validate`; OutputError if nothing can be written to `output`; ConfigError if an earlier run would be
            lost; DataError if there is nothing to resume.
        """
        if resume and output is None:
            raise ConfigError("resume: needs the folder of the run to continue; give output")
        if resume not in (False, True, "auto"):
            raise ConfigError(f"resume: {resume!r} cannot be used; give True, False or 'auto'")
        if resume and overwrite:
            raise ConfigError("overwrite: a run cannot be both resumed and replaced; leave out --resume or --overwrite")
        if resume is True and init_from is not None:
            raise ConfigError("init_from: a run that is resumed has its weights; leave out --resume or --init-from")
        grid = self.open_grid() if grid is None else grid
        folder = None if output is None else Path(output)
        hooks = [ProgressBar()] if hooks is None else list(hooks)
        with opened(hooks):
            return train(self, grid, folder, resume, overwrite, init_from, resolved, hooks)


GRID_KEYS = ("replicas", "rows", "cols", "planes")


def grid_factors(grid: Mapping[str, int | None] | None) -> dict[str, int]:
    """Return the factors of the grid that are given; ConfigError if a name or a number is wrong."""
    for key in grid or {}:
        if key not in GRID_KEYS:
            raise ConfigError(f"grid: unknown key '{key}'{suggest(str(key), GRID_KEYS)}")
    return {key: int(value) for key, value in (grid or {}).items() if value is not None}


def all_metrics(metrics: Sequence[Metric] | None) -> list[Metric]:
    """Return the misclassification and the metrics that are asked for beside it."""
    return list({metric.name: metric for metric in (Misclassification(), *(metrics or ()))}.values())


def settle(model: Model, backend: str | None, dtype: str | None, seed: int | None) -> None:
    """Give the model what the experiment says in its place."""
    if backend is not None:
        model.backend = backend
    if dtype is not None:
        model.dtype = np.dtype(dtype)
    if seed is not None:
        model.seed = int(seed)
