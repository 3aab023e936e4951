"""Training role of a session: steps, hooks, checkpoints and a common end on all ranks."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import Dataset
from ..io.output import CHECKPOINT, COMPLETE, lock_folder
from ..models import ScriptModel
from ..system.heartbeat import descriptor, send
from ..system.signals import STOPPED, Signals, active_handler
from ..terminal.console import say
from ..train import Hook, StopOnSignal
from ..train.callbacks.checkpoint import Checkpoint, CheckpointSchedule, restore
from ..train.callbacks.completion import CompletionMark
from ..train.callbacks.hook import opened
from ..train.callbacks.loggers import Logger
from .data_position import DataPosition
from .logs import StepLog, SummaryLog
from .state import SessionState

if TYPE_CHECKING:
    from .servers import JobServers

KEEP = 5
"""Number of older checkpoints kept by step, so that an evaluator can lag behind."""
REMEDY = "start the script again to continue from here"


class TrainingRole:
    """Role of a DistributedSession in training tasks.

    Parameters
    ----------
    state : SessionState
    folder : path, optional
        Folder of the checkpoints.
    writes : bool
        Whether the ranks of this grid write checkpoints; others only read them.
    hooks : sequence of Hook
    schedule : CheckpointSchedule
    log_every, summaries : as in DistributedSession
    grace : float
        Seconds to wait at the end for ranks still in their loop.
    servers : JobServers, optional
        Parameter servers, which update the parameters and count the steps.
    """

    def __init__(
        self,
        state: SessionState,
        folder: Path | None,
        writes: bool,
        hooks: Iterable[Hook],
        schedule: CheckpointSchedule,
        log_every: int | None,
        summaries: tuple[int | None, float | None],
        grace: float,
        servers: JobServers | None = None,
    ) -> None:
        self.state, self.folder, self.writes, self.grace = state, folder, writes, grace
        self.hooks, self.schedule = list(hooks), schedule
        self.servers = servers
        self.position: DataPosition | None = None
        self.supervised = False
        self._stack = ExitStack()
        loggers = [hook for hook in self.hooks if isinstance(hook, Logger)]
        for logger in loggers:
            logger.within(folder)
            logger.axis = "step"
        if log_every is not None and writes:
            self.hooks.append(StepLog(log_every))
        if any(due is not None for due in summaries) and writes:
            self.hooks.append(SummaryLog(folder, *summaries, loggers))

    def enter(self) -> None:
        """Restore the newest checkpoint, if there is one, and call the hooks; collective."""
        state, folder, world = self.state, self.folder, self.state.grid.world
        with ExitStack() as stack:
            if folder is not None:
                self._enable_supervisor(stack)
            stack.enter_context(opened(self.hooks))
            if folder is not None:
                if self.writes:
                    stack.enter_context(lock_folder(world, folder, "auto"))
                begins = self.servers is None or self.writes  # others use the servers' values and their own shards
                if begins and world.bcast(world.rank == 0 and (folder / CHECKPOINT).exists()):
                    restore(folder / CHECKPOINT, state, otherwise="give another checkpoint_dir")
                    state.notes.append(f"resuming from step {state.step} of {folder / CHECKPOINT}")
                if self.writes:
                    self.hooks += [Checkpoint(folder / CHECKPOINT, self.schedule), CompletionMark(folder / COMPLETE)]
            self._call(lambda hook: hook.before_run(state))
            if self.servers is not None:  # after the hooks have initialised the weights
                stack.callback(self.servers.close)
                self.servers.join()
            for note in state.notes if state.first_rank and self.writes else ():
                say(note)
            self.state.agree()
            self._stack = stack.pop_all()

    def _enable_supervisor(self, stack: ExitStack) -> None:
        """Let the job's supervisor, if any, stop it with a checkpoint for a restart.

        The signal handlers stay for the life of the process, so that a late signal does not kill it.
        """
        if self.servers is not None or descriptor(os.environ) is None:
            return
        signals = active_handler("SIGUSR1") or Signals().listen()
        if active_handler("SIGUSR1") is signals:  # not in a thread
            self.hooks.append(StopOnSignal(signals, REMEDY))
            self.supervised = True
            send(os.environ, "listens")
            stack.callback(send, os.environ, "ignores")

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, count its step, and call the hooks; collective."""
        state, begun, previous = self.state, time.perf_counter(), self.state.step
        result = function(*args, **kwargs)
        if isinstance(state.model, ScriptModel):
            state.model.count()
        state.loss = _to_loss(result)
        stepped = state.step != previous
        if self.servers is not None:
            self.servers.count()
        if stepped:
            if self.position is not None and (size := self.position.take()):
                totals = state.totals
                totals.loss += state.loss * size if math.isfinite(state.loss) else 0.0
                totals.skipped += 0 if math.isfinite(state.loss) else size
                totals.seconds += time.perf_counter() - begun
            self._call(lambda hook: hook.after_step(state))
        state.agree()
        return result

    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.state.stop is not None

    @property
    def batch_size(self) -> int:
        """Number of samples of the current batch, over all replicas."""
        return self.state.batch_size if self.position is None else self.position.size

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
            if state.stop is None and position.ends():
                position.close_epoch()
                self._call(lambda hook: hook.after_epoch(state))
                self.state.agree()

    def exit(self, error: BaseException | None) -> None:
        """Call the final hooks, which write the last checkpoint; collective unless there is an error.

        Raises
        ------
        SystemExit
            With exit code 75: the supervisor resumes the job from that checkpoint.
        """
        with self._stack:
            if error is not None:
                self._fail(error)
                return
            try:
                self._wait_for_ranks()
                if self.servers is not None:
                    self.servers.leave()
                self._call(
                    lambda hook: hook.after_run(self.state) if self.state.stop is None else hook.on_stop(self.state)
                )
                if self.servers is not None:
                    self.servers.end()
            except BaseException as problem:
                self._fail(problem)
                raise
        stop = self.state.stop
        if self.supervised and stop is not None and stop.code == STOPPED:
            if self.state.first_rank:
                say(f"stopped at step {self.state.step}: {stop.reason}")
            raise SystemExit(STOPPED)

    def _fail(self, error: BaseException) -> None:
        for hook in self.hooks:
            with suppress(Exception):  # the first error is the one to read
                hook.on_error(self.state, error)

    def _wait_for_ranks(self) -> None:
        """Wait for the other ranks to leave their loops; abort the job after the grace period."""
        grid = self.state.grid
        if grid.size == 1:
            return
        text = f"rank {grid.rank} of {grid.size}: the session is over at step {self.state.step}, but other ranks go on"
        timer = threading.Timer(self.grace, _abort_job, [grid.world, text])
        timer.daemon = True
        timer.start()
        try:
            grid.check("the end of DistributedSession", {"step": self.state.step})
        finally:
            timer.cancel()

    def _call(self, action: Callable[[Hook], None]) -> None:
        for hook in self.hooks:
            action(hook)


def _abort_job(world: Any, message: str) -> None:
    sys.stderr.write(f"{message} (stop_grace_period_secs); the job ends\n")
    sys.stderr.flush()
    world.abort(1)


def _to_loss(result: Any) -> float:
    """Return the result of a step as a number; NaN if it is not one."""
    try:
        return float(result.item() if hasattr(result, "item") else result)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
