"""The cost and the metrics of a model over a whole split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..metrics import Metric

if TYPE_CHECKING:
    from ..datasets import Split
    from ..models import Model


def evaluate(model: Model, split: Split, batch_size: int, metrics: Sequence[Metric] = ()) -> dict[str, float]:
    """Return the mean cost ('loss') and every metric, by its name, over all samples of `split`; collective.

    Parameters
    ----------
    model : Model
        Built; it is evaluated as it is for inference (no dropout, running statistics).
    split : Split
        This rank's tiles and all targets.
    batch_size : int
        Samples per pass, over all replicas.
    metrics : sequence of Metric

    Returns
    -------
    dict
        Equal on every rank; NaN where there is nothing to count.
    """
    sums = np.zeros(1 + 2 * len(metrics))
    for start in range(0, len(split), batch_size):
        batch = np.arange(start, min(start + batch_size, len(split)))
        lo, hi = model.grid.sample_range(len(batch))
        y = model.fprop(split.images(batch[lo:hi], model.dtype), training=False, batch_size=len(batch))
        targets = model.local_targets(split.targets(batch), len(batch))
        sums[0] += model.cost.value(y, targets, model.output.total)
        for at, metric in enumerate(metrics):
            sums[1 + 2 * at : 3 + 2 * at] += metric.measure(y, targets)
    model.total_over_output(sums)
    terms = len(split) * model.cost.cells(model.output_shape)
    results = {"loss": _mean(sums[0], terms)}
    return results | {m.name: _mean(*sums[1 + 2 * at : 3 + 2 * at]) for at, m in enumerate(metrics)}


def _mean(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")
