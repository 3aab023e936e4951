"""Image similarity metrics: PSNR and SSIM."""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np

from ..errors import ShapeError
from ..geometry import Window
from ..registry.ranges import Positive
from .base import PerSampleMetric
from .output_layout import OutputLayout

_SSIM_LINES_PER_BLOCK = 64
"""Number of lines per block, chosen so that intermediate results fit in the cache."""


class PSNR(PerSampleMetric):
    """Mean over the images of the peak signal-to-noise ratio in dB, as in `skimage.metrics.peak_signal_noise_ratio`.

    Outputs and targets are (n, *spatial, C). The ratio of an image that is reproduced exactly is infinite.

    Parameters
    ----------
    data_range : float
        Range of the values (largest minus smallest possible value).
    """

    name = "psnr"
    larger_is_better = True

    def __init__(self, data_range: Positive = 1.0) -> None:
        self.data_range = float(data_range)

    def _sums_of_images(self, y: np.ndarray, targets: np.ndarray, outputs: OutputLayout) -> np.ndarray:
        """Return the sum of squared differences of each sample, and their number."""
        squares = ((y - targets) ** 2).reshape(len(y), prod(y.shape[1:]))
        return np.stack([squares.sum(axis=1), np.full(len(y), squares.shape[1], "f8")], axis=1)

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return 10 log10(data_range² / mean square)."""
        with np.errstate(divide="ignore"):
            return 10 * np.log10(self.data_range**2 * sums[:, 1] / sums[:, 0])


class SSIM(PerSampleMetric):
    """Mean structural similarity (Wang et al. 2004) over all windows, channels and images.

    Equal to `skimage.metrics.structural_similarity` of whole images: windows of 7 cells along each axis, or of 11 with
    'gaussian' weights (sigma 1.5, population covariances), all inside the image. Windows across tiles are computed
    with a halo exchange.

    Parameters
    ----------
    data_range : float
        Range of the values (largest minus smallest possible value).
    weights : {'uniform', 'gaussian'}
        Weights of the cells of a window.
    """

    name = "ssim"
    larger_is_better = True

    def __init__(self, data_range: Positive = 1.0, *, weights: Literal["uniform", "gaussian"] = "uniform") -> None:
        self.data_range, self.weights = float(data_range), weights
        x = np.arange(-5.0, 6.0)
        self._window_weights = np.full(7, 1 / 7) if weights == "uniform" else np.exp(-(x**2) / (2 * 1.5**2))
        self._window_weights /= self._window_weights.sum()
        self.overlap_cells = len(self._window_weights) - 1

    def _sums_of_images(self, y: np.ndarray, targets: np.ndarray, outputs: OutputLayout) -> np.ndarray:
        """Return the sum of similarities of each sample over windows and channels, and their number."""
        sums = np.zeros((len(y), 2))
        if min(outputs.shape[:-1]) <= self.overlap_cells:  # too small for a window, such as the last block
            return sums
        window = Window((len(self._window_weights),) * (y.ndim - 2), padding=0)
        both_images = outputs.gather_view(np.concatenate([y, targets], axis=-1), window)
        for at in range(0, both_images.shape[1] - self.overlap_cells, _SSIM_LINES_PER_BLOCK):
            similarities = self._similarities(both_images[:, at : at + _SSIM_LINES_PER_BLOCK + self.overlap_cells])
            sums += np.stack([similarities.sum(axis=1), np.full(len(y), similarities.shape[1], "f8")], axis=1)
        return sums

    def _similarities(self, both_images: np.ndarray) -> np.ndarray:
        """Return the similarities of each sample, in all windows within the cells of two images."""
        axes = range(1, both_images.ndim - 1)
        a, b = np.split(both_images, 2, axis=-1)
        means = np.stack([a, b, a * a, b * b, a * b])
        for axis in axes:
            if means.shape[1 + axis] < len(self._window_weights):  # no window fits in the tile
                return np.zeros((len(both_images), 0))
            num_windows = means.shape[1 + axis] - self.overlap_cells
            leading = (slice(None),) * (1 + axis)
            weights = self._window_weights.tolist()
            means = sum(w * means[(*leading, slice(at, at + num_windows))] for at, w in enumerate(weights))
        ma, mb, aa, bb, ab = means
        window_cells = len(self._window_weights) ** len(axes)
        correction = window_cells / (window_cells - 1) if self.weights == "uniform" else 1.0
        va, vb, vab = (correction * (mean - m * n) for mean, m, n in ((aa, ma, ma), (bb, mb, mb), (ab, ma, mb)))
        c1, c2 = ((k * self.data_range) ** 2 for k in (0.01, 0.03))
        similarity = (2 * ma * mb + c1) * (2 * vab + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2))
        return similarity.reshape(len(both_images), prod(similarity.shape[1:]))

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the means."""
        return sums[:, 0] / sums[:, 1]

    def check_output_shape(self, y_shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless outputs are images, at least as large as a window."""
        super().check_output_shape(y_shape)
        if min(y_shape[:-1]) < len(self._window_weights):
            raise ShapeError(
                f"SSIM has windows of {len(self._window_weights)} cells, but outputs are"
                f" {' x '.join(map(str, y_shape[:-1]))}; use PSNR, or leave SSIM out"
            )
