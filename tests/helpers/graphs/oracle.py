"""Reference networks in PyTorch: float64, channels first, layers from their formulas, gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import neondist as nd

from . import own_layers
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
    """Network with parameters and an optimiser.

    Parameters
    ----------
    state : dict
        Arrays by '<layer>/<parameter>', as `model.state()` returns them.
    """

    def __init__(self, case: Case, state: dict[str, np.ndarray]) -> None:
        self.case, self.step, self.training = case, 0, True
        self.tensors = {name: torch.tensor(array) for name, array in state.items()}
        self.trained = {
            key: t.requires_grad_() for key, t in self.tensors.items() if not key.endswith(("/mean", "/var"))
        }
        name, arguments = case.optimizer
        self.clip_norm = arguments.get("clip_norm")
        self.optimizer = _create_optimizer(name, dict(arguments), list(self.trained.values())) if self.trained else None

    def forward(self, x: Tensor, training: bool) -> Tensor:
        """Return outputs (N, *spatial, C) for images (N, *spatial, C)."""
        self.training = training
        return _to_channels_last(self._node(self.case.network, x.movedim(-1, 1)))

    def cost(self, y: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cost of a batch."""
        name, arguments = self.case.cost
        return getattr(self, f"_{name.lower()}")(y, targets, **arguments)

    def train(self, x: Tensor, targets: Tensor) -> float:
        """Train on one batch and return its cost."""
        for tensor in self.trained.values():
            tensor.grad = None
        loss = self.cost(self.forward(x, training=True), targets)
        if self.optimizer is not None:
            loss.backward()
            for tensor in self.trained.values():  # neondist updates all parameters, also of layers without an effect
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.clip_norm)
            self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def _sumsquared(self, y: Tensor, targets: Tensor) -> Tensor:
        return ((y - targets) ** 2).sum() / 2 / len(y)

    def _mse(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(y, targets)

    def _mae(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.l1_loss(y, targets)

    def _huber(self, y: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
        return F.huber_loss(y, targets, delta=delta)

    def _bce(self, y: Tensor, targets: Tensor, pos_weight: Any = None, ignore_index: int = -100) -> Tensor:
        counted = (targets != ignore_index)[..., None].expand_as(y)
        labels = targets if y.shape[-1] == 1 else torch.where(targets == ignore_index, 0, targets)
        t = labels[..., None] if y.shape[-1] == 1 else F.one_hot(labels, y.shape[-1])
        weight = None if pos_weight is None else torch.tensor(pos_weight, dtype=y.dtype)
        losses = F.binary_cross_entropy_with_logits(y, t.to(y.dtype), reduction="none", pos_weight=weight)
        return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)

    def _crossentropy(self, y: Tensor, targets: Tensor, class_weights: Any = None, ignore_index: int = -100,
                      label_smoothing: float = 0.0) -> Tensor:  # fmt: skip
        y, targets = y.flatten(0, -2), targets.flatten()
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=y.dtype)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        if bool((targets == ignore_index).all()):  # a mean of 0, not NaN
            return 0 * y.sum()
        return F.cross_entropy(y, targets, weights, **options)

    def _focal(self, y: Tensor, targets: Tensor, gamma: float = 2.0, class_weights: Any = None,
               ignore_index: int = -100) -> Tensor:  # fmt: skip
        y, targets = y.flatten(0, -2), targets.flatten()
        counted = targets != ignore_index
        labels = torch.where(counted, targets, 0)
        log_p = F.log_softmax(y, 1).gather(1, labels[:, None])[:, 0]
        weights = torch.ones(y.shape[1]) if class_weights is None else torch.tensor(class_weights)
        weights = weights.to(y.dtype)[labels] * counted
        return -(weights * (1 - log_p.exp()) ** gamma * log_p).sum() / weights.sum().clamp(min=1e-30)

    def _dice(self, y: Tensor, targets: Tensor, smooth: float = 1.0, ignore_index: int = -100) -> Tensor:
        counted = (targets != ignore_index)[..., None]
        p, t = torch.softmax(y, -1), F.one_hot(torch.where(targets == ignore_index, 0, targets), y.shape[-1])
        cells = tuple(range(1, y.ndim - 1))
        total, overlap = (p + t) * counted, p * t * counted
        total, overlap = (total.sum(cells), overlap.sum(cells)) if cells else (total, overlap)
        return ((total - 2 * overlap) / (total + smooth)).mean()

    def _dicece(self, y: Tensor, targets: Tensor, dice_weight: float = 1.0, ce_weight: float = 1.0,
                ignore_index: int = -100, **arguments: Any) -> Tensor:  # fmt: skip
        dice = self._dice(y, targets, ignore_index=ignore_index)
        return dice_weight * dice + ce_weight * self._crossentropy(y, targets, ignore_index=ignore_index, **arguments)

    def _node(self, node: Any, x: Tensor) -> Tensor:
        if isinstance(node, list):
            for child in node:
                x = self._node(child, x)
            return x
        kind, arguments = node
        if kind == "Sequential":
            return self._node(arguments, x)
        if kind == "Sum":
            return sum(self._node(branch, x) for branch in arguments)  # type: ignore[return-value]
        if kind == "Concat":
            return torch.cat([self._node(branch, x) for branch in arguments], 1)
        arguments = dict(arguments)
        activation = _ACTIVATIONS[arguments.pop("activation", "Identity")]
        arguments.pop("scheme", None)
        return activation(getattr(self, kind)(x, arguments.pop("name"), **arguments))

    def _parameter(self, layer: str, name: str) -> Any:
        return self.tensors.get(f"{layer}/{name}", 0.0)

    # One method per layer, with its name in a case.

    def Activation(self, x: Tensor, layer: str) -> Tensor:
        return x

    def Conv(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
             dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros") -> Tensor:  # fmt: skip
        ndim = x.ndim - 2
        if padding == "same":
            padding = _same_padding(x.shape[2:], *(_per_axis(v, ndim) for v in (kernel_size, stride, dilation)))
        x = _pad(x, padding, padding_mode).contiguous()
        weights = self._parameter(layer, "weights").movedim((-1, -2), (0, 1)).contiguous()
        conv = (F.conv1d, F.conv2d, F.conv3d)[ndim - 1]
        y = conv(x, weights, None, _per_axis(stride, ndim), 0, _per_axis(dilation, ndim), groups)
        return y + _broadcast_channels(self._parameter(layer, "bias"), y)

    def Deconv(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
               output_padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True) -> Tensor:  # fmt: skip
        ndim, weights = x.ndim - 2, self._parameter(layer, "weights")
        parts = weights.unflatten(-1, (groups, -1)).movedim((-2, -3, -1), (0, 1, 2)).flatten(0, 1)
        deconv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[ndim - 1]
        uncropped = deconv(
            x.contiguous(), parts.contiguous(), None, _per_axis(stride, ndim), 0, 0, groups, _per_axis(dilation, ndim)
        )
        crops = [
            (-before, e - after)
            for (before, after), e in zip(_per_side(padding, ndim), _per_axis(output_padding, ndim), strict=True)
        ]
        y = _pad(uncropped, [(0, after if after > 0 else 0) for _, after in crops], "zeros")
        y = _pad(y, [(before, min(after, 0)) for before, after in crops], "zeros")
        return y + _broadcast_channels(self._parameter(layer, "bias"), y)

    def MaxPooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
        ndim = x.ndim - 2
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1]
        x = _pad(x, padding, "zeros", -np.inf)
        return pool(
            x.contiguous(), _per_axis(kernel_size, ndim), _per_axis(kernel_size if stride is None else stride, ndim)
        )

    def AvgPooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0,
                   count_include_pad: bool = True) -> Tensor:  # fmt: skip
        cells = torch.ones_like(x[:1, :1])
        counted = _window_sum(_pad(cells, padding, "zeros", float(count_include_pad)), kernel_size, stride)
        return _window_sum(_pad(x, padding, "zeros"), kernel_size, stride) / counted

    def L2Pooling(self, x: Tensor, layer: str, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
        return _safe_sqrt(_window_sum(_pad(x * x, padding, "zeros"), kernel_size, stride))

    def GlobalAvgPooling(self, x: Tensor, layer: str) -> Tensor:
        return x.flatten(2).mean(2)

    def Upsample(self, x: Tensor, layer: str, factor: Any = 2, mode: str = "nearest") -> Tensor:
        size = [n * f for n, f in zip(x.shape[2:], _per_axis(factor, x.ndim - 2), strict=True)]
        if mode == "nearest":
            return F.interpolate(x, size)
        return F.interpolate(x, size, mode=("linear", "bilinear", "trilinear")[len(size) - 1], align_corners=False)

    def Pad(self, x: Tensor, layer: str, padding: Any, mode: Any = "zeros", fill: float = 0.0) -> Tensor:
        return _pad(x, padding, mode, fill)

    def Crop(self, x: Tensor, layer: str, cropping: Any) -> Tensor:
        return _pad(x, [(-before, -after) for before, after in _per_side(cropping, x.ndim - 2)], "zeros")

    def FC(self, x: Tensor, layer: str, out_features: int, bias: bool = True) -> Tensor:
        return x.movedim(1, -1).flatten(1) @ self._parameter(layer, "weights") + self._parameter(layer, "bias")

    def LocalFiltering(self, x: Tensor, layer: str, out_channels: int, kernel_size: Any, stride: Any = 1,
                       padding: Any = 0, bias: bool = False, shared: Any = False) -> Tensor:  # fmt: skip
        ndim, weights = x.ndim - 2, self._parameter(layer, "weights")
        kernel, x = _per_axis(kernel_size, ndim), _pad(x, padding, "zeros")
        for axis, (k, s) in enumerate(zip(kernel, _per_axis(stride, ndim), strict=True)):
            x = x.unfold(2 + axis, k, s)
        out = x.shape[2 : 2 + ndim]
        block = out if shared is True else (1,) * ndim if shared is False else _per_axis(shared, ndim)
        for axis, b in enumerate(block):  # all cells of a block share its filter
            weights = weights.index_select(axis, torch.arange(out[axis]) // b)
        cells, window = "xyz"[:ndim], "ijk"[:ndim]
        y = torch.einsum(f"nc{cells}{window},{cells}{window}co->no{cells}", x, weights)
        return y + self._parameter(layer, "bias").movedim(-1, 0) if bias else y

    def BatchNorm(self, x: Tensor, layer: str, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
        mean, var = (self._parameter(layer, name) for name in ("mean", "var"))
        if self.training:
            cells, statistics = x.movedim(1, 0).flatten(1), (mean, var)
            mean, var = cells.mean(1), cells.var(1, correction=0)
            count = cells.shape[1]
            for old, new in zip(statistics, (mean, var * count / max(1, count - 1)), strict=True):
                old += momentum * (new.detach() - old)
        normalised = (x - _broadcast_channels(mean, x)) / _broadcast_channels(torch.sqrt(var + eps), x)
        return normalised * _broadcast_channels(self._parameter(layer, "gamma"), x) + _broadcast_channels(
            self._parameter(layer, "beta"), x
        )

    def GroupNorm(self, x: Tensor, layer: str, groups: int = 32, eps: float = 1e-5, affine: bool = True) -> Tensor:
        parts = x.unflatten(1, (groups, -1)).flatten(2)
        centred = parts - parts.mean(2, keepdim=True)
        normalised = (centred / torch.sqrt((centred**2).mean(2, keepdim=True) + eps)).reshape(x.shape)
        if not affine:
            return normalised
        return normalised * _broadcast_channels(self._parameter(layer, "gamma"), x) + _broadcast_channels(
            self._parameter(layer, "beta"), x
        )

    def InstanceNorm(self, x: Tensor, layer: str, eps: float = 1e-5, affine: bool = False) -> Tensor:
        return self.GroupNorm(x, layer, x.shape[1], eps, affine)

    def LRN(
        self, x: Tensor, layer: str, depth: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> Tensor:
        squares = F.pad((x * x).movedim(1, -1), (depth // 2, (depth - 1) // 2))
        return x / (k + alpha / depth * squares.unfold(-1, depth, 1).sum(-1).movedim(-1, 1)) ** beta

    def LCN(self, x: Tensor, layer: str, kernel_size: Any = 9, window: str = "gaussian", sigma: float | None = None,
            padding_mode: str = "zeros", min_deviation: Any = 1.0, halo: str = "auto") -> Tensor:  # fmt: skip
        kernel = _per_axis(kernel_size, x.ndim - 2)

        def local_mean(a: Tensor) -> Tensor:
            a = _pad(a.mean(1, keepdim=True), [(k // 2, k // 2) for k in kernel], padding_mode)
            for axis, k in enumerate(kernel):
                width = sigma or k / 4
                taps = [1.0 if window == "uniform" else exp(-(((i - k // 2) / width) ** 2) / 2) for i in range(k)]
                a = a.unfold(2 + axis, k, 1) @ torch.tensor(taps, dtype=a.dtype) / sum(taps)
            return a

        v = x - local_mean(x)
        deviation = _safe_sqrt(local_mean(v * v))
        cells = tuple(range(1, x.ndim))
        minimum = (
            deviation.mean(cells, keepdim=True)
            if min_deviation == "mean"
            else torch.tensor(min_deviation, dtype=x.dtype)
        )
        divisor = torch.maximum(deviation, minimum)
        return v * torch.where(divisor > 0, 1 / torch.where(divisor > 0, divisor, 1.0), 0.0)

    def Dropout(self, x: Tensor, layer: str, rate: float = 0.5) -> Tensor:
        return x * self._draw_factors(nd.DropoutLayer(rate, name=layer), x) if self.training else x

    def OwnNoise(self, x: Tensor, layer: str) -> Tensor:
        return x * self._draw_factors(own_layers.OwnNoiseLayer(name=layer), x) if self.training else x

    def OwnStencil(self, x: Tensor, layer: str, kernel_size: Any, padding: Any = 0, mode: Any = "zeros") -> Tensor:
        taps = self._parameter(layer, "taps").movedim(-1, 0)[:, None]
        conv = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
        return conv(_pad(x, padding, mode).contiguous(), taps.contiguous(), groups=len(taps)) ** 2 / 4

    def OwnGain(self, x: Tensor, layer: str) -> Tensor:
        return x * _broadcast_channels(self._parameter(layer, "gain"), x)

    def OwnCellGain(self, x: Tensor, layer: str) -> Tensor:
        return x * self._parameter(layer, "gain").movedim(-1, 0)

    def OwnProjection(self, x: Tensor, layer: str, out_features: int) -> Tensor:
        return x.movedim(1, -1).flatten(1) @ self._parameter(layer, "weights")

    def OwnCenter(self, x: Tensor, layer: str) -> Tensor:
        return x - x.flatten(2).mean(2)[(..., *(None,) * (x.ndim - 2))]

    def OwnExcitation(self, x: Tensor, layer: str) -> Tensor:
        factors = torch.tanh(x.flatten(2).mean(2) @ self._parameter(layer, "weights"))
        return x * factors[(..., *(None,) * (x.ndim - 2))]

    def OwnBatchCenter(self, x: Tensor, layer: str) -> Tensor:
        mean = running = self._parameter(layer, "mean")
        if self.training:
            mean = x.movedim(1, 0).flatten(1).mean(1)
            running += 0.25 * (mean.detach() - running)
        return x - _broadcast_channels(mean, x)

    def OwnCounter(self, x: Tensor, layer: str) -> Tensor:
        count = self._parameter(layer, "mean")
        if self.training:
            count += 1
        return x / (2 + float(abs(count)))

    def OwnMoment(self, x: Tensor, layer: str) -> Tensor:
        return (x * _ramp(x.shape[2:])).flatten(2).sum(2)

    def OwnSpread(self, x: Tensor, layer: str, extent: Any) -> Tensor:
        return x[(..., *(None,) * len(extent))] * _ramp(extent)

    def _draw_factors(self, layer: nd.Layer, x: Tensor) -> Tensor:
        """Return the random factors of a layer, as its output for an input of ones."""
        model_class = nd.Convnet if x.ndim > 2 else nd.MLP
        model = model_class([layer], seed=self.case.seed, dtype="float64", backend="numpy")
        model.build((*x.shape[2:], x.shape[1]), len(x))
        model.step = self.step
        return torch.tensor(model.fprop(np.ones((len(x), *x.shape[2:], x.shape[1])))).movedim(-1, 1)


def _ramp(extent: Any) -> Tensor:
    return torch.tensor(own_layers.ramp(nd.Box((0,) * len(extent), tuple(extent)))[..., 0])


def _per_axis(value: Any, ndim: int) -> tuple[int, ...]:
    return (value,) * ndim if isinstance(value, int) else tuple(value)


def _per_side(value: Any, ndim: int) -> list[tuple[int, int]]:
    return [(v, v) if isinstance(v, int) else tuple(v) for v in ((value,) * ndim if isinstance(value, int) else value)]


def _same_padding(extent: Any, kernel: Any, stride: Any, dilation: Any) -> list[tuple[int, int]]:
    """Return the padding for ceil(extent / stride) outputs, with the extra cell, if any, at the end."""
    missing = [
        max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
        for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True)
    ]
    return [(m // 2, (m + 1) // 2) for m in missing]


def _pad(x: Tensor, padding: Any, mode: Any, fill: float = 0.0) -> Tensor:
    """Pad an image; negative padding crops."""
    modes = [mode] * (x.ndim - 2) if isinstance(mode, str) else mode
    for axis, (before, after) in enumerate(_per_side(padding, x.ndim - 2), start=2):
        added, mode = (max(before, 0), max(after, 0)), modes[axis - 2]
        if mode != "zeros" and any(added):
            source = np.pad(np.arange(x.shape[axis]), added, mode=_MODES[mode])  # type: ignore[call-overload]
            x = x.index_select(axis, torch.tensor(source))
        elif any(added):
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + list(added), value=fill)
        start = max(-before, 0)
        x = x.narrow(axis, start, x.shape[axis] - start - max(-after, 0))
    return x


def _window_sum(x: Tensor, kernel_size: Any, stride: Any) -> Tensor:
    ndim = x.ndim - 2
    kernel = _per_axis(kernel_size, ndim)
    for axis, (k, s) in enumerate(zip(kernel, kernel if stride is None else _per_axis(stride, ndim), strict=True)):
        x = x.unfold(2 + axis, k, s).sum(-1)
    return x


def _safe_sqrt(square: Tensor) -> Tensor:
    """Return the square root, with a zero gradient at zero."""
    return torch.where(square > 0, torch.sqrt(torch.where(square > 0, square, 1.0)), 0.0)


def _broadcast_channels(values: Any, like: Tensor) -> Any:
    return values.reshape(1, -1, *(1,) * (like.ndim - 2)) if isinstance(values, Tensor) else values


def _to_channels_last(y: Tensor) -> Tensor:
    return y.movedim(1, -1)


def _create_optimizer(name: str, arguments: dict[str, Any], tensors: list[Tensor]) -> torch.optim.Optimizer:
    rate = arguments.pop("learning_rate")
    arguments.pop("clip_norm", None)
    arguments.pop("ema", None)  # has no effect on training
    betas = {"betas": (arguments.pop("beta1", 0.9), arguments.pop("beta2", 0.999))} if name.startswith("Adam") else {}
    return getattr(torch.optim, name)(tensors, rate, **betas, **arguments)
