"""Training role of a session: steps, hooks, checkpoints and a coordinated stop on all ranks."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm import Transport
from ..data import Dataset
from ..io.output import CHECKPOINT, COMPLETE, lock_folder
from ..models import TrainingScriptAdapter
from ..system.heartbeat import send_to_supervisor, supervisor_descriptor
from ..system.signals import STOPPED_EXIT_CODE, SignalRecorder, find_active_signal_recorder
from ..terminal.console import say
from ..train import EpochRecord, Hook, StopOnSignal
from ..train.callbacks.checkpoint import Checkpoint, CheckpointSchedule, restore_checkpoint
from ..train.callbacks.completion_marker import CompletionMarker
from ..train.callbacks.hook import call_error_hooks, open_hooks
from ..train.callbacks.loggers import MetricLogger
from ..train.loop import record_epoch_and_reset_totals
from .data_position import DataPosition
from .logs import StepLog, SummaryLog
from .state import SessionState

if TYPE_CHECKING:
    from .servers import JobServersClient

KEPT_CHECKPOINTS = 5
"""Number of recent checkpoints kept under names with their steps, so that an evaluator can lag behind."""
RESUME_REMEDY = "start the script again to continue from here"


class TrainingRole:
    """Role of a DistributedSession in training tasks.

    Parameters
    ----------
    folder : path, optional
        Folder of the checkpoints.
    writes_checkpoints : bool
        Whether the ranks of this grid write checkpoints; other ranks only read them.
    log_every_steps, summary_intervals : log_step_count_steps and save_summaries_(steps, secs) of DistributedSession
    grace_seconds : float
        Seconds to wait at the end for ranks still in their loop.
    servers : JobServersClient, optional
        Parameter servers, which update the parameters and count the steps.
    """

    def __init__(
        self,
        state: SessionState,
        folder: Path | None,
        writes_checkpoints: bool,
        hooks: Iterable[Hook],
        schedule: CheckpointSchedule,
        log_every_steps: int | None,
        summary_intervals: tuple[int | None, float | None],
        grace_seconds: float,
        servers: JobServersClient | None = None,
    ) -> None:
        self.state, self.folder, self.grace_seconds = state, folder, grace_seconds
        self.hooks, self.schedule = list(hooks), schedule
        self.servers, self.writes_checkpoints = servers, writes_checkpoints
        self.position: DataPosition | None = None
        self.is_supervised = False
        self._stack = ExitStack()
        loggers = [hook for hook in self.hooks if isinstance(hook, MetricLogger)]
        for logger in loggers:
            logger.set_run_folder(folder)
            logger.step_field = "step"
        if log_every_steps is not None and writes_checkpoints:
            self.hooks.append(StepLog(log_every_steps))
        if any(due is not None for due in summary_intervals) and writes_checkpoints:
            self.hooks.append(SummaryLog(folder, *summary_intervals, loggers))

    def enter(self) -> None:
        """Restore the newest checkpoint, if there is one, and call the hooks. Collective."""
        state, folder, world = self.state, self.folder, self.state.grid.world
        with ExitStack() as stack:
            if folder is not None:
                self._stop_on_supervisor_signal(stack)
            stack.enter_context(open_hooks(self.hooks))
            if folder is not None:
                if self.writes_checkpoints:
                    stack.enter_context(lock_folder(world, folder, "auto"))
                # workers that write no checkpoints pull the values from the servers
                restores_checkpoint = self.servers is None or self.writes_checkpoints
                if restores_checkpoint and world.bcast(world.rank == 0 and (folder / CHECKPOINT).exists()):
                    restore_checkpoint(folder / CHECKPOINT, state, remedy="give another checkpoint_dir")
                    state.start_messages.append(f"resuming from step {state.step} of {folder / CHECKPOINT}")
                if self.writes_checkpoints:
                    self.hooks += [Checkpoint(folder / CHECKPOINT, self.schedule), CompletionMarker(folder / COMPLETE)]
            self._call_hooks(lambda hook: hook.before_run(state))
            if self.servers is not None:  # after the hooks have initialised the weights
                stack.callback(self.servers.close)
                self.servers.join_job_and_load_values()
            for note in state.start_messages if state.is_first_rank and self.writes_checkpoints else ():
                say(note)
            self.state.share_stop_requests()
            self._stack = stack.pop_all()

    def _stop_on_supervisor_signal(self, stack: ExitStack) -> None:
        """Let the job's supervisor, if any, stop the session with a checkpoint, so that the job can be restarted.

        The signal handlers stay for the life of the process, since a late signal would otherwise kill it.
        """
        if self.servers is not None or supervisor_descriptor(os.environ) is None:
            return
        signals = find_active_signal_recorder("SIGUSR1") or SignalRecorder().install_signal_handlers()
        if find_active_signal_recorder("SIGUSR1") is signals:  # handlers can be installed only in the main thread
            self.hooks.append(StopOnSignal(signals, RESUME_REMEDY))
            self.is_supervised = True
            send_to_supervisor(os.environ, "listens")
            stack.callback(send_to_supervisor, os.environ, "ignores")

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, count its step, and call the hooks. Collective."""
        state, start_time, previous_step = self.state, time.perf_counter(), self.state.step
        result = function(*args, **kwargs)
        if isinstance(state.model, TrainingScriptAdapter):
            state.model.count_step_and_sum_flags()
        state.loss = _to_loss(result)
        has_stepped = state.step != previous_step
        if self.servers is not None:
            self.servers.update_step_from_servers()
        if has_stepped:
            if self.position is not None and (size := self.position.advance_past_batch()):
                totals = state.totals
                totals.loss += state.loss * size if math.isfinite(state.loss) else 0.0
                totals.skipped_samples += 0 if math.isfinite(state.loss) else size
                totals.seconds += time.perf_counter() - start_time
            self._call_hooks(lambda hook: hook.after_step(state))
        state.share_stop_requests(None if math.isfinite(state.loss) else state.find_nonfinite_parameter())
        return result

    def should_stop(self) -> bool:
        """Return whether all ranks have agreed to stop."""
        return self.state.stop is not None

    @property
    def batch_size(self) -> int:
        """Number of samples of the current batch, over all replicas."""
        return self.state.batch_size if self.position is None else self.position.current_batch_size

    def batches(
        self, dataset: Dataset, batch_size: int, epochs: int | None, seed: int | None
    ) -> Generator[tuple[Any, Any]]:
        """Yield the batches of the remaining epochs."""
        state = self.state
        position = self.position = DataPosition(
            state, dataset, batch_size, (state.model.seed or 0) if seed is None else seed
        )
        state.epochs = sys.maxsize if epochs is None else epochs
        while state.stop is None and state.epoch < state.epochs:
            yield from position.batches()
            if state.stop is None and state.samples_seen >= state.epoch_size:
                record_epoch_and_reset_totals(state, EpochRecord())
                self._call_hooks(lambda hook: hook.after_epoch(state))
                self.state.share_stop_requests()

    def exit(self, error: BaseException | None) -> None:
        """Call the final hooks, which write the last checkpoint. Collective unless there is an error.

        Raises
        ------
        SystemExit
            With exit code 75, if the supervisor has requested the stop; it then resumes the job from the checkpoint.
        """
        with self._stack:
            if error is not None:
                call_error_hooks(self.hooks, self.state, error)
                return
            try:
                self._wait_for_ranks_or_abort()
                if self.servers is not None:
                    self.servers.leave_or_end_job()
                self._call_hooks(
                    lambda hook: hook.after_run(self.state) if self.state.stop is None else hook.on_stop(self.state)
                )
                if self.servers is not None:
                    self.servers.stop_servers()
            except BaseException as problem:
                call_error_hooks(self.hooks, self.state, problem)
                raise
        stop = self.state.stop
        if self.is_supervised and stop is not None and stop.exit_code == STOPPED_EXIT_CODE:
            if self.state.is_first_rank:
                say(f"stopped at step {self.state.step}: {stop.reason}")
            raise SystemExit(STOPPED_EXIT_CODE)

    def _wait_for_ranks_or_abort(self) -> None:
        """Wait for the other ranks to leave their loops; abort the job after the grace period."""
        grid = self.state.grid
        if grid.size == 1:
            return
        message = f"rank {grid.rank} of {grid.size}: the session ended at step {self.state.step}"
        abort_timer = threading.Timer(self.grace_seconds, _abort_job, [grid.world, message])
        abort_timer.daemon = True
        abort_timer.start()
        try:
            grid.check("the end of DistributedSession", {"step": self.state.step})
        finally:
            abort_timer.cancel()

    def _call_hooks(self, action: Callable[[Hook], None]) -> None:
        for hook in self.hooks:
            action(hook)


def _abort_job(world: Transport, message: str) -> None:
    sys.stderr.write(
        f"{message}, but other ranks are still running after stop_grace_period_secs; aborting the job. Leave the loop"
        " on all ranks after the same step\n"
    )
    sys.stderr.flush()
    world.abort(1)


def _to_loss(result: Any) -> float:
    """Return the result of a step as a number; NaN if it is not a number."""
    try:
        return float(result.item() if hasattr(result, "item") else result)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
