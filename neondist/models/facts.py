"""Facts of a model that are compared over the ranks."""

from __future__ import annotations

from ..arrays.namespace import to_host
from ..comm.agree import checksum_of
from ..comm.facts import described
from ..halo import scheme_text
from ..parallel import LayerParameters
from ..plan import ModelPlan
from .trainable import TrainableModel


def facts_of(model: TrainableModel, plan: ModelPlan) -> dict[str, str]:
    """Return the layers, the layout of the weights, and how they are trained."""
    strategy = plan.parameters.strategy
    return {
        "model": f"{model}",
        "seed": f"{model.seed}",
        "dtype": f"{model.dtype}, precision: {model.precision.name}, nonfinite: {model.nonfinite}",
        "optimizer": described(model.optimizer, model.optimizer.arguments()),
        "cost": described(model.cost, model.cost.arguments()),
        **dict(line.split(": ", 1) for line in plan.outline()),
        **{f"scheme of '{name}'": scheme_text(scheme) for name, scheme in model.schemes.items()},
        "strategy": f"{strategy.builder} {strategy.digest}",
    }


def checksum_of_weights(parameters: LayerParameters) -> int:
    """Return a checksum of all arrays of which every rank has the whole."""
    found = 0
    for shard, array in parameters.arrays():
        if not shard.cut and shard.share is None:
            found = checksum_of(to_host(array), found)
    return found
