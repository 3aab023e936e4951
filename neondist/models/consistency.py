"""Properties of a model that are compared across ranks."""

from __future__ import annotations

from ..arrays.namespace import to_host
from ..comm.agreement import checksum_of
from ..comm.argument_text import describe_object
from ..halo import scheme_text
from ..parallel import LayerParameters
from ..plan import ModelPlan
from .trainable import TrainableModel


def settings_to_compare(model: TrainableModel, plan: ModelPlan) -> dict[str, str]:
    """Return the layers, the layout of the weights, and the training settings, by name."""
    strategy = plan.parameters.strategy
    return {
        "model": model.display_name,
        "seed": f"{model.seed}",
        "dtype": f"{model.dtype}, precision: {model.precision.name}, nonfinite: {model.nonfinite}",
        "optimizer": describe_object(model.optimizer, model.optimizer.arguments()),
        "cost": describe_object(model.cost, model.cost.arguments()),
        **dict(line.split(": ", 1) for line in plan.settings_equal_on_all_ranks()),
        **{f"scheme of '{name}'": scheme_text(scheme) for name, scheme in model.schemes.items()},
        "strategy": f"{strategy.builder} {strategy.digest}",
    }


def checksum_replicated_weights(parameters: LayerParameters) -> int:
    """Return a checksum of all arrays that are whole on every rank."""
    checksum = 0
    for shard, array in parameters.arrays():
        if not shard.is_tiled and shard.share is None:
            checksum = checksum_of(to_host(array), checksum)
    return checksum
