"""Normalisation with statistics of the global images or of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..exchange.channel import memory_format_of
from ..exchange.normalisation import MomentsSpec
from ..ir.graph import Value
from ..ir.layout import axes_of
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from ..lowering.norm_gradients import convert_gradient_format
from .reduce import mean_and_deviations, sum_over_dims

MaybeValue = Value | None
_REPLICATED_ARGUMENTS = ("weight", "bias", "running_mean", "running_var")


def normalise_groups(
    lowering: Lowering, x: Value, groups: int | None, weight: MaybeValue, bias: MaybeValue, eps: float
) -> tuple[Value, Value, Value, int]:
    """Return x (N, C, ...) normalised and scaled, mean and variance of each group, and the size of a group.

    Parameters
    ----------
    groups : int or None
        Number of groups of channels, normalised per sample; None: per channel, over all samples.
    """
    dims = [dim for dim in range(len(x.shape)) if dim != 1 and (dim or groups is None)]
    group_size = prod(x.shape[d] for d in dims) * (1 if groups is None else x.shape[1] // groups)
    group_dim = x.layout[1] if groups is None else (*x.layout[0], Atom(groups))
    moments = MomentsSpec(groups, group_size, eps, axes_of(x.layout[dim] for dim in dims))
    return *lowering.normalise(x, weight, bias, moments, (group_dim,)), group_size


def scale_and_shift(lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, dims: Sequence[int]) -> Value:
    """Return x * weight + bias, where weight and bias have the given dimensions of x."""
    shape = [n if at in dims else 1 for at, n in enumerate(x.shape)]
    for value, run in ((weight, torch.mul), (bias, torch.add)):
        if value is not None:
            aligned = lowering.align_for_broadcast(lowering.reshape(value, shape), x.layout, x.axes)
            x = lowering.local(run, [x, aligned], x.layout)
    return x


def _gather_or_partition_channels(lowering: Lowering, x: Value, *per_channel: MaybeValue) -> list[Any]:
    """Return x and the given values with all channels, or with this rank's own channels."""
    if not lowering.partitions_channels or lowering.is_whole(x, 1):
        return [lowering.gather(x, [1]), *per_channel]
    own_channels = (value and lowering.partition_as(value, (x.layout[1],)) for value in per_channel)
    return [x, *own_channels]


@rule("aten.batch_norm.default", applies_if_replicated=True, whole=_REPLICATED_ARGUMENTS)
def batch_norm(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, running_mean: MaybeValue,
    running_var: MaybeValue, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Value | tuple[Value, ...]:  # fmt: skip
    """In training, compute moments of each channel over all tiles and replicas."""
    args = x, weight, bias, running_mean, running_var
    if not training:
        return batch_norm_inference(lowering, *args, momentum, eps)[0]
    if running_mean is None:
        x, weight, bias = _gather_or_partition_channels(lowering, x, weight, bias)
        return normalise_groups(lowering, x, None, weight, bias, eps)[0]
    y, _, _, *running_statistics = functional_batch_norm(lowering, *args, training, momentum, eps)
    return y, *running_statistics


@rule("aten._native_batch_norm_legit_functional.default", applies_if_replicated=True, whole=_REPLICATED_ARGUMENTS)
def functional_batch_norm(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, running_mean: Value, running_var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Compute moments of each channel over all tiles and replicas."""
    if not training:
        y, *_ = batch_norm_inference(lowering, x, weight, bias, running_mean, running_var, momentum, eps)
        return y, None, None, running_mean, running_var
    x, weight, bias, running_mean, running_var = _gather_or_partition_channels(
        lowering, x, weight, bias, running_mean, running_var
    )
    y, mean, variance, group_size = normalise_groups(lowering, x, None, weight, bias, eps)
    lowering.mark_constants([mean, variance], [False, False])  # PyTorch has no gradient of statistics
    running = running_mean, running_var
    return y, mean, None, *_update_running_statistics(lowering, running, (mean, variance), momentum, group_size)


@rule("aten._batch_norm_with_update_functional.default", applies_if_replicated=True, whole=_REPLICATED_ARGUMENTS)
def batch_norm_with_update(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, running_mean: Value, running_var: Value,
    momentum: float, eps: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Compute moments of each channel over all tiles and replicas."""
    args = x, weight, bias, running_mean, running_var
    y, _, _, *running_statistics = functional_batch_norm(lowering, *args, True, momentum, eps)
    return y, None, None, None, *running_statistics


def _update_running_statistics(
    lowering: Lowering, running: Sequence[Value], current: Sequence[Value], momentum: float, group_size: int,
    samples: int = 1,
) -> list[Value]:  # fmt: skip
    """Return the running statistics, updated by those of a pass, `current`, which are sums over `samples` samples."""
    unbiasing_factor = group_size / max(1, group_size - 1)
    return [
        lowering.local(partial(_moving_mean, momentum, momentum * factor / samples), [old, new], new.layout, old.dtype)
        for old, new, factor in zip(running, current, (1, unbiasing_factor), strict=True)
    ]


def _moving_mean(momentum: float, new_weight: float, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return ((1 - momentum) * old).add_(new.detach(), alpha=new_weight)


@rule("aten._native_batch_norm_legit_no_training.default", whole=_REPLICATED_ARGUMENTS)
def batch_norm_inference(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, running_mean: MaybeValue,
    running_var: MaybeValue, momentum: float, eps: float,
) -> tuple[Value, None, None]:  # fmt: skip
    """Normalise locally with the running statistics."""
    args = _gather_or_partition_channels(lowering, x, running_mean, running_var, weight, bias)
    x = args[0]

    def run(
        a: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None
    ) -> torch.Tensor:
        y = F.batch_norm(a, m, v, w, b, False, 0.0, eps)
        convert_gradient_format(y, memory_format_of(a))
        return y

    return lowering.local(run, args, x.layout), None, None


@rule("aten.instance_norm.default", applies_if_replicated=True, whole=_REPLICATED_ARGUMENTS)
def instance_norm(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, running_mean: MaybeValue,
    running_var: MaybeValue, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Value | tuple[Value, ...]:  # fmt: skip
    """Compute moments of each channel and sample over all tiles; average them over samples for running statistics."""
    if not use_input_stats:
        return batch_norm_inference(lowering, x, weight, bias, running_mean, running_var, momentum, eps)[0]
    if not x.axes and running_mean is None and x.shape[0] > 1:  # PyTorch's gradients of one sample may be wrong
        return lowering.compute_replicated()
    x = lowering.gather(x, [1])
    y, mean, variance, group_size = normalise_groups(lowering, x, x.shape[1], weight, bias, eps)
    if running_mean is None or running_var is None:
        return y
    statistics = (lowering.reshape(value, x.shape[:2]) for value in (mean, variance))
    sums = [sum_over_dims(lowering, lambda a, d, k: a.sum(d, k), [each], [0], keepdim=False) for each in statistics]
    running = running_mean, running_var
    return y, *_update_running_statistics(lowering, running, sums, momentum, group_size, x.shape[0])


@rule("aten.group_norm.default", "aten.native_group_norm.default", whole=("weight", "bias"))
def group_norm(
    lowering: Lowering, x: Value, weight: MaybeValue, bias: MaybeValue, eps: float, num_groups: int = 0,
    group: int = 0, **_: object,
) -> Value | tuple[Value, ...]:  # fmt: skip
    """Compute moments of each group of channels and sample over all tiles."""
    x = lowering.gather(x, [1])
    return lowering.as_first_result(normalise_groups(lowering, x, num_groups or group, weight, bias, eps)[0])


@rule("aten.layer_norm.default", "aten.native_layer_norm.default", whole=("weight", "bias"))
def layer_norm(
    lowering: Lowering, x: Value, normalized_shape: Sequence[int], weight: MaybeValue, bias: MaybeValue, eps: float,
    **_: object,
) -> Value | tuple[Value, ...]:  # fmt: skip
    """Compute moments over the last dimensions, on all ranks among which these are partitioned."""
    ndim = len(x.shape)
    dims = list(range(ndim - len(normalized_shape), ndim))
    if all(lowering.is_whole(x, dim) for dim in dims):
        shape = tuple(normalized_shape)
        y = lowering.local(lambda a, w, b: F.layer_norm(a, shape, w, b, eps), [x, weight, bias], x.layout)
        return lowering.as_first_result(y)
    group_size = prod(x.shape[d] for d in dims)
    squares, deviations = mean_and_deviations(lowering, lowering.widen(x), dims)[1:]
    scale = lowering.local(lambda s: torch.rsqrt(s / group_size + eps), [squares], squares.layout)
    y = scale_and_shift(lowering, lowering.local(torch.mul, [deviations, scale], x.layout), weight, bias, dims)
    return lowering.as_first_result(lowering.convert_dtype(y, x.dtype))


@rule("aten.rms_norm.default", whole=("weight",))
def rms_norm(
    lowering: Lowering, x: Value, normalized_shape: Sequence[int], weight: MaybeValue, eps: float | None
) -> Value:
    """Sum squares over the last dimensions, on all ranks among which these are partitioned."""
    ndim = len(x.shape)
    dims = list(range(ndim - len(normalized_shape), ndim))
    if not all(lowering.is_whole(x, dim) for dim in dims):
        group_size, epsilon = prod(normalized_shape), torch.finfo(x.dtype).eps if eps is None else eps
        wide_x = lowering.widen(x)
        squares = sum_over_dims(lowering, lambda a, d, k: (a * a).sum(d, k), [wide_x], dims)
        scale = lowering.local(lambda s: torch.rsqrt(s / group_size + epsilon), [squares], squares.layout)
        y = scale_and_shift(lowering, lowering.local(torch.mul, [wide_x, scale], x.layout), weight, None, dims)
        return lowering.convert_dtype(y, x.dtype)
    return lowering.local(lambda a, w: F.rms_norm(a, tuple(normalized_shape), w, eps), [x, weight], x.layout)
