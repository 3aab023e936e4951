"""Bytes that ranks send and reduce in a training step, as predicted by `neondist check`."""

from __future__ import annotations

from .build import build_model, make_grid_shape
from .case import Case, Grid


class PredictedBytes:
    """Predicted bytes of a case on a grid."""

    def __init__(self, case: Case, grid: Grid) -> None:
        self.model, self.shape = build_model(case, dist=True), make_grid_shape(grid)
        self.plans = self.model.plan(case.shape, self.shape, case.batch)

    def sent(self, samples: int) -> dict[str, int]:
        """Return the halo bytes sent by all ranks, by layer."""
        return {
            plan.name: cost.total_sent_bytes for plan, cost in zip(self.plans, self.plans.costs(samples), strict=True)
        }

    def summed(self, samples: int, rank: int) -> int:
        """Return the bytes that a rank contributes to reductions and redistributions."""
        byte_counts = self.plans.reduction_bytes, self.plans.redistribution_bytes
        return sum(sum(count(rank, samples).values()) for count in byte_counts)
