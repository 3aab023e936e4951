"""Padding and cropping of images."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ..errors import ConfigError
from ..geometry import Window
from ..halo import ExchangePolicy
from .base import Dist, Layer, Shape
from .context import StepContext


class PadLayer(Layer):
    """Padding of the image by `padding` cells: (N, *spatial, C) to (N, *spatial + padding, C) per tile.

    Parameters
    ----------
    padding : int, one per axis, or ((before, after), ...) per axis
    mode : {'zeros', 'reflect', 'replicate', 'wrap'}, or one per axis
    fill : float
        Value of the new cells in mode 'zeros'.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    """

    needs_image = True
    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 0)

    def __init__(
        self,
        padding: int | Sequence[Any],
        mode: str | Sequence[str] = "zeros",
        *,
        fill: float = 0.0,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        self.padding, self.mode, self.fill = padding, mode, fill

    def window_for(self, input_shape: Shape) -> Window:
        """Return a window of one cell, shifted by the padding."""
        return Window(1, padding=self.padding, fill=self.fill, mode=self.mode, ndim=len(input_shape) - 1)

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the view."""
        return view

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return dy."""
        return dy


class PadLayerDist(Dist, PadLayer):
    """Padding over tiles; the output is repartitioned evenly."""


class CropLayer(PadLayer):
    """Cropping of the image by `cropping` cells: (N, *spatial, C) to (N, *spatial - cropping, C) per tile.

    Parameters
    ----------
    cropping : int, one per axis, or ((before, after), ...) per axis
    scheme
        As in PadLayer.
    """

    def __init__(
        self, cropping: int | Sequence[Any], *, scheme: ExchangePolicy | str | None = None, name: str | None = None
    ) -> None:
        super().__init__(_as_negative_padding(cropping), name=name, scheme=scheme)


class CropLayerDist(Dist, CropLayer):
    """Cropping over tiles; the output is repartitioned evenly."""


def _as_negative_padding(cropping: int | Sequence[Any]) -> Any:
    if isinstance(cropping, Sequence) and not isinstance(cropping, str):
        return tuple(_as_negative_padding(side) for side in cropping)
    if not isinstance(cropping, Integral) or cropping < 0:
        raise ConfigError(f"cropping {cropping}: expected integers of at least 0; use PadLayer to add cells")
    return -cropping
