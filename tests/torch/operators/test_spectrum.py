"""Fourier transforms and complex numbers on virtual ranks against a single process, in float64."""

import pytest

torch = pytest.importorskip("torch")

from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_modules, split_into_groups  # noqa: E402

GRIDS = ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2))


class SpectralConv(nn.Module):
    """Spectral convolution with a matrix for each of the lowest frequencies, as in Fourier neural operators."""

    def __init__(self, channels=3, modes=3):
        super().__init__()
        self.modes = modes
        shape = channels, channels, modes, modes
        self.low = nn.Parameter(torch.randn(shape, dtype=torch.cdouble) / 9)
        self.high = nn.Parameter(torch.randn(shape, dtype=torch.cdouble) / 9)

    def forward(self, x):
        n, c, h, w = x.shape
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(n, c, h, w // 2 + 1, dtype=torch.cdouble, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=(h, w))


class FourierOperator(nn.Module):
    """Fourier neural operator of three spectral convolutions, each added to a 1 x 1 convolution."""

    def __init__(self):
        super().__init__()
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(3))
        self.local = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nn.functional.gelu(spectral(x) + local(x))
        return x


class GlobalFilter(nn.Module):
    """Weight per frequency of tokens, stored as pairs of real numbers, as in GFNet."""

    def __init__(self, h=13, w=11, c=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(h, w // 2 + 1, c, 2))
        self.size = h, w

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        spectrum = torch.fft.rfft2(tokens.unflatten(1, self.size), dim=(1, 2), norm="ortho")
        spectrum = spectrum * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(spectrum, s=self.size, dim=(1, 2), norm="ortho").flatten(1, 2)


class AdaptiveOperator(nn.Module):
    """Block-diagonal products of channels with explicit real and imaginary parts, as in AFNO."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x):
        spectrum = torch.fft.rfft2(x.movedim(1, -1), dim=(1, 2), norm="ortho")
        a, b = self.weight
        real = nn.functional.relu(spectrum.real @ a - spectrum.imag @ b)
        imag = nn.functional.softshrink(spectrum.imag @ a + spectrum.real @ b, 0.01)
        spectrum = torch.view_as_complex(torch.stack([real, imag], -1))
        return x + torch.fft.irfft2(spectrum, s=x.shape[2:], dim=(1, 2), norm="ortho").movedim(-1, 1)


class FourierUnit(nn.Module):
    """Convolution, norm and ReLU of the spectrum, as in LaMa's fast Fourier convolution."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))

    def forward(self, x):
        spectrum = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        spectrum = (
            torch.stack((spectrum.real, spectrum.imag), -1)
            .permute(0, 1, 4, 2, 3)
            .contiguous()
            .view(x.shape[0], 6, 13, 6)
        )
        spectrum = self.layers(spectrum).view(x.shape[0], 3, 2, 13, 6).permute(0, 1, 3, 4, 2).contiguous()
        return torch.fft.irfftn(
            torch.complex(spectrum[..., 0], spectrum[..., 1]), s=x.shape[-2:], dim=(-2, -1), norm="ortho"
        )


def attend_with_rotation(x):
    """Apply rotary embeddings to cells by complex multiplication."""
    q = x[:, :2].flatten(2).transpose(1, 2)
    angles = torch.outer(torch.arange(q.shape[1], dtype=q.dtype), torch.ones(1, dtype=q.dtype) / 3)
    rotated = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    q = torch.view_as_real(rotated).flatten(2)
    return (q @ q.mT).softmax(-1) @ q


class ComplexProducts(nn.Module):
    """Products with complex weights and conjugates, and a global mean."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 4, dtype=torch.cdouble))
        self.phase = nn.Parameter(torch.randn(3, 1, 1, dtype=torch.cdouble))

    def forward(self, x):
        z = torch.complex(x, x.flip(2)) * self.phase
        y = z.conj() @ self.weight
        y = y - y.mean() + (z * z.conj()).sum((2, 3), keepdim=True)
        return y.abs() + y.angle().sin() + y.real * y.imag.mean(1, keepdim=True) + z.norm(dim=(2, 3), keepdim=True)


MODULES = {
    "Fourier neural operator": FourierOperator,
    "global filter": GlobalFilter,
    "adaptive": AdaptiveOperator,
    "Fourier unit": FourierUnit,
    "rotary embedding": lambda: FunctionModule(attend_with_rotation),
    "mixed": ComplexProducts,
    "fft of one dimension, longer": lambda: FunctionModule(lambda x: torch.fft.fft(x, n=14, dim=2).abs()),
    "fft of one dimension, shorter": lambda: FunctionModule(lambda x: torch.fft.rfft(x, n=8, norm="forward").abs()),
    "channels": lambda: FunctionModule(lambda x: torch.fft.fftn(x, dim=(1, 3)).real),
    "all dimensions": lambda: FunctionModule(lambda x: torch.fft.irfftn(torch.fft.fftn(x)[..., :6] ** 2, s=x.shape)),
    "Hermitian": lambda: FunctionModule(lambda x: torch.fft.hfft(torch.fft.ihfft(x, dim=2), 13, dim=2)),
    "shifted": lambda: FunctionModule(
        lambda x: torch.fft.ifft2(torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft2(x), (2, 3))[..., 1:, :])).imag
    ),
    "high pass": lambda: FunctionModule(
        lambda x: torch.fft.ifft2(torch.fft.fft2(x) * (torch.fft.fftfreq(11).abs() > 0.2)).real
    ),
    "phase only": lambda: FunctionModule(lambda x: torch.fft.ifft2(torch.exp(1j * torch.fft.fft2(x).angle())).real),
    "complex output": lambda: FunctionModule(lambda x: torch.fft.rfft2(x)),
    "variance of spectra": lambda: FunctionModule(lambda x: torch.fft.fft2(x).var((2, 3)) + torch.fft.fft2(x).std()),
    "frames": lambda: FunctionModule(
        lambda x: torch.stft(
            x[:, 0].flatten(1), 16, 5, window=torch.hann_window(16).double(), return_complex=True
        ).abs()
    ),
    "frames, short window": lambda: FunctionModule(
        lambda x: torch.stft(x[0, :, 0], 8, 2, 5, center=False, normalized=True, return_complex=True).abs()
    ),
    "flattened cells": lambda: FunctionModule(lambda x: torch.fft.rfft(x.flatten(2)).abs() + x.flatten(1).mean()),
}


@pytest.mark.parametrize("names", split_into_groups(MODULES), ids=lambda names: names[0])
@pytest.mark.long
def test_spectra_match_single_process(names):
    torch.manual_seed(0)
    check_modules({name: MODULES[name]() for name in names}, (2, 3, 13, 11), grids=select_grids(GRIDS))
