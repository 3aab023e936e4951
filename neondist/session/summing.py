"""What a training step sums over ranks, in bytes, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comm import group_of
from ..geometry import GridShape, split
from ..models.ledger import GRADIENTS, LOSS
from ..parallel import HEADER
from ..plan import Graph

if TYPE_CHECKING:
    from ..models import Model
    from ..models.plan import LayerPlan, ModelPlan


def sums_of_step(model: Model, plans: ModelPlan, batch_size: int, grid: GridShape, rank: int) -> dict[str, int]:
    """Return the bytes of the arrays that a rank gives into sums in a training step.

    By layer, and under 'gradients' and 'loss', as the ledger records them; what gives nothing is left out.
    """
    replica, tile = divmod(rank, grid.tiles)
    lo, hi = split(batch_size, grid.replicas, replica)
    ranks = {"world": grid.size, "tiles": grid.tiles, "replicas": grid.replicas}
    size, samples, ungiven = model.dtype.itemsize, hi - lo, Graph(model.layers, plans.input_shape).first_layers
    found = {
        plan.name: sum(
            (one.each * samples + one.once) * size
            for one in plan.sums
            if one.group and ranks[one.group] > 1 and (one.direction == "forward" or layer not in ungiven)
        )
        for layer, plan in zip(model.leaves, plans, strict=True)
    }
    shared, own = _trained(model, plans, grid, tile)
    found[GRADIENTS] = size * ((HEADER + shared) * (grid.size > 1) + own * (grid.replicas > 1))
    tiled = len(plans.output_shape) > 1
    whole, inside = group_of(tiled, replicas=True), group_of(tiled, replicas=False)
    once, each = ranks[whole or "tiles"] > 1, inside is not None and ranks[inside] > 1
    found[LOSS] = 8 * (once + each * samples * model.cost.sums_for(plans.output_shape))
    return {name: count for name, count in found.items() if count}


def _trained(model: Model, plans: Sequence[LayerPlan], grid: GridShape, tile: int) -> tuple[int, int]:
    """Return how many trained numbers all ranks share, and how many are those of this tile alone."""
    shared = own = 0
    for layer, plan in zip(model.leaves, plans, strict=True):
        for parameter in layer.parameters_for(plan.input_shape).values():
            held = parameter.size_on(grid, tile)
            shared, own = (shared, own + held) if parameter.layout.cut else (shared + held, own)
    return shared, own
