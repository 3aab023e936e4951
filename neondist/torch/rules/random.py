"""Random numbers keyed by the global index: identical on every grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import Atom, Place
from ..ir.errors import CaptureError
from ..ir.graph import Value
from ..ir.layout import Layout, axes_of, replicated
from ..ir.registry import CAPTURE_REPLACEMENTS, rule
from ..lowering.lowering import Lowering


def hash_to_uniform(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each index, in float64: splitmix64 (Steele et al. 2014) of key and index."""
    z = index * -7046029254386353131 + key  # in int64, which wraps around
    z = (z ^ _logical_right_shift(z, 30)) * -4658895280553007687
    z = (z ^ _logical_right_shift(z, 27)) * -7723592293110705685
    z = z ^ _logical_right_shift(z, 31)
    return _logical_right_shift(z, 11).to(torch.float64) * 2.0**-53


def _logical_right_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw_uniform(lowering: Lowering, layout: Layout) -> Value:
    """Return uniform random numbers keyed by the operator, the pass and the global index."""
    seed, draw_number = lowering.random_key()

    def run(place: Place, seed: torch.Tensor) -> torch.Tensor:
        index = torch.zeros((), dtype=torch.int64, device=seed.device)
        for dim in layout:
            dim_index = torch.zeros(1, dtype=torch.int64, device=seed.device)
            for atom in dim:
                atom_indices = torch.arange(*atom.range(place), device=seed.device)
                dim_index = (dim_index[:, None] * atom.extent + atom_indices).reshape(-1)
            index = index[..., None] * prod(atom.extent for atom in dim) + dim_index
        return hash_to_uniform(seed + draw_number * 1000003, index)

    return lowering.without_gradient(lowering.local(run, [seed], layout, torch.float64, at=lambda place: place))


def apply_dropout(p: float, a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return a with its elements set to zero where u < p, and the others divided by 1 - p."""
    return a * (u >= p).to(a.dtype) / (1 - p) if p < 1 else a * 0


@rule("aten.native_dropout.default", "aten.dropout.default", "aten.feature_dropout.default",
      applies_if_replicated=True)  # fmt: skip
def dropout(lowering: Lowering, x: Value, p: float, train: bool = True) -> Value | tuple[Value, None]:
    """Drop elements or whole channels locally, with a mask keyed by the global index."""
    if train and p != 0:
        x = lowering.local(partial(apply_dropout, p), [x, _draw_for_dropout(lowering, x)], x.layout)
    return lowering.as_first_result(x)


def _draw_for_dropout(lowering: Lowering, x: Value) -> Value:
    """Return a uniform random number for each element or, in feature dropout, for each channel of each sample."""
    if "feature" not in str(lowering.target):
        return draw_uniform(lowering, x.layout)
    draws = draw_uniform(lowering, (*x.layout[:2], *replicated([1] * (len(x.shape) - 2))))
    return lowering.sum_gradient(draws, x.axes)


@rule("aten.alpha_dropout.default", "aten.feature_alpha_dropout.default", applies_if_replicated=True)
def alpha_dropout(lowering: Lowering, x: Value, p: float, train: bool) -> Value:
    """Drop elements or channels locally, preserving mean and variance (Klambauer et al. 2017)."""
    if not train or p == 0:
        return x
    draws = _draw_for_dropout(lowering, x)
    selu_scale_alpha = 1.7580993408473766
    scale = 1 / sqrt((selu_scale_alpha**2 * p + 1) * (1 - p)) if p < 1 else 0.0

    def run(a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        keep_mask = (u >= p).to(a.dtype)
        return a * keep_mask * scale + (keep_mask - 1 + p) * (selu_scale_alpha * scale)

    return lowering.local(run, [x, draws], x.layout)


@rule("aten.rrelu.default", applies_if_replicated=True)
def rrelu(
    lowering: Lowering, x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: object
) -> Value:
    """Draw slopes locally, keyed by the global index; in evaluation, use their mean."""
    if not training:
        return lowering.local(lambda a: F.leaky_relu(a, (lower + upper) / 2), [x], x.layout)

    def run(a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.where(a < 0, a * (lower + (upper - lower) * u).to(a.dtype), a)

    return lowering.local(run, [x, draw_uniform(lowering, x.layout)], x.layout)


@rule("aten.bernoulli.p", "aten.bernoulli_.float", applies_if_replicated=True)
def bernoulli(lowering: Lowering, x: Value, p: float = 0.5, generator: object = None) -> Value:
    """Draw ones with probability p, and zeros otherwise, locally, keyed by the global index."""
    return _draw_like(lowering, x, lambda u: u < p)


@rule("aten.multinomial.default", applies_if_replicated=True)
def multinomial(
    lowering: Lowering, x: Value, num_samples: int, replacement: bool = False, generator: object = None
) -> Value:
    """Gather the categories, and draw samples by numbers keyed by the global index."""
    x = lowering.gather(x, [len(x.shape) - 1])
    layout = (*x.layout[:-1], (Atom(num_samples),))

    def run(a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        if not replacement:  # in the order of exponential waiting times with these rates
            return (a / -torch.log1p(-u)).topk(num_samples).indices
        cumsum = a.cumsum(-1)
        indices = torch.searchsorted(cumsum, (u * cumsum[..., -1:]).to(cumsum.dtype), right=True)
        return indices.clamp(max=a.shape[-1] - 1)

    draws = draw_uniform(lowering, layout if replacement else x.layout)
    return lowering.without_gradient(lowering.local(run, [x, draws], layout, torch.int64))


@rule("aten.rand_like.default", "aten.rand.default", "aten.uniform.default", applies_if_replicated=True)
def rand(lowering: Lowering, x: Value | None = None, to: float = 1.0, **options: Any) -> Value:
    """Draw uniform numbers locally, keyed by the global index."""
    low = options.get("from", 0.0)
    return _draw_like(lowering, x, lambda u: low + (to - low) * u)


@rule("aten.randint.default", "aten.randint.low", "aten.randint_like.default", "aten.randint_like.low_dtype",
      applies_if_replicated=True)  # fmt: skip
def randint(lowering: Lowering, x: Value | None = None, low: int = 0, high: int = 1, **_: object) -> Value:
    """Draw integers locally, keyed by the global index."""
    return _draw_like(lowering, x, lambda u: low + (u * (high - low)).floor())


def _draw_like(lowering: Lowering, x: Value | None, run: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Return the results of the current operator, run(u) of uniform numbers u, partitioned like x if it is given."""
    layout, dtype = _layout_of_draws(lowering, x), lowering.fake_out.dtype
    return lowering.local(lambda u: run(u).to(dtype), [draw_uniform(lowering, layout)], layout, dtype)


def traceable_random(x: torch.Tensor, *bounds: int | None, generator: Any = None, **named: int | None) -> torch.Tensor:
    """Draw integers in place, like torch.Tensor.random_, whose argument `from` torch.export cannot record."""
    interval = (*bounds, *named.values())
    if not interval:
        return x.random_(generator=generator)
    low, high = interval if len(interval) > 1 else (0, *interval)
    if low is None or high is None or low >= high:
        raise CaptureError(f"random_{interval}: expected a lower bound and a larger upper bound")
    return x.copy_(torch.randint_like(x, low, high))


CAPTURE_REPLACEMENTS[torch.Tensor.random_] = traceable_random


@rule("aten.randperm.default", applies_if_replicated=True)
def randperm(lowering: Lowering, **_: object) -> Value:
    """Sort uniform numbers, the same on every rank."""
    return _draw_like(lowering, None, torch.argsort)


@rule("aten.randn_like.default", "aten.randn.default", "aten.normal_functional.default", "aten.normal.float_float",
      "aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor",
      applies_if_replicated=True)  # fmt: skip
def randn(
    lowering: Lowering, x: Value | None = None, mean: Value | float = 0.0, std: Value | float = 1.0, **_: object
) -> Value:
    """Draw normal numbers locally, keyed by the global index (Box and Muller 1958)."""
    dtype = lowering.fake_out.dtype
    params = [value for value in (mean, std) if isinstance(value, Value)]
    layout = lowering.pointwise_layout([value.layout for value in params]) if params else _layout_of_draws(lowering, x)
    u, v = draw_uniform(lowering, layout), draw_uniform(lowering, layout)

    def run(u: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        remaining_tensors = iter(tensors)
        m, s = (next(remaining_tensors).detach() if isinstance(value, Value) else value for value in (mean, std))
        drawn = (m + s * torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * torch.pi * v)).to(dtype)
        for a in tensors:  # the gradients of means and deviations are zeros, as in PyTorch
            drawn = torch.where(false, a, drawn)
        return drawn

    false = torch.tensor(False)
    args = [u, v, *(lowering.align_for_broadcast(value, layout, axes_of(layout)) for value in params)]
    return lowering.local(run, args, layout, dtype)


def _layout_of_draws(lowering: Lowering, x: Value | None) -> Layout:
    return x.layout if x is not None else replicated(lowering.fake_out.shape)
