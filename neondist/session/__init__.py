"""Training sessions: the loop, what joins it, and what it writes.

experiment: everything together, as a YAML file names it. train: from there to the files of a run. fit: the loop, and
evaluation; pretrain: the same for autoencoders. run: what hooks look at; hooks: how to join a run. progress, stopping,
watchdog, metrics_log, ledger_log, checkpoint, curves, tiles_picture, stage_pictures: the hooks that a run has;
debug_halo: one that it may have. validate, describe, consistency: before a run. apply: after it.
"""

import warnings
from typing import Any

from .apply import evaluate_checkpoint, predict
from .debug_halo import DebugHalo
from .describe import describe
from .experiment import FitExperiment
from .fit import evaluate, fit
from .hooks import Hook
from .pretrain import pretrain
from .progress import ProgressBar
from .run import Record, Stop, TrainState
from .stage_pictures import StagePictures
from .stopping import StopOnSignal, TimeLimit
from .train import RunResult
from .watchdog import Watchdog

__all__ = [
    "DebugHalo",
    "FitExperiment",
    "Hook",
    "ProgressBar",
    "Record",
    "RunResult",
    "StagePictures",
    "Stop",
    "StopOnSignal",
    "TimeLimit",
    "TrainState",
    "Watchdog",
    "describe",
    "evaluate",
    "evaluate_checkpoint",
    "fit",
    "predict",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name == "Run":
        warnings.warn("session.Run is called session.TrainState now", DeprecationWarning, stacklevel=2)
        return TrainState
    raise AttributeError(f"module 'neondist.session' has no attribute '{name}'")
