"""Training: experiments, the training loop, and hooks.

experiment: configuration and execution of a run. loop: steps, epochs and evaluation. pretrain: stage-wise pretraining
of autoencoders. state: state of a run, as seen by hooks. callbacks: hooks. validate, describe, consistency: checks
before a run. checkpoint_evaluation: evaluation of a checkpoint. inference: outputs for images of any size.
"""

from .callbacks.best_epoch import Best
from .callbacks.debug_halo import DebugHalo
from .callbacks.hook import Hook
from .callbacks.loggers import MLflow, TensorBoard
from .callbacks.progress_bar import ProgressBar
from .callbacks.stage_pictures import PretrainingPictures
from .callbacks.stopping import StopOnSignal, TimeLimit
from .callbacks.watchdog import Watchdog
from .checkpoint_evaluation import evaluate_checkpoint
from .describe import describe_experiment
from .experiment import FitExperiment, RunResult
from .inference import evaluate_files, forecast, predict
from .loop import evaluate, fit
from .pretrain import pretrain
from .state import EpochRecord, Stop, TrainState

__all__ = [
    "Best",
    "DebugHalo",
    "EpochRecord",
    "FitExperiment",
    "Hook",
    "MLflow",
    "PretrainingPictures",
    "ProgressBar",
    "RunResult",
    "Stop",
    "StopOnSignal",
    "TensorBoard",
    "TimeLimit",
    "TrainState",
    "Watchdog",
    "describe_experiment",
    "evaluate",
    "evaluate_checkpoint",
    "evaluate_files",
    "fit",
    "forecast",
    "predict",
    "pretrain",
]
