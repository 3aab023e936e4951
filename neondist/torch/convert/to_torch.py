"""Conversion of models of neondist layers to PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import ConfigError
from ...layers import Concat, Node, Sequential, Sum
from ...models import Model
from ...registry import serial_class

TensorsByName = Mapping[str, torch.Tensor]
Shape = tuple[int, ...]


def to_torch(model: Model) -> nn.Module:
    """Convert a model to an equivalent PyTorch module, with copies of its weights.

    The module maps (N, C, *spatial) to (N, C', *spatial') or (N, features), and agrees with the model in training and
    evaluation, including running statistics; only dropout draws different random numbers. It shares no memory with the
    model, runs in a single process, and can be exported with `torch.onnx.export`. A chain of layers is converted to an
    nn.Sequential. Collective.

    Parameters
    ----------
    model : Model
        A built model.

    Raises
    ------
    ConfigError
        A layer has no counterpart in PyTorch; the message names the layer.
    """
    state = model.state()
    return module_with_weights(model, model.input_shape, state)


def module_with_weights(model: Model, input_shape: Shape, state: Mapping[str, Any]) -> nn.Module:
    """Return the PyTorch module of a model, with the given arrays as weights; the model need not be built."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    return _convert_chain(model.layers, input_shape, tensors)


class SumModule(nn.Module):
    """Sum of the results of branches."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return reduce(torch.add, [branch(x) for branch in self.branches])


class ConcatModule(SumModule):
    """Concatenation of the results of branches along the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the concatenation."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class L2Pool(nn.Module):
    """Root of the sum of squares over each window, with gradient zero instead of NaN at zero."""

    def __init__(self, kernel: Shape, stride: Shape) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the roots."""
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(self.kernel) - 1]
        squares = pool(x * x, self.kernel, self.stride) * prod(self.kernel)
        return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


class AvgPoolIgnoringPadding(nn.Module):
    """Mean over the cells of each window that are inside the image."""

    def __init__(self, pad: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.pad, self.pool = pad, pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the means."""
        return self.pool(self.pad(x)) / self.pool(self.pad(torch.ones_like(x[:1, :1])))


class LocalContrast(nn.Module):
    """(x - local mean) / max(m, local deviation); m is min_deviation or, if None, the sample's mean deviation."""

    def __init__(self, taps: Sequence[Sequence[float]], pad: Sequence[nn.Module], min_deviation: float | None) -> None:
        super().__init__()
        self.taps, self.pad, self.min_deviation = taps, nn.Sequential(*pad), min_deviation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised image."""
        v = x - self.mean(x)
        squares = self.mean(v * v)
        sigma = torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)
        if self.min_deviation is None:
            min_sigma = sigma.mean(list(range(2, x.dim())), keepdim=True)
        else:
            min_sigma = sigma.new_tensor(self.min_deviation)
        divisor = torch.maximum(sigma, min_sigma)
        return v / torch.where(divisor > 0, divisor, torch.inf)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean over each window and all channels."""
        mean = self.pad(x.mean(1, keepdim=True))
        n = len(self.taps)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        for axis, taps in enumerate(self.taps):
            mean = convolve(mean, mean.new_tensor(taps).reshape(1, 1, *(-1 if axis == at else 1 for at in range(n))))
        return mean


class LocalFilters(nn.Module):
    """Separate filters for each cell, or for each block of cells."""

    def __init__(
        self, arrays: TensorsByName, kernel: Shape, stride: Shape, pad: Sequence[nn.Module], block_extent: Shape
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(arrays["weights"])
        self.bias = nn.Parameter(arrays["bias"].movedim(-1, 0)) if "bias" in arrays else None
        self.kernel, self.stride, self.pad, self.block_extent = kernel, stride, nn.Sequential(*pad), block_extent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return each cell's filter applied to its window."""
        windows = self.pad(x)
        n = len(self.kernel)
        weights: torch.Tensor = self.weight
        for axis, (kernel, stride) in enumerate(zip(self.kernel, self.stride, strict=True)):
            windows = windows.unfold(2 + axis, kernel, stride)  # finally (N, C, *spatial, *kernel)
        output_extent = windows.shape[2 : 2 + n]
        for axis, (block, count) in enumerate(zip(self.block_extent, output_extent, strict=True)):
            if block > 1:
                weights = weights.repeat_interleave(block, axis).narrow(axis, 0, count)
        windows = windows.movedim((0, 1), (n, -1)).flatten(n + 1)  # (*spatial, N, windows)
        y = torch.matmul(windows, weights.flatten(n, -2)).movedim((-2, -1), (0, 1))
        return y if self.bias is None else y + self.bias


def _convert_chain(nodes: Sequence[Node], shape: Shape, state: TensorsByName) -> nn.Sequential:
    modules: list[nn.Module] = []
    for node in nodes:
        modules += _convert_node(node, shape, state)
        shape = node.output_shape_for(shape)
    return nn.Sequential(*modules)


def _convert_node(node: Any, shape: Shape, state: TensorsByName) -> Sequence[nn.Module]:
    """Return the modules of a layer or a container, for an input of this shape."""
    layer_class = serial_class(type(node))
    if layer_class is Sequential:
        return list(_convert_chain(node.layers, shape, state))
    if layer_class in (Sum, Concat):
        branches = [_convert_chain([branch], shape, state) for branch in node.layers]
        return [SumModule(branches) if layer_class is Sum else ConcatModule(branches)]
    prefix = f"{node.name}/"
    activation = getattr(node, "activation", None)
    arrays = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
    convert_layer = LAYER_CONVERTERS.get(layer_class.__name__)
    create_activation = ACTIVATION_MODULES.get(type(activation).__name__)
    if convert_layer is None or create_activation is None or len(shape) > 4:
        name = type(node if convert_layer is None else activation).__name__
        raise ConfigError(f"layer '{node.name}': PyTorch has no equivalent of {name} for shape {shape}; replace it")
    return [*convert_layer(node, shape, arrays), *create_activation()]


ACTIVATION_MODULES: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "NoneType": lambda: [],
    "Identity": lambda: [],
    "ReLU": lambda: [nn.ReLU()],
    "Logistic": lambda: [nn.Sigmoid()],
    "Tanh": lambda: [nn.Tanh()],
    "Softmax": lambda: [nn.Softmax(1)],
}


def _torch_class(class_prefix: str, shape: Shape) -> Any:
    """Return PyTorch's class for images of a shape, such as nn.Conv2d."""
    return getattr(nn, f"{class_prefix}{max(1, len(shape) - 1)}d")


def _load_module(module_class: Any, *args: Any, weights: TensorsByName, **options: Any) -> nn.Module:
    """Return a module with copies of arrays, without drawing random numbers."""
    dtype = next(iter(weights.values())).dtype if weights else None
    module: nn.Module = nn.utils.skip_init(module_class, *args, dtype=dtype, **options)
    module.load_state_dict(weights)
    return module


def _padding_modules(
    sides: Sequence[tuple[int, int]], shape: Shape, mode: str | Sequence[str] = "zeros", fill: float = 0.0
) -> list[nn.Module]:
    if not isinstance(mode, str):  # pad one axis at a time
        sides_by_axis = [[side if axis == i else (0, 0) for i, side in enumerate(sides)] for axis in range(len(sides))]
        modules = [_padding_modules(pads, shape, mode_, fill) for pads, mode_ in zip(sides_by_axis, mode, strict=True)]
        return [module for axis_modules in modules for module in axis_modules]
    flat_sides = tuple(n for side in reversed(sides) for n in side)
    if not any(flat_sides):
        return []
    if mode == "zeros":
        return [_torch_class("ConstantPad", shape)(flat_sides, fill)]
    class_prefix = {"reflect": "ReflectionPad", "replicate": "ReplicationPad", "wrap": "CircularPad"}[mode]
    turns = [tuple(n * (mode == "wrap" and side > n) for side in pair) for pair, n in zip(sides, shape, strict=False)]
    if any(map(any, turns)):  # CircularPad wraps around only once: repeat the image first
        remaining = [(a - m, b - n) for (a, b), (m, n) in zip(sides, turns, strict=True)]
        repeated_shape = *(n + sum(turn) for n, turn in zip(shape, turns, strict=False)), shape[-1]
        repeat_modules = _padding_modules(turns, shape, mode)  # type: ignore[arg-type]
        return [*repeat_modules, *_padding_modules(remaining, repeated_shape, mode)]
    return [_torch_class(class_prefix, shape)(flat_sides)]


def _split_padding(window: Any, shape: Shape, at_most_half_kernel: bool = False) -> tuple[Shape, list[nn.Module]]:
    """Return the padding argument of a module, and modules for padding that it does not support.

    With `at_most_half_kernel`, as in pooling modules, the argument may be at most half of the kernel.
    """
    paddings_and_kernels = zip(window.padding, window.kernel, strict=True)
    fits = all(a == b and (a <= k // 2 or not at_most_half_kernel) for (a, b), k in paddings_and_kernels)
    if window.mode == "zeros" and fits:
        return tuple(a for a, _ in window.padding), []
    return (0,) * window.ndim, _padding_modules(window.padding, shape, window.mode, window.fill)


def _rename_weights(arrays: TensorsByName, transform: Callable[[torch.Tensor], torch.Tensor]) -> TensorsByName:
    """Return the transformed 'weights', and 'bias', under PyTorch's names."""
    return {"weight": transform(arrays["weights"])} | {name: array for name, array in arrays.items() if name == "bias"}


def _convolution(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    padding, padding_modules = _split_padding(window, shape)
    weights = _rename_weights(arrays, lambda w: w.permute(-1, -2, *range(w.dim() - 2)))
    options = {"stride": window.stride, "padding": padding, "dilation": window.dilation, "groups": layer.groups}
    module_args = shape[-1], layer.out_channels, window.kernel
    module = _load_module(_torch_class("Conv", shape), *module_args, bias=layer.bias, weights=weights, **options)
    return [*padding_modules, module]


def _transposed_convolution(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.output_window_for(shape)
    groups, output_padding = layer.groups, layer.output_padding
    n = window.ndim
    needs_crop = any(a != b for a, b in window.padding)

    def reorder(w: torch.Tensor) -> torch.Tensor:
        by_group = w.reshape(*w.shape[:-1], groups, -1)  # (*kernel, inputs, groups, outputs)
        return by_group.permute(n + 1, n, n + 2, *range(n)).reshape(shape[-1], -1, *window.kernel)

    options = {
        "stride": window.stride,
        "padding": (0,) * n if needs_crop else tuple(a for a, _ in window.padding),
        "output_padding": (output_padding,) * n if isinstance(output_padding, int) else tuple(output_padding),
        "dilation": window.dilation,
        "groups": groups,
    }
    module_args = shape[-1], layer.out_channels, window.kernel
    weights = _rename_weights(arrays, reorder)
    module_class = _torch_class("ConvTranspose", shape)
    module = _load_module(module_class, *module_args, bias=layer.bias, weights=weights, **options)
    return [module, *(_padding_modules([(-a, -b) for a, b in window.padding], shape) if needs_crop else [])]


def _linear(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    out_features = layer.out_features
    weights = _rename_weights(arrays, lambda w: w.T.reshape(out_features, *shape).movedim(-1, 1).flatten(1))
    module = _load_module(nn.Linear, prod(shape), out_features, bias=layer.bias, weights=weights)
    return [nn.Flatten(), module] if len(shape) > 1 else [module]


def _max_pooling(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    padding, padding_modules = _split_padding(window, shape, at_most_half_kernel=True)
    return [*padding_modules, _torch_class("MaxPool", shape)(window.kernel, window.stride, padding)]


def _avg_pooling(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    padding, padding_modules = _split_padding(window, shape, at_most_half_kernel=True)
    pool = _torch_class("AvgPool", shape)(
        window.kernel, window.stride, padding, count_include_pad=layer.count_include_pad
    )
    if padding_modules and not layer.count_include_pad:
        return [AvgPoolIgnoringPadding(padding_modules[0], pool)]
    return [*padding_modules, pool]


def _l2_pooling(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    return [*_padding_modules(window.padding, shape), L2Pool(window.kernel, window.stride)]


def _batch_norm(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    torch_names = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}
    weights = {torch_names[name]: array for name, array in arrays.items()} | {"num_batches_tracked": torch.tensor(0)}
    module_class = _torch_class("BatchNorm", shape)
    return [_load_module(module_class, shape[-1], eps=layer.eps, momentum=layer.momentum, weights=weights)]


def _group_or_instance_norm(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    weights = {{"gamma": "weight", "beta": "bias"}[name]: array for name, array in arrays.items()}
    groups, channels = layer.group_count_for(shape), shape[-1]
    if groups == channels and prod(shape[:-1]) > 1:  # faster in PyTorch
        module_class = _torch_class("InstanceNorm", shape)
        return [_load_module(module_class, channels, eps=layer.eps, affine=layer.affine, weights=weights)]
    return [_load_module(nn.GroupNorm, groups, channels, eps=layer.eps, affine=layer.affine, weights=weights)]


def _response_norm(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    norm = nn.LocalResponseNorm(layer.depth, layer.alpha, layer.beta, layer.k)
    return [norm] if len(shape) > 1 else [nn.Unflatten(1, (shape[-1], 1)), norm, nn.Flatten()]


def _local_contrast(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.local_window.window_of_stages(shape)
    min_deviation = None if layer.min_deviation == "mean" else layer.min_deviation
    padding_modules = _padding_modules(window.padding, shape, window.mode)
    return [LocalContrast(layer.local_window.axis_weights(shape), padding_modules, min_deviation)]


def _local_filtering(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    block_extent = layer.shared_filter_extent_for(window.output_extent(shape[:-1])) or (1,) * window.ndim
    return [LocalFilters(arrays, window.kernel, window.stride, _padding_modules(window.padding, shape), block_extent)]


def _upsampling(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    factors = layer.window_for(shape).factor
    mode = "nearest" if max(factors) <= 40 else "nearest-exact"  # in float32, the rounding of 1 / 41 would skip cells
    if layer.mode != "nearest":
        mode = ("linear", "bilinear", "trilinear")[len(shape) - 2]
    return [nn.Upsample(scale_factor=tuple(map(float, factors)), mode=mode)]


def _pad_or_crop(layer: Any, shape: Shape, arrays: TensorsByName) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    return _padding_modules(window.padding, shape, window.mode, window.fill)


LAYER_CONVERTERS: dict[str, Callable[[Any, Shape, TensorsByName], Sequence[nn.Module]]] = {
    "ActivationLayer": lambda layer, shape, arrays: [],
    "AvgPoolingLayer": _avg_pooling,
    "BatchNormLayer": _batch_norm,
    "ConvLayer": _convolution,
    "CropLayer": _pad_or_crop,
    "DeconvLayer": _transposed_convolution,
    "DropoutLayer": lambda layer, shape, arrays: [nn.Dropout(layer.rate)],
    "FCLayer": _linear,
    "GlobalAvgPoolingLayer": lambda layer, shape, arrays: [_torch_class("AdaptiveAvgPool", shape)(1), nn.Flatten()],
    "GroupNormLayer": _group_or_instance_norm,
    "InstanceNormLayer": _group_or_instance_norm,
    "L2PoolingLayer": _l2_pooling,
    "LCNLayer": _local_contrast,
    "LRNLayer": _response_norm,
    "LocalFilteringLayer": _local_filtering,
    "MaxPoolingLayer": _max_pooling,
    "PadLayer": _pad_or_crop,
    "UpsampleLayer": _upsampling,
}
