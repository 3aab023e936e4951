"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..metrics import Metric, Misclassification
from .evaluate import evaluate
from .hooks import Hook
from .run import Record, Run

if TYPE_CHECKING:
    from ..datasets import Dataset
    from ..models import Model


def fit(
    model: Model,
    dataset: Dataset,
    epochs: int = 1,
    batch_size: int = 128,
    hooks: Iterable[Hook] = (),
    metrics: Sequence[Metric] | None = None,
    seed: int | None = None,
    epoch: int = 0,
    history: Iterable[Record] = (),
) -> list[Record]:
    """Train a model and return one record per epoch; collective, every rank gets the same records.

    Parameters
    ----------
    model : Model
        Built for the grid that the data set was opened on.
    dataset : Dataset
        Opened.
    epochs : int
        Train until this many epochs are complete.
    batch_size : int
        Samples per update, over all replicas; an epoch's last batch may be smaller.
    hooks : iterable of Hook
    metrics : sequence of Metric, optional
        Measured on the test split after every epoch; 'valid_error' is the misclassification. Default: that alone.
    seed : int, optional
        Seed of the order of the samples, default the model's.
    epoch, history
        What is complete already, to continue an earlier run.
    """
    run = Run(model, dataset, epochs, batch_size, epoch, history=list(history))
    hooks = list(hooks)
    metrics = [Misclassification()] if metrics is None else metrics
    try:
        _call(hooks, lambda hook: hook.before_run(run))
        while run.epoch < run.epochs:  # a hook may lower it to stop early
            trained = _train_epoch(run, hooks, model.seed if seed is None else seed)
            run.history.append(_record(run, trained, evaluate(model, dataset.test, batch_size, metrics)))
            _call(hooks, lambda hook: hook.after_epoch(run))
        _call(hooks, lambda hook: hook.after_run(run))
    except BaseException as error:
        for hook in hooks:
            with contextlib.suppress(Exception):  # the first error is the one to read
                hook.on_error(run, error)
        raise
    return run.history


def order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's samples (int, shape (samples,)), the same on every rank."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def _train_epoch(run: Run, hooks: list[Hook], seed: int) -> Record:
    """Train one epoch; return its loss, its duration and the bytes that all ranks sent."""
    model, split = run.model, run.dataset.train
    samples = order(len(split), seed, run.epoch)
    start, sent, total, run.seen = time.perf_counter(), model.bytes_sent, 0.0, 0
    for first in range(0, len(split), run.batch_size):
        batch = samples[first : first + run.batch_size]
        lo, hi = model.grid.sample_range(len(batch))
        x, targets = split.images(batch[lo:hi], model.dtype), split.targets(batch)
        model.learning_rate_scale = model.optimizer.scale(run.epoch + first / len(split))
        run.loss = float(model.train_batch(x, targets, batch_size=len(batch)))
        total += run.loss * len(batch)
        run.seen += len(batch)
        _call(hooks, lambda hook: hook.after_step(run))
    run.epoch += 1
    seconds = time.perf_counter() - start
    return {
        "train_loss": total / max(run.seen, 1),
        "seconds": seconds,
        "samples_per_second": run.seen / seconds,
        "bytes_sent": sum(model.grid.world.allgather(model.bytes_sent - sent)),
    }


def _record(run: Run, trained: Record, valid: dict[str, float]) -> Record:
    loss, error = valid.pop("loss"), valid.pop(Misclassification.name, None)
    return {
        "epoch": run.epoch,
        "step": run.step,
        "train_loss": trained.pop("train_loss"),
        "valid_loss": loss,
        "valid_error": error,
        **trained,
        **valid,
    }


def _call(hooks: list[Hook], call: Callable[[Hook], None]) -> None:
    for hook in hooks:
        call(hook)
