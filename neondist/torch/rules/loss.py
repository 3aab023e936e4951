"""Loss functions: means and sums over all cells of the global images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import log, pi, prod
from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..ir.errors import CaptureError
from ..ir.graph import Value
from ..ir.layout import replicated
from ..ir.registry import CAPTURE_REPLACEMENTS, rule
from ..lowering.lowering import Lowering, tensor_call
from .reduce import total


def _reduce_losses(lowering: Lowering, losses: Value, weights: Value | None, reduction: int) -> Value:
    """Return the losses unreduced (0), summed and divided by their number or total weight (1), or summed (2)."""
    if reduction == 0:
        return losses
    result, *total_weight = (
        total(lowering, each, range(len(each.shape)), keepdim=False) for each in (losses, weights) if each is not None
    )
    if reduction == 1:
        count = prod(losses.shape)
        result = lowering.local(lambda a, n=count: a / n, [result, *total_weight], ())
    return lowering.convert_dtype(result, losses.dtype)


@rule("aten.cross_entropy_loss.default", whole=("weight",))
def cross_entropy_loss(
    lowering: Lowering, x: Value, target: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    """Sum losses over all cells, and divide by the number of cells or the total weight."""
    loss_function = partial(F.cross_entropy, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return _class_losses(lowering, x, target, weight, reduction, ignore_index, loss_function)


def _class_losses(
    lowering: Lowering, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int,
    loss_function: Callable[..., torch.Tensor],
) -> Value:  # fmt: skip
    """Return the reduced losses of scores x; their classes are dimension 1, or dimension 0 of a vector."""
    class_dim = 1 if len(x.shape) > 1 else 0
    x = lowering.gather(x, [class_dim])
    layout = (*x.layout[:class_dim], *x.layout[class_dim + 1 :])
    is_soft_target = target.dtype.is_floating_point and len(target.shape) == len(x.shape)
    target = lowering.align_for_broadcast(target, x.layout if is_soft_target else layout, x.axes)
    run = partial(loss_function, reduction="none")
    losses = lowering.local(run, [x, target, weight], layout, lowering.fake_out.dtype)
    cell_weights = None if is_soft_target else _cell_weights(lowering, losses, target, weight, ignore_index)
    return _reduce_losses(lowering, losses, cell_weights, reduction)


def _cell_weights(lowering: Lowering, losses: Value, target: Value, weight: Value | None, ignore_index: int) -> Value:
    """Return the weight of each cell's class (default 1), and 0 for ignored cells."""
    dtype = losses.dtype

    def run(t: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        is_counted = t != ignore_index
        return is_counted.to(dtype) if w is None else torch.where(is_counted, w[t.where(is_counted, 0)], 0).to(dtype)

    return lowering.local(run, [target, weight], losses.layout, dtype)


@rule("aten.one_hot.default")
def one_hot(lowering: Lowering, x: Value, num_classes: int = -1) -> Value:
    """Compute locally, with the classes as a new last dimension."""
    if num_classes < 0:
        lowering.refuse("the number of classes depends on the values; pass num_classes")
    return lowering.local(lambda a: F.one_hot(a, num_classes), [x], (*x.layout, (Atom(num_classes),)), torch.int64)


@rule("aten.multilabel_margin_loss.default")
def multilabel_margin_loss(lowering: Lowering, x: Value, target: Value, reduction: int = 1) -> Value:
    """Sum losses over all samples. Not decomposed: PyTorch 2.13's decomposition counts targets after the first -1."""
    x = lowering.gather(x, [-1])
    target = lowering.align_for_broadcast(target, x.layout, x.axes)
    run = lambda a, t: F.multilabel_margin_loss(a, t, reduction="none")  # noqa: E731
    return _reduce_losses(lowering, lowering.local(run, [x, target], x.layout[:-1]), None, reduction)


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default", whole=("weight",))
def nll_loss(
    lowering: Lowering, x: Value, target: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Value:  # fmt: skip
    """Sum losses over all cells, and divide by the number of cells or the total weight."""
    loss_function = partial(F.nll_loss, ignore_index=ignore_index)
    return _class_losses(lowering, x, target, weight, reduction, ignore_index, loss_function)


@rule("aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
      "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default", "aten.kl_div.default",
      "aten.soft_margin_loss.default")  # fmt: skip
def elementwise_loss(lowering: Lowering, x: Value, reduction: int = 1, **options: object) -> Value:
    """Sum losses over all cells."""
    values, run = tensor_call(lowering.target, [x], {**options, "reduction": 0})
    aligned, layout = lowering.align_pointwise(values)
    losses = lowering.local(run, aligned, layout, lowering.fake_out.dtype)
    return _reduce_losses(lowering, losses, None, reduction)


@rule("aten.hinge_embedding_loss.default", "aten.cosine_embedding_loss.default", applies_if_replicated=True)
def embedding_loss(lowering: Lowering, *_: object, **__: object) -> Value:
    """Decompose even replicated losses, because labels have no gradient."""
    return lowering.decompose()


def traceable_gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Return torch.nn.functional.gaussian_nll_loss, with NaN instead of an error for negative variances."""
    if not isinstance(var, torch.Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape:
        var = var.unsqueeze(-1) if var.shape == input.shape[:-1] else var
        if var.dim() != input.dim() or sum(v for i, v in zip(input.shape, var.shape, strict=True) if i != v) != 1:
            raise ValueError(f"var: shape {tuple(var.shape)} does not fit an input of shape {tuple(input.shape)}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    clamped_var = var + (var.clamp(min=eps) - var).detach()  # var has a gradient below eps, too
    loss = 0.5 * (clamped_var.log() + (input - target) ** 2 / clamped_var).where(var >= 0, torch.nan)
    loss = loss + 0.5 * log(2 * pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def weight_of_l1_loss_caller() -> torch.Tensor | None:
    """Return the weight of the current torch.nn.functional.l1_loss call, which its overrides do not receive."""
    frame, weight = sys._getframe(), None
    while frame.f_back is not None and weight is None:
        frame = frame.f_back
        weight = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
    return weight


def l1_loss_with_weight(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return torch.nn.functional.l1_loss, including its weight argument."""
    kwargs_with_weight = kwargs if (weight := weight_of_l1_loss_caller()) is None else {**kwargs, "weight": weight}
    return F.l1_loss(*args, **kwargs_with_weight)


def checked_cross_entropy(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return torch.nn.functional.cross_entropy; raise CaptureError for a single class, over which it is constant."""
    if input.ndim > 1 and input.shape[1] == 1:
        raise CaptureError(
            "the cross entropy over a single class is 0 for any output, so that nothing is trained; use"
            " BCEWithLogitsLoss for one output and two classes, MSELoss for regression, or give the last layer one"
            " output per class"
        )
    return F.cross_entropy(input, *args, **kwargs)


torch.library.define(
    "neondist::ctc_loss",
    "(Tensor x, Tensor target, Tensor lengths, Tensor target_lengths, int blank, bool zero_infinity) -> Tensor",
)


@torch.library.register_fake("neondist::ctc_loss")
def _fake_ctc_losses(
    x: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor, *options: object
) -> torch.Tensor:
    return x.new_empty(x.shape[1:-1])


@rule("neondist.ctc_loss.default", applies_if_replicated=True)
def ctc_loss(
    lowering: Lowering, x: Value, target: Value, lengths: Value, target_lengths: Value, blank: int, zero_infinity: bool
) -> Value:
    """Gather the scores of all sequences."""
    args = [lowering.gather(value) for value in (x, target, lengths, target_lengths)]
    run = partial(F.ctc_loss, blank=blank, reduction="none", zero_infinity=zero_infinity)
    return lowering.local(run, args, replicated(x.shape[1:-1]))


def traceable_ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return torch.nn.functional.ctc_loss; PyTorch's own implementation reads the lengths."""
    lengths, counts = (torch.as_tensor(each).reshape(log_probs.shape[1:-1]) for each in (input_lengths, target_lengths))
    loss = torch.ops.neondist.ctc_loss(log_probs, targets, lengths, counts, blank, zero_infinity)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else (loss / counts.clamp(min=1)).mean()


CAPTURE_REPLACEMENTS[F.cross_entropy] = checked_cross_entropy
CAPTURE_REPLACEMENTS[F.ctc_loss] = traceable_ctc_loss
CAPTURE_REPLACEMENTS[F.gaussian_nll_loss] = traceable_gaussian_nll_loss
CAPTURE_REPLACEMENTS[F.l1_loss] = l1_loss_with_weight
