"""Fourier transforms, and complex numbers as pairs of real numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..ir.graph import ACCUMULATION_DTYPES, Value
from ..ir.layout import replace_dim
from ..ir.registry import rule
from ..lowering.lowering import Lowering


@rule("aten.view_as_real.default")
def view_as_real(lowering: Lowering, x: Value) -> Value:
    """Separate real and imaginary parts locally, in a new last dimension."""
    layout = (*x.layout, (Atom(2),))
    return lowering.local(lambda a: torch.view_as_real(a.resolve_conj()), [x], layout, lowering.fake_out.dtype)


@rule("aten.view_as_complex.default")
def view_as_complex(lowering: Lowering, x: Value) -> Value:
    """Combine real and imaginary parts, the indices of the last dimension, locally."""
    x = lowering.gather(x, [-1])
    run = lambda a: torch.view_as_complex(a.contiguous())  # noqa: E731  (strides may differ from those in one process)
    return lowering.local(run, [x], x.layout[:-1], lowering.fake_out.dtype)


@rule(*(f"aten.fft_{name}{dims}.default" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for dims in ("", "2", "n")))  # fmt: skip
def fft(lowering: Lowering, **_: object) -> Value:
    """Gather one dimension at a time, while others are partitioned."""
    return lowering.decompose(builtin_only=True) or lowering.refuse()


@rule("aten._fft_c2c.default")
def complex_to_complex(lowering: Lowering, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    """Gather one dimension at a time, while others are partitioned."""
    for d in dim:
        run = partial(torch._fft_c2c, dim=[d], normalization=normalization, forward=forward)
        x = _transform_dim(lowering, x, d, x.shape[d], run, x.dtype)
    return x


@rule("aten._fft_r2c.default")
def real_to_complex(lowering: Lowering, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    """Gather one dimension at a time, while others are partitioned."""
    *other_dims, last_dim = dim

    def run(a: torch.Tensor) -> torch.Tensor:
        if a.device.type == "cpu":  # as autocast does: transforms on CPUs have no 16-bit kernels
            a = a.to(ACCUMULATION_DTYPES.get(a.dtype, a.dtype))
        return torch._fft_r2c(a, dim=[last_dim], normalization=normalization, onesided=onesided)

    x = _transform_dim(lowering, x, last_dim, lowering.fake_out.shape[last_dim], run, lowering.fake_out.dtype)
    return complex_to_complex(lowering, x, other_dims, normalization, True)


@rule("aten._fft_c2r.default")
def complex_to_real(lowering: Lowering, x: Value, dim: Sequence[int], normalization: int, last_dim_size: int) -> Value:
    """Gather one dimension at a time, while others are partitioned."""
    *other_dims, last_dim = dim
    x = complex_to_complex(lowering, x, other_dims, normalization, False)
    run = partial(torch._fft_c2r, dim=[last_dim], normalization=normalization, last_dim_size=last_dim_size)
    return _transform_dim(lowering, x, last_dim, last_dim_size, run, lowering.fake_out.dtype)


@rule("aten.stft.default")
def stft(
    lowering: Lowering, x: Value, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Value | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Value:  # fmt: skip
    """Transform each rank's own frames of the signal, after a halo exchange."""
    window_length = n_fft if win_length is None else win_length
    left_pad = (n_fft - window_length) // 2
    is_onesided, norm = onesided is not False, "ortho" if normalized else None

    def run(a: torch.Tensor, *windows: torch.Tensor) -> torch.Tensor:
        frames = a.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length)
        frames = frames.narrow(-1, left_pad, window_length)
        frames = F.pad(frames * windows[0] if windows else frames, (left_pad, n_fft - window_length - left_pad))
        spectra = (torch.fft.rfft(frames, norm=norm) if is_onesided else torch.fft.fft(frames, norm=norm)).mT
        return spectra if return_complex else torch.view_as_real(spectra)

    if align_to_window or x.dtype.is_complex:
        lowering.refuse("align_to_window and complex input are not supported")
    return lowering.trace_and_lower([x] if window is None else [x, window], run) or lowering.refuse()


def _transform_dim(
    lowering: Lowering, x: Value, dim: int, extent: int, run: Callable[..., torch.Tensor], dtype: torch.dtype
) -> Value:
    """Return run(x) along one gathered dimension, which may be resized; the result is partitioned as x was."""
    dim, old_layout = dim % len(x.shape), x.layout
    gathered = lowering.partition_as(x, lowering.reshard_away_from(old_layout, [dim]))
    result = lowering.local(run, [gathered], replace_dim(gathered.layout, dim, Atom(extent)), dtype)
    if extent != x.shape[dim]:
        axis = next((atom.axis for atom in old_layout[dim] if atom.axis is not None), None)
        old_layout = replace_dim(old_layout, dim, lowering.mesh.even_atom(extent, axis))
    return lowering.partition_as(result, old_layout)
