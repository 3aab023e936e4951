"""Losses of torch.nn.functional with all options, by name, as functions of (logits, target, labels).

Labels are images (N, 1, ...) of classes; cells with -1 are ignored, by the `ignore_index` of each loss.
"""

from itertools import product

import torch
import torch.nn.functional as F

CLASSES = 4
REDUCTIONS = "none", "mean", "sum"
IGNORED = 255, -1, -100, 2, 10**6
SMOOTHING = 0.0, 0.1, 1.0
VIEWS = {
    "images": lambda v: v,
    "cells": lambda v: v.movedim(1, -1).flatten(0, -2),
    "rows": lambda v: v[..., 0],
    "vectors": lambda v: v.flatten(2)[..., 0],
    "means": lambda v: v.flatten(2).mean(2) if v.shape[1] > 1 else v.flatten(2)[..., 1],
}
"""Arguments of a loss: images, (cells, C), images with one axis less, (N, C) of one cell or the mean of all."""
VECTOR_VIEWS = "cells", "vectors", "means"


def make_weights(*zeros):
    return torch.tensor([0.0 if c in zeros else c + 1.0 for c in range(CLASSES)])


WEIGHTS = {"no weights": None, "weights": make_weights(), "weights of zero": make_weights(0, 2)}
BROADCAST = {
    "nothing": lambda y: None,
    "channels": lambda y: torch.arange(1.0, y.shape[1] + 1).view(-1, *[1] * (y.dim() - 2)).to(y),
    "the last axis": lambda y: torch.arange(1.0, y.shape[-1] + 1).to(y),
}


def mask_targets(labels, ignored):
    return torch.where(labels[:, 0] < 0, ignored, labels[:, 0]).long()


def cast_like(y, weight):
    return None if weight is None else weight.to(y)


def yield_class_losses():
    for (name, w), r in product(WEIGHTS.items(), REDUCTIONS):
        for ignored, s in product(IGNORED, SMOOTHING):
            yield (
                f"cross_entropy, {name}, {ignored} ignored, smoothing {s}, {r}",
                lambda y, t, k, w=w, r=r, ignored=ignored, s=s: F.cross_entropy(
                    y, mask_targets(k, ignored), cast_like(y, w), ignore_index=ignored, label_smoothing=s, reduction=r
                ),
            )
        for ignored in IGNORED:
            yield (
                f"nll_loss, {name}, {ignored} ignored, {r}",
                lambda y, t, k, w=w, r=r, ignored=ignored: F.nll_loss(
                    y.log_softmax(1), mask_targets(k, ignored), cast_like(y, w), ignore_index=ignored, reduction=r
                ),
            )
        for s in SMOOTHING:
            yield (
                f"cross_entropy of probabilities, {name}, smoothing {s}, {r}",
                lambda y, t, k, w=w, r=r, s=s: F.cross_entropy(
                    y, t.softmax(1), cast_like(y, w), label_smoothing=s, reduction=r
                ),
            )


def yield_cell_losses():
    for r in REDUCTIONS:
        yield from _differences(r)
        yield from _likelihoods(r)
        for (name, w), (pos_name, p) in product(BROADCAST.items(), BROADCAST.items()):
            yield (
                f"binary_cross_entropy_with_logits, weight of {name}, pos_weight of {pos_name}, {r}",
                lambda y, t, k, w=w, p=p, r=r: F.binary_cross_entropy_with_logits(
                    y, t.sigmoid(), w(y), pos_weight=p(y), reduction=r
                ),
            )
        for name, w in {**BROADCAST, "cells": lambda y: (y.detach()[:, :1] > 0).to(y)}.items():
            yield (
                f"binary_cross_entropy, weight of {name}, {r}",
                lambda y, t, k, w=w, r=r: F.binary_cross_entropy(y.sigmoid(), t.sigmoid(), w(y), reduction=r),
            )
        yield (
            f"binary_cross_entropy_with_logits, weight of labels, {r}",
            lambda y, t, k, r=r: F.binary_cross_entropy_with_logits(
                y, t.sigmoid(), (k >= 0).to(y), pos_weight=(k + 2).detach(), reduction=r
            ),
        )
        for weighted in (False, True):
            yield (
                f"multilabel_soft_margin_loss, weight {weighted}, {r}",
                lambda y, t, k, r=r, weighted=weighted: F.multilabel_soft_margin_loss(
                    y, (t > 0).to(y), BROADCAST["the last axis"](y) if weighted else None, reduction=r
                ),
            )


def _differences(r):
    def signs(t):
        return t.detach().sign()

    def share(t):
        return t.detach().sigmoid()

    yield f"mse_loss, {r}", lambda y, t, k: F.mse_loss(y, t, reduction=r)
    yield f"mse_loss, weight, {r}", lambda y, t, k: F.mse_loss(y, t, reduction=r, weight=share(t))
    yield f"mse_loss of one channel, {r}", lambda y, t, k: F.mse_loss(y, t[:, :1], reduction=r)
    yield f"l1_loss, {r}", lambda y, t, k: F.l1_loss(y, t, reduction=r)
    yield f"l1_loss, weight, {r}", lambda y, t, k: F.l1_loss(y, t, reduction=r, weight=share(t))
    yield f"smooth_l1_loss, {r}", lambda y, t, k: F.smooth_l1_loss(y, t, reduction=r, beta=0.5)
    yield f"smooth_l1_loss, beta 0, {r}", lambda y, t, k: F.smooth_l1_loss(y, t, reduction=r, beta=0.0)
    yield f"huber_loss, {r}", lambda y, t, k: F.huber_loss(y, t, reduction=r, delta=0.4)
    yield f"huber_loss, weight, {r}", lambda y, t, k: F.huber_loss(y, t, reduction=r, weight=share(t))
    yield f"soft_margin_loss, {r}", lambda y, t, k: F.soft_margin_loss(y, signs(t), reduction=r)
    yield f"hinge_embedding_loss, {r}", lambda y, t, k: F.hinge_embedding_loss(y, signs(t), 0.7, reduction=r)
    yield f"margin_ranking_loss, {r}", lambda y, t, k: F.margin_ranking_loss(y, t, signs(t), 0.2, reduction=r)


def _likelihoods(r):
    for log, reduction in product((False, True), {r, "batchmean"} if r == "mean" else {r}):
        yield (
            f"kl_div, log_target {log}, {reduction}",
            lambda y, t, k, log=log, reduction=reduction: F.kl_div(
                y.log_softmax(1), t.log_softmax(1) if log else t.softmax(1), reduction=reduction, log_target=log
            ),
        )
    for log, full in product((False, True), (False, True)):
        yield (
            f"poisson_nll_loss, log_input {log}, full {full}, {r}",
            lambda y, t, k, log=log, full=full: F.poisson_nll_loss(
                y if log else y.exp(), t.exp(), log_input=log, full=full, reduction=r
            ),
        )
    variances = {
        "of each": lambda t: (t - 0.3).clamp(min=0),
        "of each cell": lambda t: t[:, :1].exp(),
        "of one": lambda t: 0.3,
    }
    for (name, variance), full in product(variances.items(), (False, True)):
        yield (
            f"gaussian_nll_loss, variance {name}, full {full}, {r}",
            lambda y, t, k, variance=variance, full=full: F.gaussian_nll_loss(
                y, t, variance(t), full=full, eps=0.1, reduction=r
            ),
        )


def yield_vector_losses():
    """Yield the losses that accept only vectors (N, C)."""
    for r in REDUCTIONS:
        for p, w in product((1, 2), (None, make_weights())):
            yield (
                f"multi_margin_loss, p {p}, weight {w is not None}, {r}",
                lambda y, t, k, p=p, w=w, r=r: F.multi_margin_loss(
                    y, k[:, 0].abs().long(), p, 0.8, cast_like(y, w), reduction=r
                ),
            )
        yield (
            f"multilabel_margin_loss, {r}",
            lambda y, t, k, r=r: F.multilabel_margin_loss(
                y, torch.where((t > 0).long().cumprod(1) > 0, torch.arange(CLASSES), -1), reduction=r
            ),
        )
        yield (
            f"cosine_embedding_loss, {r}",
            lambda y, t, k, r=r: F.cosine_embedding_loss(y, t, k[:, 0].detach().sign() + 0.5, 0.1, reduction=r),
        )
        yield (
            f"triplet_margin_loss, {r}",
            lambda y, t, k, r=r: F.triplet_margin_loss(y, t, y.flip(1) * t, 1.5, swap=True, reduction=r),
        )
        yield (
            f"triplet_margin_with_distance_loss, {r}",
            lambda y, t, k, r=r: F.triplet_margin_with_distance_loss(y, t, y.flip(1) * t, margin=1.5, reduction=r),
        )


def apply_view(view, loss):
    return lambda *arguments: loss(*map(VIEWS[view], arguments))


def list_losses():
    """Return all losses by name."""
    dense = product(VIEWS, [*yield_class_losses(), *yield_cell_losses()])
    result = {f"{name}, {view}": apply_view(view, loss) for view, (name, loss) in dense}
    return result | {
        f"{name}, {v}": apply_view(v, loss) for v, (name, loss) in product(VECTOR_VIEWS, list(yield_vector_losses()))
    }
