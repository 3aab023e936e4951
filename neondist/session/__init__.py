"""Training sessions: the loop, what joins it, and what it writes.

experiment: everything together, as a YAML file names it. fit, evaluate: the loop; pretrain: the same for autoencoders.
hooks: how to join it; progress, stopping, time_limit, watchdog, metrics_log, checkpoint, curves, tiles_picture: the
hooks that a run has; debug_halo: one that it may have. validate, describe, consistency: before a run.
"""

from .apply import evaluate_checkpoint, predict
from .debug_halo import DebugHalo
from .describe import describe
from .evaluate import evaluate
from .experiment import FitExperiment
from .fit import fit
from .hooks import Hook
from .pretrain import pretrain
from .progress import ProgressBar
from .run import Run, Stop
from .stage_pictures import StagePictures
from .stopping import StopOnSignal
from .time_limit import TimeLimit
from .train import RunResult
from .watchdog import Watchdog

__all__ = [
    "DebugHalo",
    "FitExperiment",
    "Hook",
    "ProgressBar",
    "Run",
    "RunResult",
    "StagePictures",
    "Stop",
    "StopOnSignal",
    "TimeLimit",
    "Watchdog",
    "describe",
    "evaluate",
    "evaluate_checkpoint",
    "fit",
    "predict",
    "pretrain",
]
