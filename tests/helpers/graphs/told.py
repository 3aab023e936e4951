"""Bytes that ranks send and sum in a training step, as `neondist check` reports them."""

from __future__ import annotations

from .build import grid_shape, model
from .case import Case, Grid


class Told:
    """A case on a grid."""

    def __init__(self, case: Case, grid: Grid) -> None:
        self.model, self.shape = model(case, dist=True), grid_shape(grid)
        self.plans = self.model.plan(case.shape, self.shape, case.batch)

    def sent(self, samples: int) -> dict[str, int]:
        """Return the bytes of halos that all ranks send together, by layer."""
        return {plan.name: cost.sent_all for plan, cost in zip(self.plans, self.plans.costs(samples), strict=True)}

    def summed(self, samples: int, rank: int) -> int:
        """Return the bytes that a rank gives into sums and redistributions."""
        ways = self.plans.reduced, self.plans.redistributed
        return sum(sum(way(rank, samples).values()) for way in ways)
