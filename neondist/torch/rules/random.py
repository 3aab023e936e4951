"""Random numbers, keyed by the global index: the same for every grid."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from ..layout import Layout, whole
from ..registry import rule


def uniform(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a number of [0, 1) for each index, in float64; splitmix64 (Steele et al. 2014) of key and index."""
    z = index * -7046029254386353131 + key  # in int64, which wraps around
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).to(torch.float64) * 2.0**-53


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def numbers(lowering: Any, layout: Layout) -> Any:
    """Return a value of uniform numbers, each keyed by this operator, the pass and its global index."""
    place, (key, number) = lowering.place, lowering.random_key()
    ranges = [[atom.range(place) for atom in dim] for dim in layout]
    extents = [[atom.extent for atom in dim] for dim in layout]

    def run(seed: torch.Tensor) -> torch.Tensor:
        index = torch.zeros((), dtype=torch.int64, device=seed.device)
        for dims, sizes in zip(ranges, extents, strict=True):
            along = torch.zeros(1, dtype=torch.int64, device=seed.device)
            for (lo, hi), extent in zip(dims, sizes, strict=True):
                along = (along[:, None] * extent + torch.arange(lo, hi, device=seed.device)).reshape(-1)
            index = index[..., None] * prod(sizes) + along
        return uniform(seed + number * 1000003, index)

    found = lowering.local(run, [key], layout, torch.float64)
    found.kind = "constant"
    return found


def _dropped(p: float, a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return a * (u >= p).to(a.dtype) / (1 - p) if p < 1 else a * 0


@rule("aten.native_dropout.default", "aten.dropout.default", always=True)
def dropout(lowering: Any, x: Any, p: float, train: bool = True) -> Any:
    """Local; whether a number is dropped depends on its global index."""
    several = "native" in str(lowering.target)
    if not train or p == 0:
        return (x, None) if several else x
    draws = numbers(lowering, x.layout)
    y = lowering.local(partial(_dropped, p), [x, draws], x.layout)
    return (y, None) if several else y


@rule("aten.feature_dropout.default", always=True)
def feature_dropout(lowering: Any, x: Any, p: float, train: bool) -> Any:
    """Local; whole channels are dropped."""
    if not train or p == 0:
        return x
    layout = (*x.layout[:2], *whole([1] * (len(x.shape) - 2)))
    draws = numbers(lowering, layout)
    return lowering.local(partial(_dropped, p), [x, lowering.enter(draws, x.axes)], x.layout)


@rule("aten.bernoulli.p", "aten.bernoulli_.float", always=True)
def bernoulli(lowering: Any, x: Any, p: float = 0.5, generator: Any = None) -> Any:
    """Local; 1 with probability p, by the global index."""
    dtype = x.dtype
    draws = numbers(lowering, x.layout)
    return lowering.local(lambda u: (u < p).to(dtype), [draws], x.layout, dtype)


@rule("aten.rand_like.default", "aten.rand.default", always=True)
def rand(lowering: Any, x: Any = None, **_: Any) -> Any:
    """Local; uniform, by the global index."""
    out = lowering.out
    layout = x.layout if x is not None else whole(out.shape)
    return lowering.local(lambda u: u.to(out.dtype), [numbers(lowering, layout)], layout, out.dtype)


@rule("aten.randn_like.default", "aten.randn.default", always=True)
def randn(lowering: Any, x: Any = None, **_: Any) -> Any:
    """Local; normal, by the global index (Box and Muller 1958)."""
    out = lowering.out
    layout = x.layout if x is not None else whole(out.shape)
    first, second = numbers(lowering, layout), numbers(lowering, layout)

    def run(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * torch.pi * v)).to(out.dtype)

    return lowering.local(run, [first, second], layout, out.dtype)
