"""A model of our layers as a module of PyTorch."""

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

Arrays = Mapping[str, torch.Tensor]
Shape = tuple[int, ...]


def to_torch(model: Model) -> nn.Module:
    """Convert a model to an equivalent PyTorch module, with copies of its weights.

    It maps (N, C, *spatial) to (N, C', *spatial') or (N, features), and agrees with the model in training and
    evaluation, including running statistics; only dropout draws different random numbers. It shares no memory with the
    model, runs in a single process, and can be exported with `torch.onnx.export`. A chain of layers becomes an
    nn.Sequential. Collective.

    Parameters
    ----------
    model : Model
        A built model.

    Raises
    ------
    ConfigError
        If a layer has no counterpart in PyTorch; the message names it.
    """
    state = model.state()
    return module_of(model, model.input_shape, state)


def module_of(model: Model, input_shape: Shape, state: Mapping[str, Any]) -> nn.Module:
    """Return the same of a model that need not be built, with these arrays."""
    return _Maker({name: torch.from_numpy(array.copy()) for name, array in state.items()}).chain(
        model.layers, input_shape
    )


class SumOf(nn.Module):
    """The sum of what branches give."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return reduce(torch.add, [branch(x) for branch in self.branches])


class ConcatOf(SumOf):
    """Concatenation of the results of branches along the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class RootOfSquares(nn.Module):
    """Root of the sum of squares over each window; its gradient where all are zero is zero, and not NaN."""

    def __init__(self, kernel: Shape, stride: Shape) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the roots."""
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(self.kernel) - 1]
        squares = pool(x * x, self.kernel, self.stride) * prod(self.kernel)
        return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


class MeanOfInside(nn.Module):
    """Mean over those cells of each window that lie inside the image."""

    def __init__(self, pad: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.pad, self.pool = pad, pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the means."""
        return self.pool(self.pad(x)) / self.pool(self.pad(torch.ones_like(x[:1, :1])))


class LocalContrast(nn.Module):
    """v = x - local mean, over max(least, local deviation); least None: each sample's mean deviation."""

    def __init__(self, taps: Sequence[Sequence[float]], pad: Sequence[nn.Module], least: float | None) -> None:
        super().__init__()
        self.taps, self.pad, self.least = taps, nn.Sequential(*pad), least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is normalised."""
        v = x - self.mean(x)
        squares = self.mean(v * v)
        sigma = torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)
        least = (
            sigma.mean(list(range(2, x.dim())), keepdim=True) if self.least is None else sigma.new_tensor(self.least)
        )
        divisor = torch.maximum(sigma, least)
        return v / torch.where(divisor > 0, divisor, torch.inf)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean over each window and all channels."""
        made, n = self.pad(x.mean(1, keepdim=True)), len(self.taps)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        for axis, taps in enumerate(self.taps):
            made = convolve(made, made.new_tensor(taps).reshape(1, 1, *(-1 if axis == at else 1 for at in range(n))))
        return made


class OwnFilters(nn.Module):
    """A filter for every cell, or for every block of cells."""

    def __init__(self, arrays: Arrays, kernel: Shape, stride: Shape, pad: Sequence[nn.Module], block: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(arrays["weights"])
        self.bias = nn.Parameter(arrays["bias"].movedim(-1, 0)) if "bias" in arrays else None
        self.kernel, self.stride, self.pad, self.block = kernel, stride, nn.Sequential(*pad), block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each cell's filter gives on its window."""
        seen, n = self.pad(x), len(self.kernel)
        weights: torch.Tensor = self.weight
        for axis, (kernel, stride) in enumerate(zip(self.kernel, self.stride, strict=True)):
            seen = seen.unfold(2 + axis, kernel, stride)  # at last (N, C, *spatial, *kernel)
        cells = seen.shape[2 : 2 + n]
        for axis, (block, count) in enumerate(zip(self.block, cells, strict=True)):
            if block > 1:
                weights = weights.repeat_interleave(block, axis).narrow(axis, 0, count)
        seen = seen.movedim((0, 1), (n, -1)).flatten(n + 1)  # (*spatial, N, windows)
        y = torch.matmul(seen, weights.flatten(n, -2)).movedim((-2, -1), (0, 1))
        return y if self.bias is None else y + self.bias


class _Maker:
    """Makes modules of nodes."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state = state

    def chain(self, nodes: Sequence[Node], shape: Shape) -> nn.Sequential:
        """Return one module after the other."""
        found: list[nn.Module] = []
        for node in nodes:
            found += self.modules(node, shape)
            shape = node.output_shape_for(shape)
        return nn.Sequential(*found)

    def modules(self, node: Any, shape: Shape) -> Sequence[nn.Module]:
        """Return what a layer or a container comes to, for an input of this shape."""
        kind = serial_class(type(node))
        if kind is Sequential:
            return list(self.chain(node.layers, shape))
        if kind in (Sum, Concat):
            return [(SumOf if kind is Sum else ConcatOf)([self.chain([branch], shape) for branch in node.layers])]
        own, activation = f"{node.name}/", getattr(node, "activation", None)
        arrays = {name.removeprefix(own): array for name, array in self.state.items() if name.startswith(own)}
        make, after = MODULES.get(kind.__name__), FUNCTIONS.get(type(activation).__name__)
        if make is None or after is None or len(shape) > 4:
            what = type(node if make is None else activation).__name__
            raise ConfigError(f"layer '{node.name}': PyTorch has no module that computes what {what} does on {shape}")
        return [*make(node, shape, arrays), *after()]


FUNCTIONS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "NoneType": lambda: [],
    "Identity": lambda: [],
    "ReLU": lambda: [nn.ReLU()],
    "Logistic": lambda: [nn.Sigmoid()],
    "Tanh": lambda: [nn.Tanh()],
    "Softmax": lambda: [nn.Softmax(1)],
}


def _sized(word: str, shape: Shape) -> Any:
    """Return PyTorch's class for images of a shape, such as nn.Conv2d."""
    return getattr(nn, f"{word}{max(1, len(shape) - 1)}d")


def _loaded(kind: Any, *args: Any, weights: Arrays, **named: Any) -> nn.Module:
    """Return a module with copies of arrays; no random numbers are drawn."""
    dtype = next(iter(weights.values())).dtype if weights else None
    made: nn.Module = nn.utils.skip_init(kind, *args, dtype=dtype, **named)
    made.load_state_dict(weights)
    return made


def _padding(
    sides: Sequence[tuple[int, int]], shape: Shape, mode: str | Sequence[str] = "zeros", fill: float = 0.0
) -> list[nn.Module]:
    """Return what puts cells around an image, or cuts them off."""
    if not isinstance(mode, str):  # one axis after the other
        alone = [[side if axis == at else (0, 0) for at, side in enumerate(sides)] for axis in range(len(sides))]
        return [made for of, each in zip(alone, mode, strict=True) for made in _padding(of, shape, each, fill)]
    flat = tuple(n for side in reversed(sides) for n in side)
    if not any(flat):
        return []
    if mode == "zeros":
        return [_sized("ConstantPad", shape)(flat, fill)]
    return [
        _sized({"reflect": "ReflectionPad", "replicate": "ReplicationPad", "wrap": "CircularPad"}[mode], shape)(flat)
    ]


def _split(window: Any, shape: Shape, half: bool = False) -> tuple[Shape, list[nn.Module]]:
    """Return the padding that a module does itself, if it can, and what does it before.

    A pooling module pads at most `half` of its kernel.
    """
    sizes = zip(window.padding, window.kernel, strict=True)
    if window.mode == "zeros" and all(a == b and (a <= k // 2 or not half) for (a, b), k in sizes):
        return tuple(a for a, _ in window.padding), []
    return (0,) * window.ndim, _padding(window.padding, shape, window.mode, window.fill)


def _renamed(arrays: Arrays, how: Callable[[torch.Tensor], torch.Tensor]) -> Arrays:
    """Return PyTorch's names for 'weights', after `how`, and 'bias'."""
    return {"weight": how(arrays["weights"])} | {name: array for name, array in arrays.items() if name == "bias"}


def _convolution(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    own, before = _split(window, shape)
    weights = _renamed(arrays, lambda w: w.permute(-1, -2, *range(w.dim() - 2)))
    how = {"stride": window.stride, "padding": own, "dilation": window.dilation, "groups": layer.groups}
    channels = shape[-1], layer.out_channels, window.kernel
    return [*before, _loaded(_sized("Conv", shape), *channels, bias=layer.bias, weights=weights, **how)]


def _transposed(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window, groups, extra = layer.sliding(shape), layer.groups, layer.output_padding
    n = window.ndim
    cropped = any(a != b for a, b in window.padding)

    def turned(w: torch.Tensor) -> torch.Tensor:
        by_group = w.reshape(*w.shape[:-1], groups, -1)  # (*kernel, inputs, groups, outputs)
        return by_group.permute(n + 1, n, n + 2, *range(n)).reshape(shape[-1], -1, *window.kernel)

    how = {
        "stride": window.stride,
        "padding": (0,) * n if cropped else tuple(a for a, _ in window.padding),
        "output_padding": (extra,) * n if isinstance(extra, int) else tuple(extra),
        "dilation": window.dilation,
        "groups": groups,
    }
    channels = shape[-1], layer.out_channels, window.kernel
    weights = _renamed(arrays, turned)
    made = _loaded(_sized("ConvTranspose", shape), *channels, bias=layer.bias, weights=weights, **how)
    return [made, *(_padding([(-a, -b) for a, b in window.padding], shape) if cropped else [])]


def _linear(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    out = layer.out_features
    weights = _renamed(arrays, lambda w: w.T.reshape(out, *shape).movedim(-1, 1).reshape(out, -1))
    made = _loaded(nn.Linear, prod(shape), out, bias=layer.bias, weights=weights)
    return [nn.Flatten(), made] if len(shape) > 1 else [made]


def _max_pooling(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    own, before = _split(window, shape, half=True)
    return [*before, _sized("MaxPool", shape)(window.kernel, window.stride, own)]


def _avg_pooling(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    own, before = _split(window, shape, half=True)
    pool = _sized("AvgPool", shape)(window.kernel, window.stride, own, count_include_pad=layer.count_include_pad)
    return [*before, pool] if layer.count_include_pad or not before else [MeanOfInside(before[0], pool)]


def _l2_pooling(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    return [*_padding(window.padding, shape), RootOfSquares(window.kernel, window.stride)]


def _batch_norm(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    names = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}
    weights = {names[name]: array for name, array in arrays.items()} | {"num_batches_tracked": torch.tensor(0)}
    kind = _sized("BatchNorm", shape)
    return [_loaded(kind, shape[-1], eps=layer.eps, momentum=layer.momentum, weights=weights)]


def _sample_norm(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    weights = {{"gamma": "weight", "beta": "bias"}[name]: array for name, array in arrays.items()}
    sizes = layer.groups_for(shape), shape[-1]
    if sizes[0] == sizes[1] and prod(shape[:-1]) > 1:  # PyTorch is faster so
        kind = _sized("InstanceNorm", shape)
        return [_loaded(kind, shape[-1], eps=layer.eps, affine=layer.affine, weights=weights)]
    return [_loaded(nn.GroupNorm, *sizes, eps=layer.eps, affine=layer.affine, weights=weights)]


def _response_norm(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    made = nn.LocalResponseNorm(layer.depth, layer.alpha, layer.beta, layer.k)
    return [made] if len(shape) > 1 else [nn.Unflatten(1, (shape[-1], 1)), made, nn.Flatten()]


def _local_contrast(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window, least = layer.local.over(shape), layer.min_deviation
    pad = _padding(window.padding, shape, window.mode)
    return [LocalContrast(layer.local.taps(shape), pad, None if least == "mean" else least)]


def _local_filtering(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    block = layer.block_for(window.output_extent(shape[:-1])) or (1,) * window.ndim
    return [OwnFilters(arrays, window.kernel, window.stride, _padding(window.padding, shape), block)]


def _upsampling(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    factors = layer.window_for(shape).factor
    mode = "nearest" if max(factors) <= 40 else "nearest-exact"  # float32 rounds 1 / 41 so that cells would be left out
    if layer.mode != "nearest":
        mode = ("linear", "bilinear", "trilinear")[len(shape) - 2]
    return [nn.Upsample(scale_factor=tuple(map(float, factors)), mode=mode)]


def _padded(layer: Any, shape: Shape, arrays: Arrays) -> Sequence[nn.Module]:
    window = layer.window_for(shape)
    return _padding(window.padding, shape, window.mode, window.fill)


MODULES: dict[str, Callable[[Any, Shape, Arrays], Sequence[nn.Module]]] = {
    "ActivationLayer": lambda layer, shape, arrays: [],
    "AvgPoolingLayer": _avg_pooling,
    "BatchNormLayer": _batch_norm,
    "ConvLayer": _convolution,
    "CropLayer": _padded,
    "DeconvLayer": _transposed,
    "DropoutLayer": lambda layer, shape, arrays: [nn.Dropout(layer.rate)],
    "FCLayer": _linear,
    "GlobalAvgPoolingLayer": lambda layer, shape, arrays: [_sized("AdaptiveAvgPool", shape)(1), nn.Flatten()],
    "GroupNormLayer": _sample_norm,
    "InstanceNormLayer": _sample_norm,
    "L2PoolingLayer": _l2_pooling,
    "LCNLayer": _local_contrast,
    "LRNLayer": _response_norm,
    "LocalFilteringLayer": _local_filtering,
    "MaxPoolingLayer": _max_pooling,
    "PadLayer": _padded,
    "UpsampleLayer": _upsampling,
}
