"""A forward pass through a model, and its backward pass."""

from __future__ import annotations

from typing import Any

from ..errors import PassOrderError, ShapeError
from ..halo import GlobalArray
from ..parallel import LayerParameters
from ..runtime import Executor, Pass
from ..system.lazy import LazyTile
from ..terminal.console import counted


class ModelPass:
    """Forward pass returned by `model.forward`; the memory is released when the pass is no longer referenced.

    Parameters
    ----------
    input_output : pair of GlobalArray
        The model's input and output.

    Attributes
    ----------
    output : array (n, *tile, C')
        This rank's tile of the output (or the whole output after an FC layer), owned by the caller.
    is_training : bool
        Whether it is a training pass.
    """

    replaced_training_pass = False

    def __init__(
        self, executor: Executor, run: Pass, parameters: LayerParameters, input_output: tuple[GlobalArray, GlobalArray]
    ) -> None:
        self._executor, self._run, self._parameters = executor, run, parameters
        self.output, self.is_training = run.output.copy(), run.phase.training
        self._input_and_output, self._parameters_version = input_output, parameters.version

    def backward(self, dy: Any) -> Any:
        """Return the gradient of this rank's tile of the input; all `grads` then contain the sum over all ranks.

        The method may be called again with another `dy`, and after other passes. Collective.

        Parameters
        ----------
        dy : array
            This rank's part of the output's gradient (`model.scatter_output`).

        Returns
        -------
        array (n, *tile, C), a new one

        Raises
        ------
        PassOrderError
            The weights have changed since the pass, the pass was closed, or the model was planned for inference.
        """
        parameters, (images, output) = self._parameters, self._input_and_output
        if not self._executor.compiled.training.backward:
            raise PassOrderError(
                "backward: the model was planned for inference, without saved activations; build it for training"
            )
        dy = output.backend.as_real_array("dy", dy, output.dtype)
        if self._run.is_closed or self._parameters_version != parameters.version:
            reason = "the pass is closed" if self._run.is_closed else "the weights have changed since the forward pass"
            raise PassOrderError(f"backward: {reason}; repeat the forward pass of the batch first")
        parameters.check_layers_not_rebuilt()
        if len(dy) != self._run.samples:
            raise ShapeError(
                f"dy has {counted(len(dy), 'sample')}, but the forward pass had {self._run.samples}; repeat the"
                " forward pass of the batch first"
            )
        output.check_tile_shape("dy", dy)
        images.grid.check("backward")
        parameters.reset_gradients()
        dx = sum_overlapping_input_gradients(images, self._executor.backward(self._run, dy))
        parameters.sum_gradients()
        parameters.version_of_gradients = parameters.version
        return dx

    def close(self) -> None:
        """Release the memory."""
        self._run.close()


def to_backend_images(model: Any, x: Any, copy: bool = False) -> Any:
    """Return images as an array of the model's backend; unchanged if the model reads them strip by strip."""
    if isinstance(x, LazyTile):
        if model.is_streamed:
            return x
        x = x.read_whole()
    return model.context.backend.as_real_array("x", x, model.dtype, copy=copy)


def sum_overlapping_input_gradients(images: GlobalArray, dx: Any) -> Any:
    """Return the gradient of this rank's tile of the input, given this rank's share of the gradient. Collective.

    The two differ only if tiles of the image overlap.
    """
    if not images.tiles.may_overlap:
        return dx
    shared_array = GlobalArray(images.grid, images.global_shape, dtype=str(images.dtype), backend=images.backend)
    shared_array.repartition(outputs=images.tiles)
    return shared_array.get_fprop_view(shared_array.get_bprop_view(dx))  # not needed for training
