"""complete.json: marker of a completed run, for processes that follow its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from ...comm import all_or_none
from ...io.files import convert_file_errors, write_text
from ..state import TrainState
from .hook import Hook


class CompletionMarker(Hook):
    """Write the marker after the last checkpoint, when the run is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def before_run(self, run: TrainState) -> None:
        """Remove the marker of an earlier run."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                with convert_file_errors(self.path, "cannot be removed"):
                    self.path.unlink(missing_ok=True)

    def after_run(self, run: TrainState) -> None:
        """Write the marker."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                write_text(self.path, json.dumps({"step": run.step}) + "\n")

    def on_stop(self, run: TrainState) -> None:
        """Write the marker if the run is complete."""
        if run.stop is not None and run.stop.exit_code == 0:
            self.after_run(run)
