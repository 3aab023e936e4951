"""Training sessions: the loop, what joins it, and what it writes.

experiment: everything together, as a YAML file names it, and from there to the files of a run. loop: steps,
epochs, evaluation; pretrain: the same for autoencoders. state: what callbacks look at. callbacks: what joins a run.
validate, describe, consistency: before a run. apply: a checkpoint's cost and metrics. inference: its outputs for images
of any size.
"""

from .apply import evaluate_checkpoint
from .callbacks.best import Best
from .callbacks.debug_halo import DebugHalo
from .callbacks.hook import Hook
from .callbacks.loggers import MLflow, TensorBoard
from .callbacks.progress import ProgressBar
from .callbacks.stage_pictures import StagePictures
from .callbacks.stopping import StopOnSignal, TimeLimit
from .callbacks.watchdog import Watchdog
from .describe import describe
from .experiment import FitExperiment, RunResult
from .inference import evaluate_files, forecast, predict
from .loop import evaluate, fit
from .pretrain import pretrain
from .state import Record, Stop, TrainState

__all__ = [
    "Best",
    "DebugHalo",
    "FitExperiment",
    "Hook",
    "MLflow",
    "ProgressBar",
    "Record",
    "RunResult",
    "StagePictures",
    "Stop",
    "StopOnSignal",
    "TensorBoard",
    "TimeLimit",
    "TrainState",
    "Watchdog",
    "describe",
    "evaluate",
    "evaluate_checkpoint",
    "evaluate_files",
    "fit",
    "forecast",
    "predict",
    "pretrain",
]
