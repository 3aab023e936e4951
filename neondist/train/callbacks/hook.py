"""Where code of your own can join a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ..state import TrainState


class Hook:
    """Override what you need. Every rank calls the same hooks in the same order; only `on_error` may be called alone.

    A hook that communicates has to do so on every rank; one that prints or writes asks `run.first_rank`.

    Attributes
    ----------
    joins_pretraining : bool
        Whether the runs that pretrain a stage call it too; there `run.model` is the stage's autoencoder.
    """

    joins_pretraining = False

    def open(self) -> None:
        """Nothing has been loaded. Called once, on every hook before any other call."""

    def close(self) -> None:
        """All is over, well or not, and all files are closed."""

    def before_run(self, run: TrainState) -> None:
        """Model and data are ready, nothing has been trained."""

    def after_step(self, run: TrainState) -> None:
        """One batch has been trained; `run.loss` is its mean loss."""

    def after_epoch(self, run: TrainState) -> None:
        """One epoch is complete; `run.history[-1]` is its record."""

    def on_stop(self, run: TrainState) -> None:
        """The run ends here, before it is complete: `run.stop` says why. Called instead of `after_run`."""

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """The run has failed, perhaps on this rank only: put things in order, do not communicate."""

    def after_run(self, run: TrainState) -> None:
        """All epochs are complete."""


@contextmanager
def opened(hooks: Sequence[Hook]) -> Iterator[None]:
    """Open hooks, and close them when the block is left."""
    with ExitStack() as stack:
        for hook in hooks:
            hook.open()
            stack.callback(hook.close)
        yield
