"""Window of local contrast normalisation: weights, and the two methods of exchanging the halo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from ..geometry import Box, GridShape, Window, total_halo_volume
from ..halo import Phase
from .layout import Shape

HaloShapesAndWindows = list[tuple[Shape, Window]]


@dataclass(frozen=True)
class LCNWindow:
    """A weighted window, applied in two consecutive stages."""

    kernel_size: int | Sequence[int]
    weighting: str
    sigma: float | None
    padding_mode: str

    def window_of_stages(self, input_shape: Shape, stages: int = 1) -> Window:
        """Return the window of one stage, or of both stages."""
        kernel = Window(self.kernel_size, padding=0, ndim=len(input_shape) - 1).kernel
        reach = [k // 2 * stages for k in kernel]
        return Window([2 * r + 1 for r in reach], padding=reach, mode=self.padding_mode, ndim=len(kernel))

    def axis_weights(self, input_shape: Shape) -> list[list[float]]:
        """Return the weights along every spatial axis, each axis summing to 1."""
        return [self._weights_along_axis(k) for k in self.window_of_stages(input_shape).kernel]

    def _weights_along_axis(self, kernel: int) -> list[float]:
        sigma = self.sigma or kernel / 4
        is_uniform = self.weighting == "uniform"
        weights = [1.0 if is_uniform else exp(-(((i - kernel // 2) / sigma) ** 2) / 2) for i in range(kernel)]
        return [weight / sum(weights) for weight in weights]

    def halos_by_method(self, input_shape: Shape) -> dict[str, HaloShapesAndWindows]:
        """Return the halos of each method, without 'wide' if the image is too small for reflection."""
        single, double = self.window_of_stages(input_shape), self.window_of_stages(input_shape, stages=2)
        halos: dict[str, HaloShapesAndWindows] = {"twice": [((*input_shape[:-1], 1), single)] * 2}
        reach = [before for before, _ in double.padding]
        if self.padding_mode == "zeros" or all(r < n for r, n in zip(reach, input_shape, strict=False)):
            halos["wide"] = [(input_shape, double)]
        return halos

    def least_sending_method(self, input_shape: Shape, grid: GridShape) -> str:
        """Return the method that sends fewer elements; if both send the same number, 'twice', which computes less.

        The halo of twice the radius includes that of one stage, so with two or more channels 'twice' never sends more;
        with one channel it does if tiles are so narrow that the image's border cuts off the wide halo.
        """
        sent_elements = {
            method: sum(shape[-1] * total_halo_volume(grid.partition(shape[:-1]), window) for shape, window in halos)
            for method, halos in self.halos_by_method(input_shape).items()
        }
        return min(sent_elements, key=sent_elements.__getitem__)


class LocalArray:
    """Counterpart of a GlobalArray for arrays that need no exchange; zeroes cells outside the image in place.

    Parameters
    ----------
    region : Box
        Cells of the array.
    image : Box
    """

    def __init__(self, region: Box, image: Box) -> None:
        self.outside_slices = [(slice(None), *box.relative_to(region).slices) for box in region.difference(image)]

    def get_fprop_view(self, x: Any, phase: Phase) -> Any:
        """Return x with zeros outside the image."""
        for cells in self.outside_slices:
            x[cells] = 0
        return x

    def get_bprop_view(self, dview: Any, phase: Phase) -> Any:
        """Return the adjoint: dview with zeros outside the image."""
        return self.get_fprop_view(dview, phase)


def centred_slices(array: Any, inner: Any) -> tuple[slice, ...]:
    """Return the index of the central cells of `array`, with the spatial extent of `inner`."""
    extent_pairs = list(zip(array.shape[1:-1], inner.shape[1:-1], strict=True))
    return (slice(None), *(slice((n - m) // 2, (n + m) // 2) for n, m in extent_pairs))
