"""metrics.jsonl: one line per epoch."""

from __future__ import annotations

import json
from pathlib import Path

from ...comm import all_or_none
from ...io.files import append_text, write_text
from ..state import EpochRecord, TrainState, nonfinite_to_none
from .hook import Hook


class MetricsLog(Hook):
    """Write one JSON object per epoch, on rank 0, with floats in full precision; NaN and infinity become null.

    The object has the fields of an EpochRecord. Time and communication are reported for training only: seconds,
    samples_per_second, and, over all ranks, bytes_sent (halos) and bytes_summed (arrays reduced or redistributed).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def before_run(self, run: TrainState) -> None:
        """Rewrite the file, keeping only the lines of complete epochs."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                write_text(self.path, "".join(map(record_json_line, run.history)))

    def after_epoch(self, run: TrainState) -> None:
        """Append the epoch's line; it is in the file when this returns."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                append_text(self.path, record_json_line(run.history[-1]))


def record_json_line(record: EpochRecord) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(nonfinite_to_none(record), allow_nan=False) + "\n"
