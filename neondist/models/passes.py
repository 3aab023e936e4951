"""A pass through a model, as its users have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PassError, ShapeError
from ..runtime import Pass

if TYPE_CHECKING:
    from .model import Model


class ModelPass:
    """What `model.forward` returns; its memory is given back when nobody holds it any more.

    Attributes
    ----------
    output : array (n, *tile, C')
        This rank's tile of the output (or the whole output after an FC layer), the caller's.
    trains : bool
        Whether it was a pass of training.
    """

    between = False

    def __init__(self, model: Model, run: Pass) -> None:
        self.model, self._run = model, run
        self.output, self.trains = run.output.copy(), run.phase.training
        self._version = model.weights_version

    def backward(self, dy: Any) -> Any:
        """Return the gradient of this rank's tile of the input; all `grads` then hold the sum over all ranks.

        It may be called again, for another `dy`, and after other passes; collective.

        Parameters
        ----------
        dy : array
            This rank's part of the output's gradient (`model.scatter_output`).

        Returns
        -------
        array (n, *tile, C), a new one

        Raises
        ------
        PassError
            The weights have changed since, or the pass was closed.
        """
        model = self.model
        dy = model.real_array("dy", dy)
        if self._run.closed or self._version != model.weights_version:
            why = "it was closed" if self._run.closed else "the weights have changed"
            raise PassError(f"backward: {why} since the pass forward; run fprop of its batch right before bprop")
        if len(dy) != self._run.samples:
            raise ShapeError(
                f"dy has {len(dy)} samples, but the pass forward had {self._run.samples}; run fprop of its batch right"
                " before bprop"
            )
        dx = model.whole_input_gradient(model.run_backward(self._run, dy))
        model.sum_gradients()
        return dx

    def close(self) -> None:
        """Give the memory back."""
        self._run.close()
