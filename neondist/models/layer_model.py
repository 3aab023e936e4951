"""Interface of a model of neondist layers for hooks, checkpoints and benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..backends import backend_name
from ..comm import Reductions
from ..errors import ConfigError
from ..halo import ExchangePolicy, GlobalArray
from ..layers import Layer
from ..optim import AVERAGE_SLOT
from ..parallel import LayerParameters, ParameterShard
from ..plan import GRADIENTS, LOSS
from ..runtime import Executor
from ..runtime.debug import guard_executor
from ..runtime.observers.ledger import Ledger, collect_message_counts
from .consistency import check_replicated_arrays
from .trainable import TrainableModel


class LayerModel(TrainableModel):
    """A model that is made of layers.

    Attributes
    ----------
    layers, leaves : sequence
        Top-level layers and containers, and all single layers, including those in containers.
    last_pass : the pass that `bprop` differentiates
    """

    layers: Sequence[Any]
    leaves: Sequence[Layer]
    executor: Executor
    last_pass: Any
    slots: dict[str, Any]
    parameters: LayerParameters | None

    @property
    def layer_backend_name(self) -> str:
        """Name of the backend of the layers."""
        return backend_name(self.backend)

    @property
    def built_parameters(self) -> LayerParameters:
        """The parameters; raises ConfigError before `build`."""
        if self.parameters is None:
            class_name = type(self).__name__
            raise ConfigError(f"{class_name} is not built yet; call model.build(input_shape, batch_size) first")
        self.parameters.check_layers_not_rebuilt()
        return self.parameters

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos that this rank has sent since `build`."""
        return sum(layer.bytes_sent for layer in self.built_parameters.layers.values())

    @property
    def bytes_summed(self) -> int:
        """Bytes that this rank has contributed to reductions, or sent to redistribute vectors, since `build`."""
        return sum(reductions.bytes_reduced for _, reductions in self._named_reductions())

    def ledger(self) -> Ledger:
        """Return all messages and reductions since `build`, with their counts, sizes and receivers."""
        reductions = self._named_reductions()
        return collect_message_counts(self.leaves, reductions, self.grid.replica * self.grid.shape.tiles)

    @property
    def schemes(self) -> dict[str, ExchangePolicy]:
        """The border schemes of the layers."""
        return {str(layer.name): layer.scheme for layer in self.leaves if layer.scheme is not None}

    @property
    def exchanged_arrays(self) -> dict[str, Sequence[GlobalArray]]:
        """The tiled arrays of each layer."""
        return {str(layer.name): layer.arrays for layer in self.leaves}

    @property
    def output_error_subject(self) -> Any:
        """The last layer."""
        return self.layers[-1]

    def enable_debug_checks(self, seed: int) -> None:
        """Check a user's layers and border schemes in every later step of a built model; see DebugHalo."""
        leaves = list(self.built_parameters.layers.values())
        self.executor, self.last_pass = guard_executor(self.executor, leaves, seed), None

    def check_replicated_arrays(self, step: int) -> None:
        """Raise HaloError on all ranks if an array that is whole on every rank differs between ranks. Collective."""
        check_replicated_arrays(self.built_parameters, step)

    def use_averaged_weights(self) -> AbstractContextManager[None]:
        """Replace the weights by their running mean within the context, if the optimiser keeps one."""
        parameters, average = self.built_parameters, self.slots.get(AVERAGE_SLOT)
        has_average = average is not None and self.step != self.steps_without_optimizer
        return parameters.replace_values_temporarily(average) if has_average else nullcontext()

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of the contents of a checkpoint, by group: 'model' and 'optimizer'."""
        parameters = self.built_parameters
        return {"model": parameters.arrays(), "optimizer": parameters.slot_arrays(self.slots)}

    def wait_for_messages(self) -> None:
        """Finish pending messages of the layers. Collective."""
        for layer in self.leaves:
            layer.wait_for_messages()

    def _named_reductions(self) -> list[tuple[str, Reductions]]:
        parameters = self.built_parameters
        layer_reductions = [(str(layer.name), array.reductions) for layer in self.leaves for array in layer.arrays]
        return [*layer_reductions, (LOSS, self.output.reductions), (GRADIENTS, parameters.reductions)]
