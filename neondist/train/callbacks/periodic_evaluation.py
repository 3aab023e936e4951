"""evaluations.jsonl: evaluation of the validation and test splits at an interval of steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...comm import all_or_none
from ...io.files import append_text, write_text
from ...io.output import EVALUATIONS
from ...metrics import Metric
from ...terminal.console import say
from ..loop import evaluate_validation_and_test
from ..state import TrainState, nonfinite_to_none
from .hook import Hook


class PeriodicEvaluation(Hook):
    """Evaluate the validation and test splits every `interval_steps` steps; rank 0 prints and writes the results.

    Parameters
    ----------
    folder : path
        Folder of the run.
    interval_steps : int
    metrics : sequence of Metric
    """

    def __init__(self, folder: Path, interval_steps: int, metrics: Sequence[Metric]) -> None:
        self.path, self.interval_steps, self.metrics = folder / EVALUATIONS, interval_steps, metrics

    def before_run(self, run: TrainState) -> None:
        """Create the file, or continue it."""
        with all_or_none(run.grid.world):
            if run.is_first_rank and (run.step == 0 or not self.path.exists()):
                write_text(self.path, "")

    def after_step(self, run: TrainState) -> None:
        """Evaluate if an evaluation is due."""
        if run.step % self.interval_steps:
            return
        with run.model.whole_model.use_averaged_weights():
            evaluation = evaluate_validation_and_test(run, self.metrics)
        results = nonfinite_to_none(evaluation)
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                append_text(self.path, json.dumps({"step": run.step, **results}, allow_nan=False) + "\n")
                result_texts = [f"{name} {value:.6g}" for name, value in results.items() if isinstance(value, float)]
                say(f"step {run.step}: {', '.join(result_texts)}")
