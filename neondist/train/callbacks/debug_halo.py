"""`--debug-halo`: a run that is slow, and stops where a layer or a scheme treats its cells wrongly."""

from __future__ import annotations

from ...models import TrainableModel
from ...registry.arguments import checked
from ..state import TrainState
from .hook import Hook


class DebugHalo(Hook):
    """Find what layers and border schemes of your own do wrong; results stay the same, bit for bit.

    Cells of a view that have to be filled begin as NaN of a kind of its own. Layers get copies of their views, and of
    the gradients of their outputs, with such NaN around. Messages leave and arrive with random delays, and must not
    change on their way. A mistake ends the run with a HaloError that names layer, direction and step. Of a PyTorch
    module what rules of your own give is compared with what they have said, and their arguments must not change.

    Parameters
    ----------
    seed : int
        Of the delays.

    Examples
    --------
    >>> nd.DebugHalo().guard(model)  # without a run                                     # doctest: +SKIP
    """

    joins_pretraining = True

    @checked
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def guard(self, model: TrainableModel) -> None:
        """Guard all layers of a built model, before its first step."""
        model.guard(self.seed)

    def before_run(self, run: TrainState) -> None:
        """Guard all layers."""
        self.guard(run.model.whole)
