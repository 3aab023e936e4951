"""`--debug-halo`: a run that is slow, and stops where a layer or a scheme treats its cells wrongly."""

from __future__ import annotations

from ...errors import ConfigError
from ...models import Model
from ...registry.arguments import checked
from ...runtime.debug import guarded
from ..state import TrainState
from .hook import Hook


class DebugHalo(Hook):
    """Find what layers and border schemes of your own do wrong; results stay the same, bit for bit.

    Cells of a view that have to be filled begin as NaN of a kind of its own. Layers get copies of their views, and of
    the gradients of their outputs, with such NaN around. Messages leave and arrive with random delays, and must not
    change on their way. A mistake ends the run with a HaloError that names layer, direction and step.

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

    def guard(self, model: Model) -> None:
        """Guard all layers of a built model, before its first step."""
        model.executor, model.last_pass = guarded(model.executor, model.leaves, self.seed), None

    def before_run(self, run: TrainState) -> None:
        """Guard all layers."""
        model = run.model.whole
        if not isinstance(model, Model):
            raise ConfigError(
                f"--debug-halo: watches layers of neondist, and {model} has none; leave it out"
            ).on_all_ranks()
        self.guard(model)
