"""Interface for user code in a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ..state import TrainState


class Hook:
    """Base class of hooks. All ranks call the same hooks in the same order, except `on_error`.

    A hook that communicates must do so on every rank; one that prints or writes should check `run.is_first_rank`.

    Attributes
    ----------
    runs_during_pretraining : bool
        Whether the hook is also called during pretraining; `run.model` is then the stage's autoencoder.
    """

    runs_during_pretraining = False

    def open(self) -> None:
        """Called once before any other call, before anything is loaded."""

    def close(self) -> None:
        """Called at the end, after success or failure, when all files are closed."""

    def before_run(self, run: TrainState) -> None:
        """Called before the first step, when model and data are ready."""

    def after_step(self, run: TrainState) -> None:
        """Called after each batch; `run.loss` is its mean loss."""

    def after_epoch(self, run: TrainState) -> None:
        """Called after each epoch; `run.history[-1]` is its record."""

    def on_stop(self, run: TrainState) -> None:
        """Called instead of `after_run` if the run stops before it is complete; `run.stop` has the reason."""

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """Called when the run has failed, possibly only on this rank, to clean up without communicating."""

    def after_run(self, run: TrainState) -> None:
        """Called when all epochs are complete, or when a session ends without a stop or an error."""


@contextmanager
def open_hooks(hooks: Sequence[Hook]) -> Iterator[None]:
    """Open hooks, and close them at the end of the block."""
    with ExitStack() as stack:
        for hook in hooks:
            hook.open()
            stack.callback(hook.close)
        yield


def call_error_hooks(hooks: Sequence[Hook], run: TrainState, error: BaseException) -> None:
    """Call `on_error` of hooks; errors in them are ignored, so that the original error is reported."""
    for hook in hooks:
        with suppress(Exception):
            hook.on_error(run, error)
