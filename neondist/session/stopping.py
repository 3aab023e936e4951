"""Ending a run in good order when the batch system says so."""

from __future__ import annotations

from ..models.notices import Notice
from ..signals import Signals
from .hooks import Hook
from .run import Run, Stop

SIGNALS = {"SIGTERM": Notice.SIGTERM, "SIGUSR1": Notice.SIGUSR1}


class StopOnSignal(Hook):
    """SIGTERM or SIGUSR1, on any rank, ends the run on all ranks after the step under way, with a checkpoint.

    The ranks agree inside the sum of the gradients, and before the first step of a run, or of a stage of pretraining,
    on what came in between. What comes while the checkpoint is written changes nothing. Signals can be caught in a
    process's main thread only.

    Parameters
    ----------
    signals : Signals, optional
        Who listens already; default from `open` to `close`.
    """

    joins_pretraining = True

    def __init__(self, signals: Signals | None = None) -> None:
        self.signals, self.own = signals or Signals(), signals is None
        self.run: Run | None = None

    def open(self) -> None:
        """Listen."""
        if self.own:
            self.signals.listen()

    def close(self) -> None:
        """Listen no longer."""
        if self.own:
            self.signals.restore()

    def before_run(self, run: Run) -> None:
        """Join those who are told; stop before the first step, if a rank has heard a signal."""
        self.run, self.signals.cleans_up = run, True
        self.signals.join(self._tell)
        heard = [name for names in run.grid.world.allgather(tuple(self.signals.heard)) for name in names]
        if heard and run.stop is None and run.epoch < run.epochs:
            run.stop = _stop(heard[0])

    def after_step(self, run: Run) -> None:
        """Stop, if a rank has heard a signal."""
        for name, notice in SIGNALS.items():
            if run.stop is None and run.model.notices.ranks(notice):
                run.stop = _stop(name)

    def after_run(self, run: Run) -> None:
        """Leave those who are told."""
        if self.run is not None:
            self.run = None
            self.signals.listeners.remove(self._tell)

    def on_stop(self, run: Run) -> None:
        """Leave those who are told."""
        self.after_run(run)

    def on_error(self, run: Run, error: BaseException) -> None:
        """Leave those who are told."""
        self.after_run(run)

    def _tell(self, name: str) -> None:
        if self.run is not None:
            self.run.model.notices.mine[SIGNALS[name]] = 1


def _stop(name: str) -> Stop:
    return Stop(f"{name} came; --resume goes on from here")
