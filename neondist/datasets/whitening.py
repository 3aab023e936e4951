"""Photographs with the spectrum of white noise."""

from __future__ import annotations

import numpy as np

_MARGIN = 32  # the photograph is mirrored this far, so that its opposite borders do not meet


def whiten(image: np.ndarray, cutoff: float = 0.4) -> np.ndarray:
    """Return a grey image (H, W) whitened, with mean 0 and variance 1, as float32.

    The filter is f · exp(-(f / cutoff)⁴), f in cycles per pixel (Olshausen and Field 1997): natural images have
    amplitudes of about 1 / f, and the highest frequencies are noise.
    """
    margins = [min(_MARGIN, n - 1) for n in image.shape]
    padded = np.pad(np.asarray(image, np.float64), [(m, m) for m in margins], mode="reflect")
    rows, cols = np.fft.fftfreq(padded.shape[0])[:, None], np.fft.rfftfreq(padded.shape[1])[None]
    frequency = np.sqrt(rows * rows + cols * cols)
    gain = frequency * np.exp(-((frequency / cutoff) ** 4))
    white = np.fft.irfft2(np.fft.rfft2(padded) * gain, s=padded.shape)
    white = white[tuple(slice(m, n - m) for m, n in zip(margins, padded.shape, strict=True))]
    white -= white.mean()
    spread, noise = white.std(), 1e-12 * np.abs(padded).max(initial=0)
    return (white / spread if spread > noise else np.zeros_like(white)).astype(np.float32)
