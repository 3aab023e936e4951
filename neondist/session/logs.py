"""Step logs and summaries of a session."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from ..comm import all_or_none
from ..io.files import append_text, write_text
from ..terminal.console import say
from ..train import EpochRecord, Hook, TrainState
from ..train.callbacks.loggers import MetricLogger
from ..train.callbacks.metrics_log import record_json_line
from ..train.html_report import read_epoch_records

SUMMARIES_FILE = "summaries.jsonl"


class StepLog(Hook):
    """Print step, loss and steps per second on rank 0, every `every_steps` steps."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps, self.last_step, self.last_time = every_steps, 0, 0.0

    def before_run(self, run: TrainState) -> None:
        """Start counting steps and time."""
        self.last_step, self.last_time = run.step, time.perf_counter()

    def after_step(self, run: TrainState) -> None:
        """Print the line if it is due."""
        if run.is_first_rank and run.step - self.last_step >= self.every_steps:
            now = time.perf_counter()
            speed = (run.step - self.last_step) / max(now - self.last_time, 1e-9)
            loss = f"loss {run.loss:.6f}, " if math.isfinite(run.loss) else ""
            say(f"step {run.step}: {loss}{speed:,.1f} steps/s")
            self.last_step, self.last_time = run.step, now


class SummaryLog(Hook):
    """Write the mean loss and the speed since the last summary to summaries.jsonl and loggers, on rank 0.

    Parameters
    ----------
    every_steps, every_seconds : optional
        Intervals between summaries; the first to elapse applies.
    loggers : sequence of MetricLogger
        Loggers that plot by step.
    """

    def __init__(
        self,
        folder: Path | None,
        every_steps: int | None,
        every_seconds: float | None,
        loggers: Sequence[MetricLogger] = (),
    ) -> None:
        self.path = None if folder is None else folder / SUMMARIES_FILE
        self.every_steps, self.every_seconds, self.loggers = every_steps, every_seconds, loggers
        self._start_interval(0)

    def _start_interval(self, step: int) -> None:
        self.last_step, self.last_time, self.losses = step, time.perf_counter(), list[float]()

    def before_run(self, run: TrainState) -> None:
        """Discard the summaries after the step from which the session resumes."""
        with all_or_none(run.grid.world):
            if run.is_first_rank and self.path is not None:
                kept_records = [
                    record
                    for record in read_epoch_records(self.path, tolerate_incomplete_end=True)
                    if record.get("step", 0) <= run.step
                ]
                write_text(self.path, "".join(map(record_json_line, kept_records)))
        self._start_interval(run.step)

    def after_step(self, run: TrainState) -> None:
        """Write a summary if one is due."""
        if not run.is_first_rank:
            return
        if math.isfinite(run.loss):
            self.losses.append(run.loss)
        steps, seconds = run.step - self.last_step, time.perf_counter() - self.last_time
        is_due = self.every_steps is not None and steps >= self.every_steps
        if is_due or (self.every_seconds is not None and seconds >= self.every_seconds):
            loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
            record = EpochRecord(
                epoch=run.epoch, step=run.step, train_loss=loss, steps_per_second=steps / max(seconds, 1e-9)
            )
            if self.path is not None:
                append_text(self.path, record_json_line(record))
            for logger in self.loggers:
                logger.write_record(record)
            self._start_interval(run.step)
