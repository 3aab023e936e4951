"""Conversion of ATen operators to layers, by functions that take the operator's arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ... import layers
from ...geometry import same_padding
from .network import NetworkBuilder, TracedValue


class OperatorConverter(NamedTuple):
    """Converter of an operator to layers, the names of the layers, and the requirements on the operator's arguments."""

    function: Callable[..., Any]
    layer_names: str
    requirements: str


CONVERTERS: dict[str, OperatorConverter] = {}


def converts_to(layer_names: str, *operator_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the converter of operators to a layer."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        requirements = (function.__doc__ or "").strip().split("\n")[0]
        converter = OperatorConverter(function, layer_names, requirements)
        CONVERTERS.update({f"aten.{name}": converter for name in operator_names})
        return function

    return register


def conversion_table() -> list[tuple[str, str, list[str]]]:
    """Return rows (layers, requirements, operators)."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, converter in CONVERTERS.items():
        rows.setdefault((converter.layer_names, converter.requirements), []).append(name)
    return [(*key, names) for key, names in rows.items()]


def _count_spatial_axes(net: NetworkBuilder, x: TracedValue, expected_count: int = 0) -> int:
    """Return the number of spatial axes; reject reshaped values, and numbers other than `expected_count`, if given."""
    axis_count = len(x.shape) - 2
    if not x.matches_layer_axes or (expected_count and axis_count != expected_count):
        net.refuse(f"its input has the shape {x.shape}, but a layer takes an image (N, C, ...) or a vector")
    return axis_count


def _as_tuple(value: Any, n: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * n if len(values) == 1 else values


@converts_to("ConvLayer", *(f"conv{n}d.{kind}" for n in (1, 2, 3) for kind in ("default", "padding")))
def convolution(
    net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> TracedValue:
    """Any kernel, stride, padding, dilation and groups."""
    n = _count_spatial_axes(net, x, len(net.parameter_shape(weight)) - 2)
    out_channels, _, *kernel = net.parameter_shape(weight)
    strides, dilations = _as_tuple(stride, n), _as_tuple(dilation, n)
    pads = (0,) * n if padding == "valid" else padding
    if padding == "same":
        pads = same_padding(x.layer_shape[:-1], kernel, strides, dilations)
    elif not isinstance(padding, str):
        pads = _as_tuple(padding, n)
    layer = layers.ConvLayer(
        out_channels, tuple(kernel), strides, pads, dilation=dilations, groups=groups, bias=bias is not None
    )
    return net.append(layer, x, _weight_and_bias(weight, _channels_last, bias))


@converts_to("DeconvLayer", "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def transposed_convolution(
    net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any,
) -> TracedValue:  # fmt: skip
    """output_padding must be less than the stride."""
    n = _count_spatial_axes(net, x, len(net.parameter_shape(weight)) - 2)
    _, channels_per_group, *kernel = net.parameter_shape(weight)
    strides, pads, output_paddings, dilations = (_as_tuple(v, n) for v in (stride, padding, output_padding, dilation))
    options: dict[str, Any] = {
        "output_padding": output_paddings,
        "dilation": dilations,
        "groups": groups,
        "bias": bias is not None,
    }
    layer = layers.DeconvLayer(channels_per_group * groups, tuple(kernel), strides, pads, **options)

    def reorder(w: torch.Tensor) -> torch.Tensor:
        by_group = w.reshape(groups, -1, *w.shape[1:])  # (groups, inputs, outputs, *kernel)
        return by_group.permute(*range(3, w.dim() + 1), 1, 0, 2).reshape(*kernel, -1, channels_per_group * groups)

    return net.append(layer, x, _weight_and_bias(weight, reorder, bias))


@converts_to("FCLayer", "linear.default")
def linear(net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any) -> TracedValue:
    """Only of a vector or a flattened image; the input features of the weight are reordered."""
    if len(x.shape) != 2 or x.shape[0] != net.batch_size:
        net.refuse(f"its input has the shape {x.shape}, but a layer takes vectors (N, features)")
    out_features = net.parameter_shape(weight)[0]
    input_shape = x.layer_shape[-1:] + x.layer_shape[:-1]  # channels first

    def reorder_rows(w: torch.Tensor) -> torch.Tensor:
        return w.reshape(out_features, *input_shape).movedim(1, -1).reshape(out_features, -1).T

    layer = layers.FCLayer(out_features, bias=bias is not None)
    return net.append(layer, x, _weight_and_bias(weight, reorder_rows, bias))


def _weight_and_bias(weight: Any, transform: Any, bias: Any) -> dict[str, Any]:
    return {"weights": (weight, transform)} | ({} if bias is None else {"bias": (bias, None)})


def _channels_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.permute(*range(2, weight.dim()), 1, 0)


@converts_to(
    "BatchNormLayer", "_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default"
)
def batch_norm(
    net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float,
    eps: float, training: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Only with weight, bias and running statistics; batch statistics in training, running statistics in evaluation."""
    _count_spatial_axes(net, x)
    if training != net.training:
        net.refuse(
            "evaluation uses the statistics of the batch" if training else "training uses the running statistics"
        )
    if weight is None or bias is None:
        net.refuse("it lacks a weight or a bias")
    tensors = {"gamma": weight, "beta": bias, "mean": running_mean, "var": running_var}
    weights = {name: (tensor, None) for name, tensor in tensors.items()}
    y = net.append(layers.BatchNormLayer(momentum=momentum, eps=eps), x, weights)
    return y, None, None, running_mean, running_var


@converts_to("BatchNormLayer", "batch_norm.default")
def batch_norm_composite(
    net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float, **_: Any,
) -> Any:  # fmt: skip
    """Only with weight, bias and running statistics; batch statistics in training, running statistics in evaluation."""
    y, *_, mean, var = batch_norm(net, x, weight, bias, running_mean, running_var, momentum, eps, training)
    return (y, mean, var) if training else y


@converts_to("GroupNormLayer", "group_norm.default")
def group_norm(
    net: NetworkBuilder, x: TracedValue, num_groups: int, weight: Any, bias: Any, eps: float, **_: Any
) -> TracedValue:
    """With both weight and bias, or with neither."""
    _count_spatial_axes(net, x)
    return net.append(
        layers.GroupNormLayer(num_groups, eps=eps, affine=weight is not None), x, _norm_weights(net, weight, bias)
    )


@converts_to("GroupNormLayer", "layer_norm.default")
def layer_norm(
    net: NetworkBuilder, x: TracedValue, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float, **_: Any
) -> TracedValue:
    """Only over a whole sample; with weight and bias, only for vectors."""
    if tuple(normalized_shape) != x.shape[1:]:
        net.refuse(f"it normalises only {tuple(normalized_shape)} of {x.shape[1:]}")
    if weight is not None and len(x.layer_shape) > 1:
        net.refuse("it has a weight for each cell")
    return net.append(layers.GroupNormLayer(1, eps=eps, affine=weight is not None), x, _norm_weights(net, weight, bias))


@converts_to("InstanceNormLayer", "instance_norm.default")
def instance_norm(
    net: NetworkBuilder, x: TracedValue, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    use_input_stats: bool, momentum: float, eps: float, **_: Any,
) -> TracedValue:  # fmt: skip
    """Only without running statistics."""
    _count_spatial_axes(net, x)
    if running_mean is not None or not use_input_stats:
        net.refuse("it has running statistics")
    return net.append(layers.InstanceNormLayer(eps=eps, affine=weight is not None), x, _norm_weights(net, weight, bias))


def _norm_weights(net: NetworkBuilder, weight: Any, bias: Any) -> dict[str, Any]:
    if (weight is None) != (bias is None):
        net.refuse("it has only one of weight and bias")
    return {} if weight is None else {"gamma": (weight, None), "beta": (bias, None)}


def _fit_windows(
    net: NetworkBuilder, x: TracedValue, kernel: Any, stride: Any, padding: Any
) -> tuple[tuple[Any, ...], bool]:
    """Return kernel, stride, and padding by side for the output extent, and whether ceil_mode adds cells."""
    n = _count_spatial_axes(net, x)
    kernel_sizes = _as_tuple(kernel, n)
    strides = _as_tuple(stride or kernel, n)
    pads = _as_tuple(padding, n)
    padding_sides = []
    exceeds_padding = False
    for cells, m, k, s, p in zip(x.layer_shape, net.fake_out.shape[2:], kernel_sizes, strides, pads, strict=False):
        padding_after = p
        if (cells + 2 * p - k) // s + 1 != m:  # ceil_mode
            padding_after = max(0, (m - 1) * s + k - cells - p)
            exceeds_padding |= padding_after > p
        padding_sides.append((p, padding_after))
    return (kernel_sizes, strides, tuple(padding_sides)), exceeds_padding


@converts_to("MaxPoolingLayer", *(f"max_pool{n}d.default" for n in (1, 2, 3)))
def max_pool(
    net: NetworkBuilder, x: TracedValue, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> TracedValue:
    """Only without dilation."""
    if any(d != 1 for d in _as_tuple(dilation, 1)):
        net.refuse(f"it has dilation {tuple(dilation)}")
    windows, _ = _fit_windows(net, x, kernel_size, stride, padding)
    return net.append(layers.MaxPoolingLayer(*windows), x)


@converts_to("AvgPoolingLayer", *(f"avg_pool{n}d.default" for n in (1, 2, 3)))
def avg_pool(
    net: NetworkBuilder, x: TracedValue, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None = None,
) -> TracedValue:  # fmt: skip
    """Only without divisor_override; ceil_mode with padding only if count_include_pad=False."""
    if divisor_override is not None:
        net.refuse(f"it has divisor_override {divisor_override}")
    (kernels, strides, pads), exceeds_padding = _fit_windows(net, x, kernel_size, stride, padding)
    if exceeds_padding and any(before for before, _ in pads) and count_include_pad:
        net.refuse("with ceil_mode, it counts padding but not the cells beyond the padding")
    return net.append(layers.AvgPoolingLayer(kernels, strides, pads, count_include_pad and not exceeds_padding), x)


@converts_to(
    "AvgPoolingLayer, MaxPoolingLayer",
    *(f"adaptive_{kind}_pool{n}d.default" for kind in ("avg", "max") for n in (1, 2, 3)),
)
def adaptive_pool(net: NetworkBuilder, x: TracedValue, output_size: Any) -> Any:
    """Windows must be of equal size and evenly spaced. A flattened global mean becomes GlobalAvgPoolingLayer."""
    _count_spatial_axes(net, x)
    windows: list[tuple[int, ...]] = []
    for n, m in zip(x.layer_shape, net.fake_out.shape[2:], strict=False):
        starts = [i * n // m for i in range(m)]
        sizes = {-(-(i + 1) * n // m) - start for i, start in enumerate(starts)}
        steps = {b - a for a, b in pairwise(starts)} or {1}
        if len(sizes) > 1 or len(steps) > 1:
            net.refuse(f"mapping {n} cells to {m} needs windows of different sizes or uneven spacing")
        windows.append((*sizes, *steps))
    kernel, stride = zip(*windows, strict=True)
    if "max" in net.where.operator:
        return net.append(layers.MaxPoolingLayer(kernel, stride), x), None
    return net.append(layers.AvgPoolingLayer(kernel, stride), x, is_global_mean=set(net.fake_out.shape[2:]) == {1})


@converts_to("GlobalAvgPoolingLayer, AvgPoolingLayer", "mean.dim")
def mean(net: NetworkBuilder, x: TracedValue, dim: Any, keepdim: bool, dtype: Any) -> TracedValue:
    """Only over all cells of the image."""
    if not _count_spatial_axes(net, x) or sorted(d % len(x.shape) for d in dim or ()) != list(range(2, len(x.shape))):
        net.refuse(f"its dimensions {dim} are not the spatial dimensions")
    if keepdim:
        return net.append(layers.AvgPoolingLayer(x.layer_shape[:-1]), x, is_global_mean=True)
    return net.append(layers.GlobalAvgPoolingLayer(), x)


ACTIVATION_BY_OPERATOR: dict[str, type[layers.Activation]] = {
    "relu.default": layers.ReLU,
    "sigmoid.default": layers.Logistic,
    "tanh.default": layers.Tanh,
    "softmax.int": layers.Softmax,
}


@converts_to("ActivationLayer", *ACTIVATION_BY_OPERATOR)
def activation(net: NetworkBuilder, x: TracedValue, dim: int | None = None, **_: Any) -> TracedValue:
    """Softmax only over the channels."""
    if dim is not None and not (x.matches_layer_axes and dim % len(x.shape) == 1):
        net.refuse(f"its dimension {dim} of shape {x.shape} is not the channel dimension")
    return net.append(layers.ActivationLayer(ACTIVATION_BY_OPERATOR[net.where.operator.removeprefix("aten.")]()), x)


@converts_to("DropoutLayer", "native_dropout.default")
def dropout(net: NetworkBuilder, x: TracedValue, p: float, train: bool | None) -> tuple[Any, ...]:
    """Only in training; random numbers differ from PyTorch's, but are the same on every grid."""
    if not net.training:
        net.refuse("it also drops values in evaluation")
    return net.append(layers.DropoutLayer(p), x, identity_in_eval=True) if p else x, None


@converts_to("DropoutLayer", "dropout.default")
def dropout_composite(net: NetworkBuilder, x: TracedValue, p: float, train: bool) -> TracedValue:
    """Only in training; random numbers differ from PyTorch's, but are the same on every grid."""
    return dropout(net, x, p, train)[0] if train else x


@converts_to(
    "UpsampleLayer", *(f"{kind}{n}d.vec" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3))
)
def nearest_upsampling(net: NetworkBuilder, x: TracedValue, output_size: Any, scale_factors: Any) -> TracedValue:
    """Only by integer factors."""
    factors = _integer_factors(net, x, scale_factors)
    if max(factors) > 40 and "exact" not in net.where.operator:  # the first such inverse is 1 / 41
        net.refuse(f"PyTorch rounds the inverse of its factors {factors}, so some cells are repeated less often")
    return net.append(layers.UpsampleLayer(factors), x)


@converts_to("UpsampleLayer", "upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def linear_upsampling(
    net: NetworkBuilder, x: TracedValue, output_size: Any, align_corners: bool, scale_factors: Any
) -> TracedValue:
    """Only by integer factors, with align_corners=False."""
    if align_corners:
        net.refuse("it has align_corners=True")
    return net.append(layers.UpsampleLayer(_integer_factors(net, x, scale_factors), "bilinear"), x)


def _integer_factors(net: NetworkBuilder, x: TracedValue, scales: Any) -> tuple[int, ...]:
    n = _count_spatial_axes(net, x)
    output_extent = tuple(net.fake_out.shape[2:])
    factors = tuple(m // cells for m, cells in zip(output_extent, x.layer_shape, strict=False))
    is_exact = output_extent == tuple(cells * f for cells, f in zip(x.layer_shape, factors, strict=False))
    if not is_exact or (scales is not None and _as_tuple(list(scales), n) != factors):
        net.refuse(f"its scaling from {x.layer_shape[:-1]} to {output_extent} is not an integer factor")
    return factors


PADDING_MODE_BY_TORCH_NAME = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "wrap"}


@converts_to("PadLayer, CropLayer", "pad.default", "constant_pad_nd.default")
def pad(
    net: NetworkBuilder, x: TracedValue, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> TracedValue:
    """Only of spatial axes, in any mode; negative padding, which crops, only in mode 'constant'."""
    n = _count_spatial_axes(net, x)
    if len(pad) > 2 * n or (mode != "constant" and min(pad) < 0):
        net.refuse(f"it pads {tuple(pad)} in mode '{mode}'")
    sides = [*zip(pad[::2], pad[1::2], strict=True), *[(0, 0)] * n][:n][::-1]
    return net.append(layers.PadLayer(tuple(sides), PADDING_MODE_BY_TORCH_NAME[mode], fill=float(value or 0)), x)


@converts_to("CropLayer", "slice.Tensor")
def crop(net: NetworkBuilder, x: TracedValue, dim: int, start: int | None, end: int | None, step: int) -> TracedValue:
    """Only of spatial axes, with step 1."""
    first, last, stride = slice(start, end, step).indices(x.shape[dim])
    if (first, last, stride) == (0, x.shape[dim], 1):
        return x
    axis = dim % len(x.shape) - 2
    if axis < 0 or stride != 1 or last <= first:
        net.refuse(f"it takes [{start}:{end}:{step}] of dimension {dim} of {x.shape}")
    sides = [(0, 0)] * _count_spatial_axes(net, x)
    sides[axis] = first, x.shape[dim] - last
    return net.append(layers.CropLayer(tuple(sides)), x)


@converts_to("Sum", "add.Tensor")
def add(net: NetworkBuilder, x: TracedValue, other: Any, alpha: Any) -> TracedValue:
    """Only of two values of the same shape, with alpha=1."""
    if alpha != 1:
        net.refuse(f"it has alpha={alpha}")
    if not isinstance(other, TracedValue) or (x.shape, x.layer_shape) != (other.shape, other.layer_shape):
        net.refuse("it adds a constant or a tensor of another shape")
    return net.join_values(layers.Sum, [x, other])


@converts_to("Concat", "cat.default")
def cat(net: NetworkBuilder, tensors: Sequence[Any], dim: int) -> TracedValue:
    """Only along the channels."""
    if (
        not all(isinstance(x, TracedValue) and x.matches_layer_axes for x in tensors)
        or dim % len(tensors[0].shape) != 1
    ):
        net.refuse(f"it concatenates constants, or along dimension {dim}, which is not the channel dimension")
    if len(tensors) == 1:
        return tensors[0]
    for n in range(len(tensors), 1, -1):  # nest the branches of repeated concatenations, as in DenseNets
        joined_value = net.joined_values.get(tuple(x.step_index for x in tensors[:n]))
        if joined_value is not None:
            return cat(net, [joined_value, *tensors[n:]], dim)
    y = net.joined_values[tuple(x.step_index for x in tensors)] = net.join_values(layers.Concat, tensors)
    return y


_RESHAPING_OPERATORS = "view reshape _unsafe_view flatten.using_ints squeeze squeeze.dim squeeze.dims unsqueeze"


@converts_to("none", *(name if "." in name else f"{name}.default" for name in _RESHAPING_OPERATORS.split()))
def reshape(net: NetworkBuilder, x: TracedValue, **_: Any) -> TracedValue:
    """Only to flatten a value for a linear layer, or to restore its shape."""
    return net.reshape(x, net.fake_out.shape)


@converts_to("none", "clone.default", "alias.default", "contiguous.default")
def identity(net: NetworkBuilder, x: TracedValue, **_: Any) -> TracedValue:
    """The operator is removed."""
    return x
