"""Records of training runs, and hooks that stop a run."""

import json

from neondist.train import Hook, Stop

TIMES = ("seconds", "samples_per_second")


class StopAtStep(Hook):
    """Stop a run after any of the given steps, with exit code 75."""

    def __init__(self, *steps):
        self.steps = steps

    def after_step(self, run):
        if run.step in self.steps:
            run.stop = Stop("asked to", 75)


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(folder):
    return read_json_lines(folder / "metrics.jsonl")


def strip_times(history):
    """Return the records of a history without their time measurements."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in history]
