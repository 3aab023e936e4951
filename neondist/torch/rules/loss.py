"""Loss functions: means and sums over all cells of the global images."""

from __future__ import annotations

import sys
from math import log, pi, prod
from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..ir.graph import Value
from ..ir.layout import axes_of
from ..ir.registry import CAPTURED_AS, rule
from ..lowering.lower import Lowering


def _total(lowering: Lowering, each: Any, weights: Any, reduction: int) -> Any:
    """Return the values unreduced (0), their mean, optionally weighted (1), or their sum (2)."""
    if reduction == 0:
        return each
    total = lowering.reduced(lambda a: a.sum(), [each], axes_of(each.layout), ())
    if reduction == 2:
        return total
    if weights is None:
        count = prod(each.shape)
        return lowering.local(lambda a: a / count, [total], ())
    whole = lowering.reduced(lambda a: a.sum(), [weights], axes_of(weights.layout), (), weights.dtype)
    return lowering.local(lambda a, w: a / w, [total, whole], ())


@rule("aten.cross_entropy_loss.default", whole=("weight",))
def cross_entropy(
    lowering: Lowering, x: Value, target: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Reduction: sums over cells, and their number or total weight."""
    channel = 1 if len(x.shape) > 1 else 0
    x = lowering.gathered(x, [channel])
    layout = (*x.layout[:channel], *x.layout[channel + 1 :])
    probabilities = target.dtype.is_floating_point and len(target.shape) == len(x.shape)
    there = lowering.aligned(target, x.layout if probabilities else layout, x.axes)

    def each(a: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        return F.cross_entropy(a, t, w, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)

    losses = lowering.local(each, [x, there, weight], layout, lowering.out.dtype)
    if probabilities:
        return _total(lowering, losses, None, reduction)
    return _total(lowering, losses, _weights(lowering, losses, there, weight, ignore_index), reduction)


def _weights(lowering: Lowering, losses: Any, target: Value, weight: Value | None, ignored: int) -> Any:
    """Return the weight of each cell's class (default 1), and 0 for ignored cells."""
    dtype = losses.dtype

    def run(t: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        kept = t != ignored
        return kept.to(dtype) if w is None else torch.where(kept, w[t.where(kept, 0)], 0).to(dtype)

    return lowering.local(run, [target, weight], losses.layout, dtype)


@rule("aten.one_hot.default")
def one_hot(lowering: Lowering, x: Value, num_classes: int = -1) -> Any:
    """Local: classes as a new last dimension."""
    if num_classes < 0:
        lowering.refuse("the number of classes depends on the values; give num_classes")
    return lowering.local(lambda a: F.one_hot(a, num_classes), [x], (*x.layout, (Atom(num_classes),)), torch.int64)


@rule("aten.multilabel_margin_loss.default")
def multilabel_margin(lowering: Lowering, x: Value, target: Value, reduction: int = 1) -> Any:
    """Reduction: sums over samples; PyTorch 2.13's decomposition counts targets after the first -1."""
    x = lowering.gathered(x, [-1])
    there = lowering.aligned(target, x.layout, x.axes)
    run = lambda a, t: F.multilabel_margin_loss(a, t, reduction="none")  # noqa: E731
    return _total(lowering, lowering.local(run, [x, there], x.layout[:-1]), None, reduction)


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default", whole=("weight",))
def nll(
    lowering: Lowering,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Any:
    """Reduction: sums over cells, and their number or total weight."""
    channel = 1 if len(x.shape) > 1 else 0
    x = lowering.gathered(x, [channel])
    layout = (*x.layout[:channel], *x.layout[channel + 1 :])
    there = lowering.aligned(target, layout, x.axes)
    losses = lowering.local(
        lambda a, t, w: F.nll_loss(a, t, w, ignore_index=ignore_index, reduction="none"), [x, there, weight], layout
    )
    return _total(lowering, losses, _weights(lowering, losses, there, weight, ignore_index), reduction)


def _pairwise(function: Any) -> Any:
    def rule_of(
        lowering: Lowering, x: Value, target: Value, weight: Value | None = None, reduction: int = 1, **more: Any
    ) -> Any:
        """Reduction: sums over cells."""
        values = [x, target, *([] if weight is None else [weight])]
        named = {name: value for name, value in more.items() if hasattr(value, "layout_or_none")}
        values += named.values()
        layout = lowering.common([value.layout for value in values])
        context = axes_of(layout)
        aligned = [lowering.aligned(value, layout, context) for value in values]
        static = {name: value for name, value in more.items() if name not in named and value is not None}

        def run(a: torch.Tensor, t: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            given = list(rest)
            if weight is not None:
                static["weight"] = given.pop(0)
            return function(a, t, reduction="none", **static, **dict(zip(named, given, strict=True)))

        each = lowering.local(run, aligned, layout, lowering.out.dtype)
        return _total(lowering, each, None, reduction)

    return rule_of


for _name, _function in {
    "aten.mse_loss.default": F.mse_loss,
    "aten.l1_loss.default": F.l1_loss,
    "aten.smooth_l1_loss.default": F.smooth_l1_loss,
    "aten.huber_loss.default": F.huber_loss,
    "aten.binary_cross_entropy.default": F.binary_cross_entropy,
    "aten.binary_cross_entropy_with_logits.default": F.binary_cross_entropy_with_logits,
    "aten.kl_div.default": F.kl_div,
    "aten.soft_margin_loss.default": F.soft_margin_loss,
}.items():
    rule(_name)(_pairwise(_function))


def gaussian_nll(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    """Return torch.nn.functional.gaussian_nll_loss, with NaN instead of an error for negative variances."""
    if not isinstance(var, torch.Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape:
        var = var.unsqueeze(-1) if var.shape == input.shape[:-1] else var
        if var.dim() != input.dim() or sum(v for i, v in zip(input.shape, var.shape, strict=True) if i != v) != 1:
            raise ValueError(f"var: shape {tuple(var.shape)} does not fit an input of shape {tuple(input.shape)}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    clamped = var + (var.clamp(min=eps) - var).detach()  # its gradient is passed on below eps, too
    loss = 0.5 * (clamped.log() + (input - target) ** 2 / clamped).where(var >= 0, torch.nan)
    loss = loss + 0.5 * log(2 * pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def hidden_weight() -> torch.Tensor | None:
    """Return the weight of the current torch.nn.functional.l1_loss call, which its overrides do not receive."""
    frame, weight = sys._getframe(), None
    while frame.f_back is not None and weight is None:
        frame = frame.f_back
        weight = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
    return weight


def l1(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return torch.nn.functional.l1_loss, including its weight argument."""
    given = kwargs if (weight := hidden_weight()) is None else {**kwargs, "weight": weight}
    return F.l1_loss(*args, **given)


CAPTURED_AS[F.gaussian_nll_loss] = gaussian_nll
CAPTURED_AS[F.l1_loss] = l1
