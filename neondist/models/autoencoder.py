"""One stage of GB as a model of its own: filters and their transpose, trained to reconstruct the stage's input."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from ..arrays.namespace import to_host
from ..halo import Phase
from ..layers import LocalFilteringLayer
from ..optim import FlatLayout, Optimizer
from ..parallel import ControlFlag, ParameterShard, are_all_finite
from ..plan import LayerPlan, micro_batch_ranges
from .model import Model
from .reconstruction import AutoencoderReconstruction, ReconstructionCost
from .train_step import LayerModelStep


class Autoencoder:
    """Encoder z = W x and tied decoder Wᵀ z of a stage of a model's layers; `stage_number` counts from 1.

    An autoencoder is Trainable, as a model is, but trains only the weights of one layer, without targets. A step
    exchanges three halos of the layer's input: of x; of Wᵀ z, whose parts in other ranks' tiles are added there; and of
    the residual. The halo of a following L2 pooling layer is exchanged in both directions. Gradients of unshared
    weights are not summed over the tiles.
    """

    num_initial_epochs, is_streamed = 0, False

    def __init__(
        self,
        model: Model,
        stage_number: int,
        layers: range,
        cost: ReconstructionCost,
        optimizer: Optimizer,
        orthonormal: bool,
    ) -> None:
        self.stage_number, self.first_layer_index, self.end_layer_index = stage_number, layers.start, layers.stop
        self.stages: Sequence[Any] = [self]
        index = self.first_layer_index
        self.whole_model, self.name = model, str(model.layers[index].name)
        self.layer = cast(LocalFilteringLayer, model.layers[index])
        next_layers: Any = model.layers[index + 1 : index + 2]
        self.pool: Any = next_layers[0] if next_layers and next_layers[0].pools_squares else NoPooling()
        self.residual_array = self.layer.register_array(self.layer.input_shape, self.layer.window)
        self.parameters, self.sync, self.leaves = model.built_parameters, model.sync, model.leaves
        shards = (shard for shard in self.parameters.trained_shards if shard.layer_name == self.layer.name)
        self.weights_shard = next(shard for shard in shards if shard.name == "weights")
        self.cost, self.optimizer, self.orthonormal = cost, optimizer, orthonormal
        self.grid, self.dtype, self.seed = model.grid, model.dtype, model.seed
        self.output, self.output_shape = self.layer.input, self.layer.input_shape
        self.accumulate = model.accumulate
        self.scheduled_momentum: float | None = None
        self.learning_rate_scale, self.step, self.steps_without_optimizer = 1.0, 0, 0
        self.slots: dict[str, Any] = {}
        self.phase = Phase(training=False)

    @property
    def display_name(self) -> str:
        """Name of the model in headlines and messages."""
        return f"Autoencoder of '{self.name}'"

    def begin_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        """Create the optimiser's slots if there are none; before step 0, orthonormalise the filters if requested."""
        if not self.slots:
            self.slots = self.optimizer.create_slots(self._weights.reshape(-1))
        if self.orthonormal and not self.step:
            self.layer.orthonormalise()

    def close(self) -> None:
        """Release the memory of the optimiser's slots."""
        self.slots = {}

    # Passes.

    def compute_stage_input(self, x: Any) -> Any:
        """Return this rank's tile of the stage's input for its tile of the images."""
        x = self.whole_model.context.backend.as_real_array("x", x, self.dtype)
        with self.whole_model.executor.forward_pass(x, Phase(training=False), self.first_layer_index) as run:
            return run.output.copy()

    def encode(self, x: Any) -> Any:
        """Return this rank's tile of z = W x for its tile of the stage's input. Collective over the tiles."""
        self.last_view = self.layer.input.get_fprop_view(x, self.phase)
        return self.layer.filters.correlate(self.last_view, self._weights)

    def decode(self, z: Any) -> Any:
        """Return this rank's tile of Wᵀ z, with contributions of other ranks' windows. Collective over the tiles."""
        dview = self.layer.filters.correlate_adjoint(z, self._weights, self.layer.input.view_shape[1:-1])
        return self.layer.input.get_bprop_view(dview, self.phase)

    def fprop(self, x: Any, training: bool = False, batch_size: int | None = None) -> AutoencoderReconstruction:
        """Return the reconstruction of the stage's input for this rank's tile of the images."""
        self.phase = Phase(training, self.step)  # for border schemes
        x = self.compute_stage_input(x)
        self.z = self.encode(x)
        residual = self.decode(self.z) - x
        pooled, self.last_pooled_view = self.pool.window_sums_of_squares_with_view(self.z, self.phase)
        return AutoencoderReconstruction(x, residual, pooled)

    def bprop(self, y: AutoencoderReconstruction, scale: float = 1.0) -> None:
        """Add the gradient of `scale` times the cost of `y`, the result of the last fprop, to the layer's gradient."""
        filters, weights, z = self.layer.filters, self._weights, self.z
        error, dpooled = self.residual_array.get_fprop_view(y.residual, self.phase), self.cost.pooled_gradient(y.pooled)
        dz = self.pool.window_sums_of_squares_backward(self.last_pooled_view, dpooled, self.phase)
        dz = filters.correlate(error, weights) + dz
        gradient = filters.weights_gradient(self.last_view, dz, weights)  # of W as the encoder
        gradient += filters.weights_gradient(error, z, weights)  # of W as the decoder
        gradient *= self.dtype.type(scale)
        self.layer.grads["weights"] = gradient

    def compute_cost_and_gradient(self, x: Any, scale: float = 1.0) -> float:
        """Return this rank's share of the cost of its samples; fill the gradient of `scale` times the whole cost.

        The gradient is summed over the ranks. Collective.
        """
        cost, observers = 0.0, self.grid.observers
        self.layer.grads.reset()
        for lo, hi in micro_batch_ranges(len(x), self.accumulate):
            y = self.fprop(x[lo:hi], training=True)
            value = self.cost.local_sum(y)
            observers.on_value(self.layer, "weights", self._weights)
            observers.on_value(self.layer, "output", self.z)
            observers.on_value(self.layer, "reconstruction of the input", y.residual)
            observers.on_value(None, f"cost of {self}", value.reshape(1))
            cost += value
            self.bprop(y, scale)
        gradient = self.layer.grads["weights"]
        self.parameters.reductions.allreduce(self.weights_shard.parameter.layout.gradient_reduction_group, gradient)
        observers.on_value(self.layer, "gradients of the weights", gradient)
        return cost

    def train_batch(self, x: Any, targets: Any = None, batch_size: int | None = None) -> float:
        """Run one step and return the mean cost over the global batch; as in Model.train_batch, but without targets."""
        return PretrainingStep(self).run(x, targets, batch_size or len(x) * self.grid.replicas)

    # Interface to the training loop and its hooks.

    def evaluate_batch(self, x: Any, targets: Any, batch_size: int) -> tuple[AutoencoderReconstruction, None, float]:
        """Return the reconstruction, None (the inputs are the targets), and this rank's part of the cost."""
        y = self.fprop(x)
        return y, None, float(self.cost.local_sum(y))

    def state(self) -> dict[str, Any]:
        """Return the whole model's state. Collective."""
        return self.whole_model.state()

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of the whole model's arrays, and of the slots of this stage's weights."""
        self.begin_epoch(0)
        shape = self._weights.shape
        arrays = [(self.weights_shard.slot_shard(name), slot.reshape(shape)) for name, slot in self.slots.items()]
        return {"model": self.whole_model.checkpoint_arrays()["model"], "optimizer": arrays}

    @property
    def _weights(self) -> Any:
        return self.layer.params["weights"]


class PretrainingStep(LayerModelStep):
    """A step of pretraining, whose gradients are float32."""

    trainable: Autoencoder
    loss_scaler = None

    def compute_gradients(self, x: Any, targets: Any, batch_size: int) -> tuple[float, bool]:
        """Fill the gradient of the stage's weights; the flags are sent with the cost."""
        stage, xp, flags = self.trainable, self.model.context.backend.xp, self.parameters.sync.flags
        value = stage.compute_cost_and_gradient(x, 1.0 / batch_size)
        cost_and_flags = xp.concatenate([xp.asarray(value).reshape(1), xp.asarray(flags.own_flags)])
        cost_and_flags[1 + ControlFlag.NON_FINITE] = xp.logical_not(are_all_finite(stage.layer.grads["weights"]))
        cost = to_host(stage.output.reductions.allreduce("world", cost_and_flags))
        flags.num_ranks_by_flag[...] = cost[1:]
        return float(cost[0] / batch_size), bool(np.isfinite(cost[0])) and not flags.num_ranks_by_flag[
            ControlFlag.NON_FINITE
        ]

    def update_parameters(self) -> None:
        """Update the weights with the optimiser."""
        stage = self.trainable
        values, gradient = (arrays["weights"].reshape(-1) for arrays in (stage.layer.params, stage.layer.grads))
        sum_over_tiles = partial(self.parameters.reductions.allreduce, "tiles")
        layout = FlatLayout(((0, values.size),), (True,), 0 if stage.weights_shard.is_tiled else 1, sum_over_tiles)
        num_updates, rate_factor = stage.step - stage.steps_without_optimizer, stage.learning_rate_scale
        optimizer = stage.optimizer.with_momentum(stage.scheduled_momentum)
        optimizer.update(values, gradient, stage.slots, num_updates, rate_factor, layout)
        if stage.orthonormal:
            stage.layer.orthonormalise()


class NoPooling:
    """Identity that replaces the pooling layer in a stage without pooling."""

    def window_sums_of_squares_with_view(self, z: Any, phase: Phase) -> tuple[Any, Any]:
        """Return z², and z."""
        return z * z, z

    def window_sums_of_squares_backward(self, z: Any, dsquares: Any, phase: Phase) -> Any:
        """Return the gradient of z."""
        return 2 * z * dsquares


def pretraining_elements_sent_per_sample(plans: Sequence[LayerPlan], layer_index: int, is_pooled: bool) -> list[int]:
    """Return the number of elements that each tile sends per sample in pretraining of a stage, with exact halos.

    Parameters
    ----------
    plans : sequence of LayerPlan
        Plans of all single layers.
    layer_index : int
        Index of the stage's filters in `plans`.
    is_pooled : bool
        Whether the next layer pools the squares of the filters' outputs.
    """
    layer = plans[layer_index]
    pairs = zip(layer.forward_elements_sent, layer.backward_elements_sent, strict=True)
    elements = [2 * forward + backward for forward, backward in pairs]
    for plan in plans[:layer_index]:  # forward passes of the previous layers
        elements = [n + sent for n, sent in zip(elements, plan.forward_elements_sent, strict=True)]
    for plan in plans[layer_index + 1 : layer_index + 1 + is_pooled]:
        columns = zip(elements, plan.forward_elements_sent, plan.backward_elements_sent, strict=True)
        elements = [sum(column) for column in columns]
    return elements
