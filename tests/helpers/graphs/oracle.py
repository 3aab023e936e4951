"""The same network in PyTorch: float64, channels first, every layer from its formula, gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import neondist as nd

from .case import Case

Tensor = torch.Tensor
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "wrap": "wrap"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda z: z,
    "ReLU": torch.relu,
    "Tanh": torch.tanh,
    "Logistic": torch.sigmoid,
    "Softmax": lambda z: torch.softmax(z, 1),
}


class Oracle:
    """A network with parameters and an optimiser.

    Parameters
    ----------
    state : dict
        Arrays by '<layer>/<parameter>', as `model.state()` returns them.
    """

    def __init__(self, case: Case, state: dict[str, np.ndarray]) -> None:
        self.case, self.step, self.training = case, 0, True
        self.tensors = {name: torch.tensor(array) for name, array in state.items()}
        self.trained = {n: t.requires_grad_() for n, t in self.tensors.items() if not n.endswith(("/mean", "/var"))}
        name, given = case.optimizer
        self.optimizer = _optimizer(name, dict(given), list(self.trained.values())) if self.trained else None

    def forward(self, x: Tensor, training: bool) -> Tensor:
        """Return outputs (N, *spatial, C) for images of that form."""
        self.training = training
        return _last(self._node(self.case.network, x.movedim(-1, 1)))

    def cost(self, y: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cost of a batch."""
        if self.case.cost == "SumSquared":
            return ((y - targets) ** 2).sum() / 2 / len(y)
        if self.case.cost == "Dice":
            p, t = torch.softmax(y, -1), F.one_hot(targets, y.shape[-1])
            cells = tuple(range(1, y.ndim - 1))
            both, overlap = ((p + t).sum(cells), (p * t).sum(cells)) if cells else (p + t, p * t)
            return ((both - 2 * overlap) / (both + 1)).mean()
        return F.cross_entropy(y.flatten(0, -2), targets.flatten())

    def train(self, x: Tensor, targets: Tensor) -> float:
        """Train on one batch and return its cost."""
        for tensor in self.trained.values():
            tensor.grad = None
        loss = self.cost(self.forward(x, training=True), targets)
        if self.optimizer is not None:
            loss.backward()
            self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def _node(self, node: Any, x: Tensor) -> Tensor:
        if isinstance(node, list):
            for one in node:
                x = self._node(one, x)
            return x
        kind, given = node
        if kind == "Sequential":
            return self._node(given, x)
        if kind == "Sum":
            return sum(self._node(branch, x) for branch in given)  # type: ignore[return-value]
        if kind == "Concat":
            return torch.cat([self._node(branch, x) for branch in given], 1)
        given = dict(given)
        activation = _ACTIVATIONS[given.pop("activation", "Identity")]
        given.pop("scheme", None)
        return activation(getattr(self, kind)(x, given.pop("name"), **given))

    def _own(self, layer: str, name: str) -> Any:
        return self.tensors.get(f"{layer}/{name}", 0.0)

    # One method a layer, named as it is in a case.

    def Activation(self, x: Tensor, layer: str) -> Tensor:
        return x

    def Conv(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
             dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros") -> Tensor:  # fmt: skip
        ndim = x.ndim - 2
        if padding == "same":
            padding = _same(x.shape[2:], *(_axes(v, ndim) for v in (kernel_size, stride, dilation)))
        x = _pad(x, padding, padding_mode).contiguous()
        weights = self._own(layer, "weights").movedim((-1, -2), (0, 1)).contiguous()
        conv = (F.conv1d, F.conv2d, F.conv3d)[ndim - 1]
        y = conv(x, weights, None, _axes(stride, ndim), 0, _axes(dilation, ndim), groups)
        return y + _channels(self._own(layer, "bias"), y)

    def Deconv(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
               output_padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True) -> Tensor:  # fmt: skip
        ndim, weights = x.ndim - 2, self._own(layer, "weights")
        parts = weights.unflatten(-1, (groups, -1)).movedim((-2, -3, -1), (0, 1, 2)).flatten(0, 1)
        deconv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[ndim - 1]
        whole = deconv(
            x.contiguous(), parts.contiguous(), None, _axes(stride, ndim), 0, 0, groups, _axes(dilation, ndim)
        )
        cut = [
            (-before, e - after)
            for (before, after), e in zip(_sides(padding, ndim), _axes(output_padding, ndim), strict=True)
        ]
        y = _pad(whole, [(0, after if after > 0 else 0) for _, after in cut], "zeros")
        y = _pad(y, [(before, min(after, 0)) for before, after in cut], "zeros")
        return y + _channels(self._own(layer, "bias"), y)

    def MaxPooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
        ndim = x.ndim - 2
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1]
        x = _pad(x, padding, "zeros", -np.inf)
        return pool(x.contiguous(), _axes(kernel_size, ndim), _axes(kernel_size if stride is None else stride, ndim))

    def AvgPooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0,
                   count_include_pad: bool = True) -> Tensor:  # fmt: skip
        cells = torch.ones_like(x[:1, :1])
        counted = _window_sum(_pad(cells, padding, "zeros", float(count_include_pad)), kernel_size, stride)
        return _window_sum(_pad(x, padding, "zeros"), kernel_size, stride) / counted

    def L2Pooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
        return _root(_window_sum(_pad(x * x, padding, "zeros"), kernel_size, stride))

    def GlobalAvgPooling(self, x: Tensor, layer: str) -> Tensor:
        return x.flatten(2).mean(2)

    def Upsample(self, x: Tensor, layer: str, factor: Any = 2, mode: str = "nearest") -> Tensor:
        size = [n * f for n, f in zip(x.shape[2:], _axes(factor, x.ndim - 2), strict=True)]
        if mode == "nearest":
            return F.interpolate(x, size)
        return F.interpolate(x, size, mode=("linear", "bilinear", "trilinear")[len(size) - 1], align_corners=False)

    def Pad(self, x: Tensor, layer: str, padding: Any, mode: Any = "zeros", fill: float = 0.0) -> Tensor:
        return _pad(x, padding, mode, fill)

    def Crop(self, x: Tensor, layer: str, cropping: Any) -> Tensor:
        return _pad(x, [(-before, -after) for before, after in _sides(cropping, x.ndim - 2)], "zeros")

    def FC(self, x: Tensor, layer: str, out_features: int, bias: bool = True) -> Tensor:
        return x.movedim(1, -1).flatten(1) @ self._own(layer, "weights") + self._own(layer, "bias")

    def LocalFiltering(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1,
                       padding: Any = 0, bias: bool = False, shared: Any = False) -> Tensor:  # fmt: skip
        ndim, weights = x.ndim - 2, self._own(layer, "weights")
        kernel, x = _axes(kernel_size, ndim), _pad(x, padding, "zeros")
        for axis, (k, s) in enumerate(zip(kernel, _axes(stride, ndim), strict=True)):
            x = x.unfold(2 + axis, k, s)
        out = x.shape[2 : 2 + ndim]
        block = out if shared is True else (1,) * ndim if shared is False else _axes(shared, ndim)
        for axis, b in enumerate(block):  # the filter of every cell is that of its block
            weights = weights.index_select(axis, torch.arange(out[axis]) // b)
        cells, window = "xyz"[:ndim], "ijk"[:ndim]
        y = torch.einsum(f"nc{cells}{window},{cells}{window}co->no{cells}", x, weights)
        return y + self._own(layer, "bias").movedim(-1, 0) if bias else y

    def BatchNorm(self, x: Tensor, layer: str, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
        mean, var = (self._own(layer, name) for name in ("mean", "var"))
        if self.training:
            cells, kept = x.movedim(1, 0).flatten(1), (mean, var)
            mean, var = cells.mean(1), cells.var(1, correction=0)
            count = cells.shape[1]
            for old, new in zip(kept, (mean, var * count / max(1, count - 1)), strict=True):
                old += momentum * (new.detach() - old)
        normal = (x - _channels(mean, x)) / _channels(torch.sqrt(var + eps), x)
        return normal * _channels(self._own(layer, "gamma"), x) + _channels(self._own(layer, "beta"), x)

    def GroupNorm(self, x: Tensor, layer: str, groups: int = 32, eps: float = 1e-5, affine: bool = True) -> Tensor:
        parts = x.unflatten(1, (groups, -1)).flatten(2)
        from_mean = parts - parts.mean(2, keepdim=True)
        normal = (from_mean / torch.sqrt((from_mean**2).mean(2, keepdim=True) + eps)).reshape(x.shape)
        if not affine:
            return normal
        return normal * _channels(self._own(layer, "gamma"), x) + _channels(self._own(layer, "beta"), x)

    def InstanceNorm(self, x: Tensor, layer: str, eps: float = 1e-5, affine: bool = False) -> Tensor:
        return self.GroupNorm(x, layer, x.shape[1], eps, affine)

    def LRN(
        self, x: Tensor, layer: str, depth: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> Tensor:
        squares = F.pad((x * x).movedim(1, -1), (depth // 2, (depth - 1) // 2))
        return x / (k + alpha / depth * squares.unfold(-1, depth, 1).sum(-1).movedim(-1, 1)) ** beta

    def LCN(self, x: Tensor, layer: str, kernel_size: Any = 9, window: str = "gaussian", sigma: float | None = None,
            padding_mode: str = "zeros", min_deviation: Any = 1.0, halo: str = "auto") -> Tensor:  # fmt: skip
        kernel = _axes(kernel_size, x.ndim - 2)

        def local_mean(a: Tensor) -> Tensor:
            a = _pad(a.mean(1, keepdim=True), [(k // 2, k // 2) for k in kernel], padding_mode)
            for axis, k in enumerate(kernel):
                width = sigma or k / 4
                taps = [1.0 if window == "uniform" else exp(-(((i - k // 2) / width) ** 2) / 2) for i in range(k)]
                a = a.unfold(2 + axis, k, 1) @ torch.tensor(taps, dtype=a.dtype) / sum(taps)
            return a

        v = x - local_mean(x)
        deviation = _root(local_mean(v * v))
        cells = tuple(range(1, x.ndim))
        least = (
            deviation.mean(cells, keepdim=True)
            if min_deviation == "mean"
            else torch.tensor(min_deviation, dtype=x.dtype)
        )
        divisor = torch.maximum(deviation, least)
        return v * torch.where(divisor > 0, 1 / torch.where(divisor > 0, divisor, 1.0), 0.0)

    def Dropout(self, x: Tensor, layer: str, rate: float = 0.5) -> Tensor:
        return x * _dropped(layer, rate, self.case.seed, self.step, x) if self.training else x


def _dropped(layer: str, rate: float, seed: int, step: int, x: Tensor) -> Tensor:
    """Return the mask of a layer: what it makes of ones, alone in a model."""
    alone = nd.Convnet([nd.DropoutLayer(rate, name=layer)], seed=seed, dtype="float64", backend="numpy")
    alone.build((*x.shape[2:], x.shape[1]), len(x))
    alone.step = step
    return torch.tensor(alone.fprop(np.ones((len(x), *x.shape[2:], x.shape[1])))).movedim(-1, 1)


def _axes(value: Any, ndim: int) -> tuple[int, ...]:
    return (value,) * ndim if isinstance(value, int) else tuple(value)


def _sides(value: Any, ndim: int) -> list[tuple[int, int]]:
    return [(v, v) if isinstance(v, int) else tuple(v) for v in ((value,) * ndim if isinstance(value, int) else value)]


def _same(extent: Any, kernel: Any, stride: Any, dilation: Any) -> list[tuple[int, int]]:
    """Return the padding that makes ceil(extent / stride) outputs, the odd cell at the end."""
    missing = [
        max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
        for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True)
    ]
    return [(m // 2, (m + 1) // 2) for m in missing]


def _pad(x: Tensor, padding: Any, mode: Any, fill: float = 0.0) -> Tensor:
    """Return the image with cells around it; negative padding crops."""
    modes = [mode] * (x.ndim - 2) if isinstance(mode, str) else mode
    for axis, (before, after) in enumerate(_sides(padding, x.ndim - 2), start=2):
        grown, mode = (max(before, 0), max(after, 0)), modes[axis - 2]
        if mode != "zeros" and any(grown):
            source = np.pad(np.arange(x.shape[axis]), grown, mode=_MODES[mode])  # type: ignore[call-overload]
            x = x.index_select(axis, torch.tensor(source))
        elif any(grown):
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + list(grown), value=fill)
        start = max(-before, 0)
        x = x.narrow(axis, start, x.shape[axis] - start - max(-after, 0))
    return x


def _window_sum(x: Tensor, kernel_size: Any, stride: Any) -> Tensor:
    ndim = x.ndim - 2
    kernel = _axes(kernel_size, ndim)
    for axis, (k, s) in enumerate(zip(kernel, kernel if stride is None else _axes(stride, ndim), strict=True)):
        x = x.unfold(2 + axis, k, s).sum(-1)
    return x


def _root(square: Tensor) -> Tensor:
    """Return the square root, whose gradient at zero is zero."""
    return torch.where(square > 0, torch.sqrt(torch.where(square > 0, square, 1.0)), 0.0)


def _channels(each: Any, like: Tensor) -> Any:
    return each.reshape(1, -1, *(1,) * (like.ndim - 2)) if isinstance(each, Tensor) else each


def _last(y: Tensor) -> Tensor:
    return y.movedim(1, -1)


def _optimizer(name: str, given: dict[str, Any], tensors: list[Tensor]) -> torch.optim.Optimizer:
    rate = given.pop("learning_rate")
    if name == "Adam":
        return torch.optim.Adam(tensors, rate, (given.pop("beta1", 0.9), given.pop("beta2", 0.999)), **given)
    return torch.optim.SGD(tensors, rate, **given)
