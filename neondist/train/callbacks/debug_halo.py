"""`--debug-halo`: slow checked execution that detects wrong use of halo cells by layers and schemes."""

from __future__ import annotations

from ...models import TrainableModel
from ...registry.arguments import type_checked
from ..state import TrainState
from .hook import Hook


class DebugHalo(Hook):
    """Detect errors in custom layers and border schemes, with bitwise identical results.

    Cells of a view that an exchange must fill are initialised with a special NaN. Layers receive copies of their views
    and output gradients, surrounded by such NaNs. Messages are delayed at random, and their buffers must not be
    modified until the transfer is complete. Weights and state of layers are compared across ranks after each step, and
    the kinds of partial results before each reduction. In PyTorch modules, results of custom rules are compared with
    their declarations, and rules must not modify their arguments. An error stops the run with a HaloError that names
    layer, direction and step.

    Parameters
    ----------
    seed : int
        Seed of the delays.

    Examples
    --------
    >>> nd.DebugHalo().guard(model)  # outside a run                                     # doctest: +SKIP
    """

    runs_during_pretraining = True

    @type_checked
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def guard(self, model: TrainableModel) -> None:
        """Guard all layers of a built model, before its first step."""
        model.enable_debug_checks(self.seed)

    def before_run(self, run: TrainState) -> None:
        """Guard all layers."""
        self.guard(run.model.whole_model)

    def after_step(self, run: TrainState) -> None:
        """Compare weights and state of layers across ranks."""
        run.model.whole_model.check_replicated_arrays(run.step)
