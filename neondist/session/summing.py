"""What a step sums over ranks, under its name of before; it goes with the next release."""

from __future__ import annotations

import warnings

from ..geometry import GridShape
from ..models import Model
from ..plan import Plan


def sums_of_step(model: Model, plans: Plan, batch_size: int, grid: GridShape, rank: int) -> dict[str, int]:
    """Return `plans.reduced(rank, batch_size)`; the other arguments are those of before."""
    warnings.warn("sums_of_step is plan.reduced(rank, batch_size) now", DeprecationWarning, stacklevel=2)
    return plans.reduced(rank, batch_size)
