"""checkpoint_best.h5: checkpoint of the best epoch by a recorded metric, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ...data.base import SPLITS
from ...errors import ConfigError
from ...formats.fields import FieldMetadata
from ...io.output import BEST
from ...metrics import Metric
from ...registry import Registered, suggest
from ...registry.ranges import Count, NotNegative
from ...terminal.console import say
from ..state import EpochRecord, TrainState
from .checkpoint import Checkpoint
from .hook import Hook


def _to_float_or_nan(value: object) -> float:
    """Return a record's value as a float; NaN if it is not a number, or an integer too large for a float."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


class Best(Registered):
    """Selection of the best epoch, and early stopping.

    Parameters
    ----------
    number : str, optional
        Name of the metric in metrics.jsonl, such as validation_loss, test_error or validation_iou. Default: the
        validation loss, or the test loss if there is no validation split, or else the training loss.
    patience : int, optional
        Number of epochs without improvement after which the run stops. Default: never.
    min_change : float
        Minimum change of the metric that counts as an improvement, at least 0.
    """

    def __init__(
        self, number: str | None = None, *, patience: Count | None = None, min_change: NotNegative = 0.0
    ) -> None:
        self.number, self.patience, self.min_change = number, patience, float(min_change)

    def check_metric_is_recorded(self, metrics: Sequence[Metric], fields: FieldMetadata | None) -> None:
        """Raise ConfigError if records do not contain the metric; `fields`: metadata of the outputs, if known."""
        metric_names = [name for metric in metrics for name in metric.result_names(fields)]
        names = ["train_loss", "test_loss", "test_error", *metric_names]
        names += [f"validation_{name}" for name in ("loss", "error", *metric_names)]
        if self.number is not None and self.number not in names:
            raise ConfigError(f"number: '{self.number}' is not in any record{suggest(self.number, names)}")
        if any(metric.larger_is_better is None for metric in self._find_metrics(metrics)):
            raise ConfigError(
                f"number: '{self.number}' has a sign: its best value is neither the smallest nor the largest; choose"
                " another number, such as validation_loss"
            )

    def check_split_exists(self, splits: Sequence[str]) -> None:
        """Raise ConfigError if the metric belongs to a split that the data set does not have."""
        split = next((name for name in SPLITS if (self.number or "").startswith(f"{name}_")), "test")
        if self.number is not None and split not in splits:
            alternative = " (HDF5Dataset: test_share: 0.1)" if split == "test" else ""
            error = ConfigError(
                f"number: no '{self.number}', because the data set has no {split} split; set {split}: 0.1{alternative}"
                f" in the data set, or choose a metric of the {splits[-1]} split"
            )
            error.subject = self
            raise error.mark_raised_on_all_ranks()

    def find_best_epoch(self, history: Sequence[EpochRecord], metrics: Sequence[Metric]) -> int:
        """Return the number of the best epoch (the first one in a tie), or 0 if there is none."""
        name, sign = self.metric_name(history), -1.0 if self.larger_is_better(metrics) else 1.0
        best_value, best_epoch = math.inf, 0
        for record in history:
            value = _to_float_or_nan(record.get(name))
            if sign * value < best_value - (self.min_change if best_epoch else 0.0):
                best_value, best_epoch = sign * value, record["epoch"]
        return best_epoch

    def metric_name(self, history: Sequence[EpochRecord]) -> str:
        """Return the name of the metric."""
        return self.number or (f"{history[-1].selection_split}_loss" if history else "")

    def larger_is_better(self, metrics: Sequence[Metric]) -> bool:
        """Return whether larger values are better."""
        return any(metric.larger_is_better for metric in self._find_metrics(metrics))

    def _find_metrics(self, metrics: Sequence[Metric]) -> list[Metric]:
        number = (self.number or "").removeprefix("validation_")
        return [metric for metric in metrics if f"{number}_".startswith(f"{metric.name}_")]  # also 'rmse_t2m'

    def early_stop_reason(self, history: Sequence[EpochRecord], metrics: Sequence[Metric]) -> str:
        """Return the reason for stopping a run with these records; '' to continue."""
        if self.patience is None or not history:
            return ""
        best, last = self.find_best_epoch(history, metrics), history[-1]["epoch"]
        if last - best < self.patience:
            return ""
        return f"{self.metric_name(history)} has not improved since epoch {best}: the run ends after epoch {last}"


class BestCheckpointAndEarlyStopping(Hook):
    """Write a checkpoint of each epoch that is the best so far, and stop a run that no longer improves.

    Parameters
    ----------
    best : Best
    metrics : sequence of Metric
        Metrics of the records.
    folder : path, optional
        Folder of the run. Default: nothing is written.
    yaml_text : str, optional
        Text of experiment.yaml, stored in the checkpoint.
    """

    def __init__(
        self, best: Best, metrics: Sequence[Metric], folder: Path | None = None, yaml_text: str | None = None
    ) -> None:
        self.best, self.metrics = best, metrics
        self.checkpoint = None if folder is None else Checkpoint(folder / BEST, yaml_text=yaml_text)

    def end_if_already_stopped_early(self, run: TrainState) -> None:
        """End a resumed run that had already stopped early."""
        self.best.check_split_exists(list(run.dataset.splits))
        if reason := self.best.early_stop_reason(run.history, self.metrics):
            run.epochs = run.epoch
            run.start_messages.append(f"{reason}; raise the patience of best to continue training")

    def after_epoch(self, run: TrainState) -> None:
        """Write a checkpoint if the epoch is the best so far; stop a run that no longer improves.

        Raises ConfigError on all ranks if the metric is not a single number, which is known once it is recorded.
        """
        name, record = self.best.metric_name(run.history), run.history[-1]
        if isinstance(record.get(name, []), list):
            error = ConfigError(
                f"number: '{name}' is not a single number, but one per class or variable; choose another, such as"
                f" {record.selection_split}_loss"
            )
            error.subject = self.best
            raise error.mark_raised_on_all_ranks()
        if self.checkpoint is not None and self.best.find_best_epoch(run.history, self.metrics) == run.epoch:
            self.checkpoint.save(run, from_servers=False)  # the values that were evaluated
        if reason := self.best.early_stop_reason(run.history, self.metrics):
            run.epochs = run.epoch
            if run.is_first_rank:
                say(reason)
