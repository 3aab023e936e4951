"""Properties of a model that are compared across ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays.namespace import to_host
from ..comm.agreement import checksum_of
from ..comm.argument_text import describe_object, format_arguments
from ..errors import HaloError
from ..halo import scheme_text
from ..parallel import LayerParameters, ParameterShard
from ..plan import ModelPlan
from .trainable import TrainableModel


@dataclass
class CallComparison:
    """Comparison of collective calls across ranks; a call after a change of the model also compares the change.

    Attributes
    ----------
    includes_settings : whether the next call compares the settings of the model, which is new
    includes_weights : whether the next call compares the initial or loaded weights
    """

    includes_settings: bool = False
    includes_weights: bool = False

    def compare(
        self, model: TrainableModel, parameters: LayerParameters, call_name: str, values: Mapping[str, Any]
    ) -> None:
        """Raise an error on all ranks if the call, its values or the change of the model differ. Collective."""
        compared = dict(values)
        if self.includes_settings and model.grid.size > 1:
            compared |= {f"the {name}": text for name, text in settings_to_compare(model, model.compiled).items()}
        if self.includes_weights and model.grid.size > 1:
            checksums = replicated_checksums(parameters).items()
            compared |= {
                f"the initial or loaded '{shard.full_name}'": f"of checksum {value:08x}" for shard, value in checksums
            }
        model.grid.check(call_name, compared)
        self.includes_settings = self.includes_weights = False


def settings_to_compare(model: TrainableModel, plan: ModelPlan) -> dict[str, str]:
    """Return the layers, the layout of the weights, and the training settings, by name."""
    strategy = plan.parameters.strategy
    return {
        "model": model.display_name,
        "seed": f"{model.seed}",
        "dtype": f"{model.dtype}, precision: {model.precision.name}, nonfinite: {model.nonfinite}",
        "optimizer": describe_object(model.optimizer, model.optimizer.arguments()),
        "cost": describe_object(model.cost, model.cost.arguments()),
        "pretraining": format_arguments(model.pretraining_arguments),
        **dict(line.split(": ", 1) for line in plan.settings_equal_on_all_ranks()),
        **{f"scheme of '{name}'": scheme_text(scheme) for name, scheme in model.schemes.items()},
        "strategy": f"{strategy.builder} {strategy.digest}",
        "sync": f"{model.sync_class.__name__}, accumulate: {model.accumulate}, recompute: {model.recompute}, strips:"
        f" {model.strips}, memory: {model.memory}",
    }


def replicated_checksums(parameters: LayerParameters) -> dict[ParameterShard, int]:
    """Return the checksum of each array that is whole on every rank."""
    arrays = ((shard, array) for shard, array in parameters.arrays() if not shard.is_tiled and shard.share is None)
    return {shard: checksum_of(to_host(array)) for shard, array in arrays}


def check_replicated_arrays(parameters: LayerParameters, step: int) -> None:
    """Raise HaloError on all ranks if an array that is whole on every rank differs between ranks. Collective."""
    checksums = replicated_checksums(parameters)
    first_checksums, *other_checksums = parameters.context.grid.world.allgather([*checksums.values()])
    for rank, other in enumerate(other_checksums, 1):
        for shard, expected, actual in zip(checksums, first_checksums, other, strict=True):
            if actual != expected:
                layer = parameters.layers[shard.layer_name]
                error = HaloError(
                    f"layer '{layer.name}' ({type(layer).__name__}), step {step}: '{shard.name}' on rank {rank} differs"
                    " from rank 0; compute it from values that are equal on all ranks, such as ctx.reduced"
                )
                error.subject = layer
                raise error.mark_raised_on_all_ranks()
