"""One stage of GB as a model of its own: filters and their transpose, trained to reconstruct the stage's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..halo import Phase
from ..layers import Layer, LocalFilteringLayer
from ..namespace import to_host
from ..parallel import Flag, finite
from .nonfinite import SchemeMemory, locate_in_stage
from .parameters import gather, load
from .reconstruction import Reconstruction, ReconstructionCost

if TYPE_CHECKING:
    from ..plan import LayerPlan
    from .gb import GB
    from .shard import ParameterShard


class Autoencoder:
    """Encoder z = W x and tied decoder Wᵀ z of a stage of a model; `number` counts from 1.

    It offers what the training loop asks of a model, but trains this layer's weights alone, without targets. A step
    moves three halos of the layer's input: of x; of Wᵀ z, whose parts in other ranks' tiles they add; and of the
    residual. Where an L2 pooling layer follows, its halo travels both ways. Gradients of unshared weights are not
    summed over the tiles.
    """

    def __init__(self, model: GB, number: int) -> None:
        assert model.parameters is not None
        index = model.starts[number - 1]
        self.number, self.stages = number, [self]
        self.end = model.starts[number] if number < len(model.starts) else model.top_start
        self.model, self.name = model, str(model.layers[index].name)
        self.start = index
        self.layer = cast(LocalFilteringLayer, model.layers[index])
        following: Any = model.layers[index + 1 : index + 2]
        self.pool: Any = following[0] if following and following[0].pools_squares else EachAlone()
        self.residuals = self.layer.make_array(self.layer.input_shape, self.layer.window)
        self.parameters, self.sync = model.parameters, model.sync
        self.nonfinite_monitor = model.nonfinite_monitor
        self.shard = next(e for e in model.parameters.trained if e.layer is self.layer and e.name == "weights")
        self.cost = ReconstructionCost(model.sparsity, model.epsilon)
        self.grid, self.dtype, self.seed, self.optimizer = model.grid, model.dtype, model.seed, model.pretrain_optimizer
        self.output, self.output_shape = self.layer.input, self.layer.input_shape
        self.accumulate = model.accumulate
        self.learning_rate_scale, self.step, self.uncounted = 1.0, 0, 0
        self.slots: dict[str, Any] = {}
        self.phase = Phase(training=False)

    def __str__(self) -> str:
        return f"Autoencoder of '{self.name}'"

    def begin_epoch(self, epoch: int, seen: int = 0) -> None:
        """Make the optimiser's slots, if the stage is new."""
        if not self.slots:
            self.slots = self.optimizer.slots(self._weights.reshape(-1))
        if self.model.orthonormal and not self.step:
            self.layer.orthonormalise()

    def uncounted_by(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return 0: the optimiser counts all steps that are not skipped."""
        return 0

    def close(self) -> None:
        """Give the memory of the optimiser's slots back."""
        self.slots = {}

    # The passes.

    def inputs(self, x: Any) -> Any:
        """Return this rank's tile of the stage's input for its tile of the images."""
        with self.model.executor.passing(self.model.real_array("x", x), Phase(training=False), self.start) as run:
            return run.output.copy()

    def encode(self, x: Any) -> Any:
        """Return this rank's tile of z = W x for its tile of the stage's input; collective over the tiles."""
        self.view = self.layer.input.get_fprop_view(x, self.phase)
        return self.layer.filters.correlate(self.view, self._weights)

    def decode(self, z: Any) -> Any:
        """Return this rank's tile of Wᵀ z, the parts of other ranks' windows added; collective over the tiles."""
        dview = self.layer.filters.spread(z, self._weights, self.layer.input.view_shape[1:-1])
        return self.layer.input.get_bprop_view(dview, self.phase)

    def fprop(self, x: Any, training: bool = False, batch_size: int | None = None) -> Reconstruction:
        """Return the reconstruction of the stage's input for this rank's tile of the images."""
        self.phase = Phase(training, self.step)  # the schemes ask for it
        x = self.inputs(x)
        self.z = self.encode(x)
        residual = self.decode(self.z) - x
        pooled, self.pooled_view = self.pool.squares(self.z, self.phase)
        return Reconstruction(x, residual, pooled)

    def bprop(self, y: Reconstruction, scale: float = 1.0) -> None:
        """Add that of `scale` times the cost of `y`, which fprop has just returned, to the layer's gradient."""
        filters, weights, z = self.layer.filters, self._weights, self.z
        error, by_pooled = self.residuals.get_fprop_view(y.residual, self.phase), self.cost.by_pooled(y.pooled)
        dz = filters.correlate(error, weights) + self.pool.squares_backward(self.pooled_view, by_pooled, self.phase)
        gradient = filters.gradient(self.view, dz, weights)  # W as the encoder
        gradient += filters.gradient(error, z, weights)  # and as the decoder
        gradient *= self.dtype.type(scale)
        self.layer.grads["weights"] = gradient

    def cost_and_gradient(self, x: Any, scale: float = 1.0) -> float:
        """Return this rank's share of the cost of its samples, and fill the gradient of `scale` times the whole cost.

        The gradient is summed over the ranks; collective.
        """
        cost = 0.0
        self.layer.grads.begin()
        for lo, hi in self.model.micro_batches(len(x)):
            y = self.fprop(x[lo:hi], training=True)
            cost += self.cost.value(y)
            self.bprop(y, scale)
        self.sum_gradient()
        return cost

    def sum_gradient(self) -> None:
        """Add up the ranks' shares of the layer's gradient; collective."""
        self.parameters.reductions.allreduce(self.shard.parameter.layout.group, self.layer.grads["weights"])

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # it looks at the results itself
    def train_batch(self, x: Any, targets: Any = None, batch_size: int | None = None) -> float:
        """Run one step and return the mean cost over the global batch; as Model.train_batch, but for the targets."""
        batch = batch_size or len(x) * self.grid.replicas
        memory = SchemeMemory(self.leaves, self.model.nonfinite == "skip")
        value = self.cost_and_gradient(x, 1.0 / batch)
        xp, flags = self.model.context.backend.xp, self.sync.flags
        numbers = xp.concatenate([xp.asarray(value).reshape(1), xp.asarray(flags.mine)])
        numbers[1 + Flag.NON_FINITE] = xp.logical_not(finite(self.layer.grads["weights"]))
        cost = to_host(self.total_over_output(numbers))
        flags.heard[...] = cost[1:]
        good = np.isfinite(cost[0]) and not flags.heard[Flag.NON_FINITE]
        where = None
        if not good:
            memory.put_back()
            where = locate_in_stage(self, x, batch)
            memory.put_back()
        self.nonfinite_monitor.after_step(self.step, self.model.nonfinite, where)
        if not good:
            self.step, self.uncounted = self.step + 1, self.uncounted + 1
            return float("nan")
        flat = self._weights.reshape(-1), self.layer.grads["weights"].reshape(-1)
        self.optimizer.update(*flat, self.slots, self.step - self.uncounted, scale=self.learning_rate_scale)
        if self.model.orthonormal:
            self.layer.orthonormalise()
        self.step += 1
        return float(cost[0] / batch)

    # What the loop, its hooks and `evaluate` ask of a model.

    def local_targets(self, targets: Any, batch_size: int) -> None:
        """Return None: the targets are the inputs."""

    def total_over_output(self, array: Any) -> Any:
        """Sum an array in place over all ranks, and return it; collective."""
        return self.output.reductions.allreduce("world", array)

    def state(self) -> dict[str, Any]:
        """Return the whole model's state; collective."""
        return self.model.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the whole model's state."""
        self.model.load_state(state)

    def optimizer_state(self) -> dict[str, Any]:
        """Return copies of the slots of this stage's weights by '<layer name>/weights/<slot>'; collective."""
        return gather(self._slots())

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take over arrays that `optimizer_state` returned."""
        load(self._slots(), state, "optimiser state")

    def kept_arrays(self) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of the whole model's arrays, and of the slots of this stage's weights."""
        return {"model": self.model.kept_arrays()["model"], "optimizer": self._slots()}

    @property
    def leaves(self) -> list[Layer]:
        """All single layers of the whole model."""
        return self.model.leaves

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos that this rank has sent since the model's build."""
        return self.model.bytes_sent

    @property
    def bytes_summed(self) -> int:
        """Bytes of the arrays that this rank has given into sums since the model's build."""
        return self.model.bytes_summed

    @property
    def _weights(self) -> Any:
        return self.layer.params["weights"]

    def _slots(self) -> list[Any]:
        self.begin_epoch(0)
        shape = self._weights.shape
        return [(self.shard.slot(name), slot.reshape(shape)) for name, slot in self.slots.items()]


class EachAlone:
    """Takes the place of a pooling layer where there is none."""

    arrays = ()

    def squares(self, z: Any, phase: Phase) -> tuple[Any, Any]:
        """Return z², and z."""
        return z * z, z

    def squares_backward(self, z: Any, dsquares: Any, phase: Phase) -> Any:
        """Return the gradient of z."""
        return 2 * z * dsquares


def words_sent(plans: Sequence[LayerPlan], at: int, pooled: bool) -> list[int]:
    """Return the numbers that each tile sends for one sample when a stage is pretrained, with exact halos.

    Parameters
    ----------
    plans : sequence of LayerPlan
        Of all single layers.
    at : int
        The place of the stage's filters among them.
    pooled : bool
        Whether the next layer pools their squares.
    """
    layer = plans[at]
    words = [2 * there + back for there, back in zip(layer.sent_words, layer.received_words, strict=True)]
    for plan in plans[:at]:  # the layers before give the input
        words = [n + there for n, there in zip(words, plan.sent_words, strict=True)]
    for plan in plans[at + 1 : at + 1 + pooled]:
        words = [n + a + b for n, a, b in zip(words, plan.sent_words, plan.received_words, strict=True)]
    return words
