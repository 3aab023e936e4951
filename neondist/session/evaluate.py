"""The cost and the metrics of a model over a whole split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
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
    counts = [min(batch_size, len(split) - start) for start in range(0, len(split), batch_size)]
    parts = (at * batch_size + np.arange(*model.grid.sample_range(count)) for at, count in enumerate(counts))
    with closing(split.batches(parts, model.dtype)) as read:
        for count, (x, targets) in zip(counts, read, strict=True):
            y = model.fprop(x, training=False, batch_size=count)
            targets = model.local_targets(targets, count)
            sums[0] += model.cost.value(y, targets, model.output.total)
            for at, metric in enumerate(metrics):
                sums[1 + 2 * at : 3 + 2 * at] += metric.measure(y, targets)
    model.total_over_output(sums)
    terms = len(split) * model.cost.cells(model.output_shape)
    results = {"loss": _mean(sums[0], terms)}
    return results | {m.name: _mean(*sums[1 + 2 * at : 3 + 2 * at]) for at, m in enumerate(metrics)}


def _mean(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")
