"""The evaluator role of a session: the script's own evaluation for each checkpoint of the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import ConfigError, NotReadyError
from ..io.checkpoint.read import CheckpointReader
from ..io.output import lock_folder
from ..terminal.console import emit
from ..train import Hook
from ..train.callbacks.checkpoint import RunProgress
from ..train.callbacks.hook import open_hooks
from ..train.callbacks.metrics_log import record_json_line
from ..train.inference_weights import load_inference_weights
from .checkpoint_follower import EVALUATION_FOLDER, CheckpointFollower, EvaluationRecorder
from .hooks import StopAtTimeHook
from .state import SessionState

POLL_INTERVAL = 1.0
"""seconds between two checks for a new checkpoint"""
_RECORD_FIELDS = "epoch", "step", "seconds"


class EvaluatorRole:
    """Role of a DistributedSession in an evaluation task.

    Parameters
    ----------
    folder : path
        Folder of the job's checkpoints.
    """

    def __init__(self, state: SessionState, folder: Path | None, hooks: Iterable[Hook]) -> None:
        if folder is None:
            raise ConfigError("checkpoint_dir: missing; give an evaluator the folder of the job's checkpoints")
        self.state, self.hooks, self.folder = state, list(hooks), folder / EVALUATION_FOLDER
        self.evaluation = EvaluationRecorder(state, self.folder, self.hooks)
        limit = min((hook.seconds for hook in self.hooks if isinstance(hook, StopAtTimeHook)), default=None)
        self.follower = CheckpointFollower(folder, state.grid.world, self.evaluation.last_step, POLL_INTERVAL, limit)
        #: position of the checkpoint that is loaded, but not yet evaluated
        self.loaded_position: RunProgress | None = None
        self._stack = ExitStack()

    def enter(self) -> None:
        """Call the hooks. Collective."""
        with ExitStack() as stack:
            stack.enter_context(lock_folder(self.state.grid.world, self.folder, "auto"))
            stack.enter_context(open_hooks(self.hooks))
            self.evaluation.call_before_run_hooks()
            self._stack = stack.pop_all()

    def should_stop(self) -> bool:
        """Wait for and load the next checkpoint unless one is loaded; return whether to end the loop. Collective."""
        while self.state.stop is None and self.loaded_position is None:
            checkpoint = self.follower.wait_for_next()
            if checkpoint is None:
                return True
            self.follower.process(checkpoint, self._load)
        return self.state.stop is not None

    def _load(self, file: CheckpointReader, progress: RunProgress) -> None:
        load_inference_weights(file, self.state.model)
        self.state.model.step, self.loaded_position = progress.step, progress

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function on the loaded checkpoint, or else the next one, and record the result. Collective.

        Parameters
        ----------
        function : callable
            Returns a number, written as 'loss', or a mapping of names to numbers.

        Raises
        ------
        ConfigError
            The function returns anything else, or a name that each record has.
        NotReadyError
            There are no more checkpoints.
        """
        if self.should_stop() or self.loaded_position is None:
            raise NotReadyError(
                "no checkpoint is left to evaluate, or the session was stopped; end the loop with session.should_stop()"
            )
        start_time = time.perf_counter()
        result = function(*args, **kwargs)
        results = _parse_results(result)
        record = self.evaluation.add_result(self.loaded_position, results, time.perf_counter() - start_time)
        self.loaded_position = None
        if self.state.is_first_rank:
            emit(record_json_line(record).rstrip())
        for hook in self.hooks:
            hook.after_step(self.state)
        self.state.share_stop_requests()
        return result

    def exit(self, error: BaseException | None) -> None:
        """Call the hooks for the last time."""
        with self._stack:
            self.evaluation.call_final_hooks(error)


def _parse_results(result: Any) -> dict[str, float]:
    """Return the results of an evaluation by name."""
    results = dict(result) if isinstance(result, Mapping) else {"loss": result}
    for name, value in results.items():
        if name in _RECORD_FIELDS:
            raise ConfigError(
                f"session.run: the function of an evaluator returns '{name}', which each record has; rename it"
            )
        try:
            results[name] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"session.run: the function of an evaluator returns {type(value).__name__} as {name!r}; expected a"
                " number, or a mapping of names to numbers"
            ) from None
    return results
