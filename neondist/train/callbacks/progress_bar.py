"""Output for the user at the terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import IO, Any

from ...arrays.precision import FLOAT32
from ...data.base import SPLITS
from ...terminal.console import counted, format_duration, say
from ...terminal.progress_line import FIRST_LINE_SECONDS, LINE_INTERVAL_SECONDS, terminal_console
from ..pretrain import ReconstructionErrorMetric
from ..state import EpochRecord, TrainState
from .hook import Hook

_SPLIT_TITLES = {"train": "training"}
_METRIC_TITLES = {ReconstructionErrorMetric.name: "reconstruction error"}
_STANDARD_RECORD_FIELDS = {"seconds", "samples_per_second"} | {f"{n}_{m}" for n in SPLITS for m in ("loss", "error")}
"""Fields of a record that do not come from a requested metric."""


class ProgressBar(Hook):
    """Progress bar of the current epoch on rank 0, and one line per epoch.

    Without a terminal, progress and an estimate of the time left in the epoch are printed early and then periodically.

    Parameters
    ----------
    file : text file, optional
        Output stream. Default: stdout; without a terminal, progress is printed to stderr.
    """

    runs_during_pretraining = True

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file
        self.bar: Any = None
        self.task: Any = None
        self.speed_start_time, self.speed_start_sample = 0.0, 0
        self.next_progress_line_time = 0.0

    def before_run(self, run: TrainState) -> None:
        """Print the headline and show the bar."""
        if not run.is_first_rank:
            return
        for text in (*run.start_messages, run_headline(run)):
            self._print(run, text)
        if run.epoch >= run.epochs:
            self._print(run, f"training is complete after {counted(run.epochs, 'epoch')}; raise epochs to continue")
        elif (console := terminal_console(self.file)) is not None:
            self._open_bar(run, console)
        self.speed_start_time, self.speed_start_sample = time.perf_counter(), run.samples_seen
        self.next_progress_line_time = self.speed_start_time + FIRST_LINE_SECONDS

    def after_step(self, run: TrainState) -> None:
        """Update the bar, or print the progress line if it is due; print a line if the step was skipped."""
        if run.is_first_rank and not math.isfinite(run.loss):
            nonfinite_location = run.model.whole_model.nonfinite_monitor.nonfinite_value
            self._print(run, f"step {run.step} skipped: first non-finite value: {nonfinite_location}")
        now = time.perf_counter()
        if run.samples_seen < self.speed_start_sample:  # a worker's next task may be earlier, or of another epoch
            self.speed_start_time, self.speed_start_sample = now, run.samples_seen
        speed = (run.samples_seen - self.speed_start_sample) / max(now - self.speed_start_time, 1e-9)
        if self.bar is None and run.is_first_rank and now >= self.next_progress_line_time:
            self.next_progress_line_time = now + LINE_INTERVAL_SECONDS
            say(step_line(run, speed), sys.stderr if self.file is None else self.file)
        elif self.bar is not None:
            self.bar.update(
                self.task, completed=run.samples_seen, epoch=run.epoch + 1, step=run.step, loss=run.loss, speed=speed
            )

    def after_epoch(self, run: TrainState) -> None:
        """Print the epoch's line."""
        if run.is_first_rank:
            self._print(run, epoch_line(run.history[-1], run.epochs))
            self.speed_start_time, self.speed_start_sample = time.perf_counter(), 0

    def on_stop(self, run: TrainState) -> None:
        """Close the bar, and print where and why the run stopped."""
        self._close_bar()
        if run.is_first_rank and run.stop is not None:
            self._print(run, f"stopped at step {run.step}: {run.stop.reason}")

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """Close the bar."""
        self._close_bar()

    def after_run(self, run: TrainState) -> None:
        """Close the bar."""
        self._close_bar()

    def _open_bar(self, run: TrainState, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/" + str(run.epochs)),
            BarColumn(bar_width=None),
            TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} samples/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        samples = len(run.dataset.train)
        self.task = self.bar.add_task("", total=samples, epoch=run.epoch + 1, step=run.step, loss=math.nan, speed=0.0)
        self.bar.start()

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _print(self, run: TrainState, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, soft_wrap=True)
        else:
            say(text, self.file)


def run_headline(run: TrainState) -> str:
    """Return one line that describes the model, the ranks and the data."""
    grid = run.grid
    tiles = f"{grid.planes} x " * (grid.planes > 1) + f"{grid.rows} x {grid.cols}"
    ranks = "1 rank" if grid.size == 1 else f"{grid.size} ranks ({grid.replicas} x {tiles})"
    position_text = f", from epoch {run.epoch}" if run.epoch else ""
    position_text += f", {counted(run.samples_seen, 'sample')} into the next" if run.samples_seen else ""
    *texts, last = [f"{len(split)} {_SPLIT_TITLES.get(name, name)}" for name, split in run.dataset.splits.items()]
    samples = f"{', '.join(texts)} and {last}" if texts else last
    precision = getattr(run.model, "precision", FLOAT32)  # stages of pretraining have none
    precision_text = "" if precision == FLOAT32 else f" in {precision.name}"
    return (
        f"{run.model.display_name}{precision_text} on {ranks}: {samples} samples of"
        f" {' x '.join(map(str, run.dataset.sample_shape))}, batches of {run.batch_size}{position_text}"
    )


def is_metric(name: str, value: object) -> bool:
    """Return whether a value of a record belongs to a requested metric and is a number."""
    return name not in _STANDARD_RECORD_FIELDS and type(value) is float and not math.isnan(value)


def step_line(run: TrainState, speed: float) -> str:
    """Return the progress in the current epoch in one line, with an estimate of the time left."""
    samples = len(run.dataset.train)
    time_left = f", {format_duration((samples - run.samples_seen) / speed)} left in this epoch" if speed > 0 else ""
    return (
        f"step {run.step}: epoch {run.epoch + 1}/{run.epochs}, {run.samples_seen / samples:.0%}, loss {run.loss:.4f},"
        f" {speed:,.3g} samples/s{time_left}"
    )


def epoch_line(record: EpochRecord, epochs: int) -> str:
    """Return an epoch's numbers in one line."""
    texts = [
        f"epoch {record['epoch']}/{epochs}",
        *(_loss_text(record, name) for name in SPLITS if f"{name}_loss" in record),
        *(f"{n} error {100 * record[key]:.2f} %" for n in SPLITS if record.get(key := f"{n}_error") is not None),
        *(f"{_METRIC_TITLES.get(name, name)} {value:.3f}" for name, value in record.items() if is_metric(name, value)),
        f"{record['seconds']:.1f} s",
        f"{record['samples_per_second']:,.0f} samples/s",
        *([f"{record['bytes_sent'] / 1e6:,.1f} MB sent"] if record["bytes_sent"] else []),
    ]
    return "  ".join(texts)


def _loss_text(record: EpochRecord, split: str) -> str:
    if split == "train" and not record["samples_per_second"] and math.isnan(record["train_loss"]):
        return "train loss - (other workers trained all minibatches)"
    return f"{split} loss {record[f'{split}_loss']:.6f}"
