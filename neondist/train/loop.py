"""Training loop, and evaluation of cost and metrics over a split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from ..arrays.namespace import to_host
from ..comm import all_or_none
from ..costs.mean import local_weighted_denominators, mean_cost, parts_of, weighted_mean_parts
from ..data import Dataset, Split
from ..errors import ConfigError, NonFiniteError
from ..metrics import Metric, Misclassification, OutputLayout
from ..models import Model, Trainable, TrainableModel
from ..registry.arguments import type_checked
from .callbacks.hook import Hook, call_error_hooks, open_hooks
from .state import EpochRecord, EpochTotals, Stop, TrainState, nonfinite_to_none

_STOPPED_WHILE_WAITING = Stop("requested while waiting for a task; --resume continues from here")


@type_checked
def fit(
    model: Model,
    dataset: Dataset,
    epochs: int = 1,
    batch_size: int = 128,
    hooks: Iterable[Hook] = (),
    metrics: Sequence[Metric] | None = None,
    seed: int | None = None,
    epoch: int = 0,
    history: Iterable[EpochRecord] = (),
) -> list[EpochRecord]:
    """Train a model and return one record per epoch, the same on every rank. Collective.

    Parameters
    ----------
    model : Model
        A model built for the grid on which the data set was opened.
    dataset : Dataset
        An opened data set.
    epochs : int
        Train until this many epochs are complete.
    batch_size : int
        Samples per update, over all replicas; an epoch's last batch may be smaller.
    hooks : iterable of Hook
    metrics : sequence of Metric, optional
        Metrics to evaluate on the validation and test splits after every epoch. Default: the misclassification rate,
        recorded as 'validation_error' and 'test_error', which are None if the targets are not classes.
    seed : int, optional
        Seed of the order of samples. Default: the model's seed.
    epoch, history
        Number of completed epochs, and their records, to continue an earlier run.

    Raises
    ------
    ConfigError
        If the model is not built, or the ranks have different arguments.
    NonFiniteError
        If a loss or gradient is not finite, unless the model's `nonfinite` permits skipping the step.
    """
    run = TrainState(model, dataset, epochs, batch_size, epoch, history=[EpochRecord(record) for record in history])
    hooks = list(hooks)
    if getattr(model, "grid", None) is None:
        raise ConfigError(f"{type(model).__name__} is not built yet; call model.build(input_shape, batch_size) first")
    metric_names = None if metrics is None else [metric.name for metric in metrics]
    settings = {"epochs": epochs, "batch_size": batch_size, "epoch": epoch, "seed": seed, "metrics": metric_names}
    model.grid.check("fit", settings)
    with open_hooks(hooks):
        train_loop(run, hooks, metrics, seed)
    return run.history


def train_loop(
    run: TrainState, hooks: Iterable[Hook] = (), metrics: Sequence[Metric] | None = None, seed: int | None = None
) -> None:
    """Train from the state of `run` to the end, or until a hook sets `run.stop`. Collective."""
    hooks = list(hooks)
    metrics = [Misclassification()] if metrics is None else metrics
    model = run.model
    try:
        if isinstance(model.whole_model, TrainableModel):  # user-defined trainables may have no cost to restrict
            with all_or_none(model.grid.world):
                model.whole_model.restrict_cost_to_local_cells(run.dataset.train.fields)
        _call_hooks(hooks, lambda hook: hook.before_run(run))
        _start_at_epoch_of_first_task(run)
        while run.stop is None and run.epoch < run.epochs:  # a hook may lower `run.epochs` to stop early
            _train_epoch(run, hooks, model.seed if seed is None else seed)
            if run.stop is None:
                with model.whole_model.use_averaged_weights():
                    record = evaluate_validation_and_test(run, metrics)
                record_epoch_and_reset_totals(run, record)
                _call_hooks(hooks, lambda hook: hook.after_epoch(run))
        model.whole_model.wait_for_messages()
        _call_hooks(hooks, lambda hook: hook.after_run(run) if run.stop is None else hook.on_stop(run))
    except BaseException as error:
        call_error_hooks(hooks, run, error)
        raise


def _start_at_epoch_of_first_task(run: TrainState) -> None:
    """If this worker joined late, start it at the epoch of its first task. Collective.

    The first worker starts at the first epoch, since it writes the records of all epochs.
    """
    master = run.master_client
    if master is None or master.is_first_worker or run.stop is not None or run.epoch >= run.epochs:
        return
    epoch = master.epoch_of_next_task(run.has_stop_request)
    if master.wait_interrupted:
        run.stop = _STOPPED_WHILE_WAITING
    elif epoch is None:
        run.stop = Stop("all tasks are done", exit_code=0)
    elif epoch > run.epoch:
        run.epoch, run.samples_seen, run.totals = epoch, 0, EpochTotals()


def _train_epoch(run: TrainState, hooks: list[Hook], seed: int) -> None:
    """Train the rest of the epoch, or until a hook sets `run.stop`."""
    model, split, master = run.model, run.dataset.train, run.master_client
    model.begin_epoch(run.epoch, run.samples_seen)
    losses = selection_losses(run)
    remote = model.whole_model.remote_update
    if remote is not None:
        remote.pull_values()  # includes updates by other workers since the last step, such as during an evaluation
    totals, start_time = run.totals, time.perf_counter() - run.totals.seconds
    sent_offset = model.whole_model.bytes_sent - totals.bytes_sent
    summed_offset = model.whole_model.bytes_summed - totals.bytes_summed
    for split.epoch, batches in _epoch_minibatches(run, seed):
        own_batches = (batch[slice(*model.grid.sample_range(len(batch)))] for _, _, batch in batches)
        last_batch: list[np.ndarray] = []
        locator, reader = _locate_nonfinite_samples(model, split, last_batch), _read_batches(model, split, own_batches)
        with locator, closing(reader):
            for first, upto, batch in batches:
                if run.stop is not None:
                    return
                set_scheduled_rate_and_momentum(run, split.epoch + first / run.epoch_size, losses)
                if master is not None:
                    master.begin_minibatch(first, upto, len(batch))
                # no variable refers to the images, so their memory is free while the next batch is read
                last_batch[:] = [batch]
                run.loss = float(model.train_batch(*next(reader), batch_size=len(batch)))
                is_credited = master is None or master.finish_minibatch(run.loss)
                if is_credited:
                    seen = max(run.samples_seen, upto) if split.epoch == run.epoch else run.samples_seen
                    totals.samples_of_other_workers += seen - run.samples_seen - len(batch)  # 0 without other workers
                    run.samples_seen = seen
                    if math.isfinite(run.loss):
                        totals.loss += run.loss * len(batch)
                    else:
                        totals.skipped_samples += len(batch)
                totals.seconds = time.perf_counter() - start_time
                totals.bytes_sent = model.whole_model.bytes_sent - sent_offset
                totals.bytes_summed = model.whole_model.bytes_summed - summed_offset
                _call_hooks(hooks, lambda hook: hook.after_step(run))
                if not is_credited:
                    break
    if master is not None and master.wait_interrupted:
        run.stop = _STOPPED_WHILE_WAITING
    if master is not None and run.stop is not None:
        return
    totals.samples_of_other_workers += len(split) - run.samples_seen
    run.samples_seen = len(split)
    if remote is not None:  # the values to evaluate
        if run.epoch + 1 < run.epochs:
            remote.pull_values()
        else:
            remote.pull_final_values()


@contextmanager
def _locate_nonfinite_samples(model: Trainable, split: Split, last_batch: list[np.ndarray]) -> Iterator[None]:
    """Name the sample of the last batch with non-finite or the largest values in a NonFiniteError. Collective."""
    try:
        yield
    except NonFiniteError as error:
        if error.raised_on_all_ranks and last_batch:
            (batch,) = last_batch
            sample_numbers = batch[slice(*model.grid.sample_range(len(batch)))].tolist()
            own = [finding for number in sample_numbers for finding in _largest_magnitudes(split, number, model.dtype)]
            largest, location = max(chain(*model.grid.world.allgather(own)), key=itemgetter(0))
            finding = (
                f"largest in this batch: {largest:.3g}, {location}"
                if math.isfinite(largest)
                else f"{location} is not finite"
            )
            error.args = (f"{error} ({finding})",)
        raise


def _largest_magnitudes(split: Split, sample_number: int, dtype: np.dtype) -> list[tuple[float, str]]:
    """Return the largest magnitudes of a sample's inputs and targets, infinite for NaN, with their locations."""
    indices = np.array([sample_number])
    arrays = {"input": split.images(indices, dtype), "target": split.targets(indices)}
    return [
        (
            float(np.nan_to_num(np.abs(array).max(initial=0), nan=math.inf, posinf=math.inf)),
            f"{name} of {split.describe_sample(sample_number)}",
        )
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    ]


def _epoch_minibatches(run: TrainState, seed: int) -> Iterator[tuple[int, list[tuple[int, int, np.ndarray]]]]:
    """Yield an epoch and its consecutive minibatches: first position, end position and sample numbers of each."""
    if run.master_client is not None:
        for task in run.master_client.tasks_through_epoch(run.epoch, run.has_stop_request):
            if run.master_client.has_waited and (remote := run.model.whole_model.remote_update) is not None:
                remote.pull_values()  # servers may have been restored, and other workers have continued
            yield task.epoch, list(task.minibatches(run.batch_size))
            if run.stop is not None:
                return
        return
    order, size = run.dataset.train.order(seed, run.epoch), run.batch_size
    starts = range(run.samples_seen, len(order), size)
    yield run.epoch, [(first, min(first + size, len(order)), order[first : first + size]) for first in starts]


def selection_losses(run: TrainState) -> list[float | None]:
    """Return the losses of the selection split after each epoch."""
    return [record.selection_value("loss") for record in run.history[len(run.history) - run.epoch :]]


def set_scheduled_rate_and_momentum(run: TrainState, epoch: float, epoch_losses: Sequence[float | None]) -> None:
    """Set the model's learning rate and momentum for a position in the data, in epochs."""
    model = run.model
    model.learning_rate_scale = model.optimizer.rate_factor_at(epoch, epoch_losses)
    model.scheduled_momentum = model.optimizer.momentum_at(epoch)


def _read_batches(model: Trainable, split: Split, batches: Iterable[np.ndarray]) -> Generator[tuple[Any, np.ndarray]]:
    """Yield images and targets; a streaming model reads its images strip by strip."""
    options = {"lazy": True} if getattr(model, "is_streamed", False) else {}  # missing in user-defined trainables
    return split.batches(batches, model.dtype, **options)


def evaluate_validation_and_test(run: TrainState, metrics: Sequence[Metric]) -> EpochRecord:
    """Return a record of the losses and metrics of the validation and the test split. Collective."""
    record = EpochRecord()
    for name, split in run.dataset.splits.items():
        if name != "train":
            results = evaluate(run.model, split, run.batch_size, metrics)
            loss, error = results.pop("loss"), results.pop(Misclassification.name, math.nan)
            record |= {f"{name}_loss": loss, f"{name}_error": nonfinite_to_none(error)}
            record |= {metric if name == "test" else f"{name}_{metric}": value for metric, value in results.items()}
    return record


def record_epoch_and_reset_totals(run: TrainState, evaluation: EpochRecord) -> None:
    """Count the epoch, append its record, including the results of `evaluation`, and reset the totals."""
    totals, trained_samples = run.totals, run.samples_seen - run.totals.samples_of_other_workers
    loss_samples = trained_samples - totals.skipped_samples
    sent, summed = totals.sent_and_summed_bytes_of_all_ranks(run.grid)
    scaler, scale_fields = run.model.whole_model.loss_scaler, {}
    if scaler is not None:
        scale_fields = {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped_steps}
        scaler.reset_skipped_steps()
    run.epoch, run.samples_seen, run.totals = run.epoch + 1, 0, EpochTotals()
    run.history.append(
        EpochRecord(
            epoch=run.epoch,
            step=run.step,
            train_loss=totals.loss / loss_samples if loss_samples > 0 else math.nan,
            **evaluation,
            seconds=totals.seconds,
            samples_per_second=trained_samples / max(totals.seconds, 1e-9),
            bytes_sent=sent,
            bytes_summed=summed,
            **scale_fields,
        )
    )


def _call_hooks(hooks: list[Hook], call: Callable[[Hook], None]) -> None:
    for hook in hooks:
        call(hook)


def evaluate(model: Trainable, split: Split, batch_size: int, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """Return the mean cost ('loss') and every metric, by its name, over all samples of `split`. Collective.

    Parameters
    ----------
    model : Trainable
        A built model, evaluated in inference mode (no dropout, running statistics).
    split : Split
        A split of an opened data set, with this rank's tiles.
    batch_size : int
        Samples per pass, over all replicas; fewer, if the model accumulates micro-batches.
    metrics : sequence of Metric

    Returns
    -------
    dict
        Values by name, equal on every rank; NaN if all cells are ignored.
    """
    costs, weights = np.zeros(len(parts_of(model.cost))), np.zeros(len(weighted_mean_parts(model.cost)))
    meters = [metric.create_meter(_output_layout(model, split)) for metric in metrics]
    ignore_index = getattr(model.cost, "ignore_index", None)
    for _, y, targets, cost in evaluate_batches(model, split, batch_size):
        costs += cost
        if weights.size:  # outputs of a user's model may have no shape
            weights += local_weighted_denominators(model.cost, y.shape, targets)
        cells = drop_ignored_cells(y, targets, ignore_index)
        for meter in meters:
            meter.add(to_host(cells[0]) if meter.metric.needs_numpy else cells[0], cells[1])
    sums = model.output.sum_over_ranks(np.concatenate([costs, weights]), replicas=True)
    loss = mean_cost(model.cost, sums[: len(costs)], sums[len(costs) :], len(split), model.output_shape)
    results: dict[str, Any] = {"loss": loss}
    for meter in meters:
        results |= meter.result()
    return results


def evaluate_batches(model: Trainable, split: Split, batch_size: int) -> Iterator[tuple[np.ndarray, Any, Any, Any]]:
    """Yield sample numbers, this rank's outputs and targets, and this rank's part of the cost, for all batches."""
    batch_size = max(model.grid.replicas, -(-batch_size // model.accumulate))
    counts = [min(batch_size, len(split) - start) for start in range(0, len(split), batch_size)]
    own_numbers = [at * batch_size + np.arange(*model.grid.sample_range(count)) for at, count in enumerate(counts)]
    with closing(_read_batches(model, split, own_numbers)) as reader:
        for sample_numbers, count in zip(own_numbers, counts, strict=True):
            yield sample_numbers, *model.evaluate_batch(*next(reader), count)


def _output_layout(model: Trainable, split: Split) -> OutputLayout:
    output = model.output
    owns_outputs, fields = getattr(output, "owns", True), getattr(split, "fields", None)
    return OutputLayout(model.grid, model.output_shape, output.sum_over_ranks, owns_outputs, fields)


def drop_ignored_cells(y: Any, targets: Any, ignore_index: int | None) -> tuple[Any, Any]:
    """Return outputs and labels without the cells whose label is `ignore_index`."""
    if ignore_index is None or targets.shape != y.shape[:-1] or targets.dtype.kind not in "iu":
        return y, targets
    valid_mask = targets != ignore_index
    return (y, targets) if valid_mask.all() else (to_host(y)[valid_mask], targets[valid_mask])
