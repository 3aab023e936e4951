"""One training step: gradients, the check for non-finite numbers, and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..costs import Cost
from ..costs.mean import local_weighted_denominators, part_factors_and_denominators, parts_of
from ..errors import PlanMismatchError, set_error_subject
from ..halo import Phase
from ..parallel import are_all_finite
from ..plan import micro_batch_ranges
from ..runtime import Pass, PassGraphs
from ..runtime.observers.nonfinite import find_first_nonfinite
from .passes import to_backend_images
from .trainable import Trainable


class TrainStep(ABC):
    """A step of a layer-based or PyTorch model, or of a stage of pretraining; `trainable` keeps the step counts.

    Attributes
    ----------
    loss_scaler : LossScaler or None
        Scaler of the loss, and thus of the gradients until they are summed.
    """

    def __init__(self, trainable: Trainable) -> None:
        self.trainable, self.loss_scaler = trainable, trainable.whole_model.loss_scaler

    @abstractmethod
    def save_for_rollback(self) -> Callable[[], None]:
        """Save the state that a forward pass changes; return a function that restores it."""

    @abstractmethod
    def compute_gradients(self, x: Any, targets: Any, batch_size: int) -> tuple[float, bool]:
        """Return the mean cost over the global batch, and whether the cost and all gradients are finite. Collective.

        The method also fills the gradients of the trained parameters.
        """

    @abstractmethod
    def describe_first_nonfinite(self, x: Any, targets: Any, batch_size: int) -> str:
        """Describe the first non-finite value, repeating the forward pass if needed. Collective."""

    @abstractmethod
    def update_parameters(self) -> None:
        """Update the trained parameters using their gradients."""

    def apply_gradients(self) -> None:
        """Update the trained parameters, here or on the parameter servers. Collective."""
        model = self.trainable.whole_model
        with self.trainable.grid.observers.observe("update"):
            if model.remote_update is None:
                self.update_parameters()
            else:
                model.remote_update.push_gradients_and_pull_values(self.trainable.learning_rate_scale)

    @property
    def loss_scale(self) -> float:
        """Factor applied to gradients until they are summed."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # results are checked explicitly
    def run(self, x: Any, targets: Any, batch_size: int) -> float:
        """Run the step and return the mean cost; NaN for a skipped step, which changes only counts and loss scale."""
        trainable, model = self.trainable, self.trainable.whole_model
        restore, observers = self.save_for_rollback(), trainable.grid.observers
        with observers.observe("step"):
            loss, is_finite = self.compute_gradients(x, targets, batch_size)
            if is_finite:
                self.apply_gradients()
        nonfinite_location = None
        if not is_finite:
            restore()
        if not is_finite and self.loss_scaler is not None and np.isfinite(loss):
            model.nonfinite_monitor.record_skip_by_overflow(trainable.step, self.loss_scaler)
        else:
            if not is_finite:
                nonfinite_location = self.describe_first_nonfinite(x, targets, batch_size)
                restore()
            model.nonfinite_monitor.record_step_finiteness(trainable.step, model.nonfinite, nonfinite_location)
            if is_finite and self.loss_scaler is not None:
                self.loss_scaler.update(overflow=False)
        trainable.step += 1
        if not is_finite:
            trainable.steps_without_optimizer += 1
            return float("nan")
        return loss


class LayerModelStep(TrainStep):
    """Training step of a LayerModel."""

    def __init__(self, trainable: Trainable) -> None:
        super().__init__(trainable)
        model: Any = trainable.whole_model  # a Model
        self.model, self.parameters = model, model.built_parameters

    def save_for_rollback(self) -> Callable[[], None]:
        """Save running statistics, and the state of border schemes."""
        untrained_values = self.parameters.untrained_values
        may_skip = self.model.nonfinite == "skip" or self.loss_scaler is not None
        arrays = [array for layer in self.model.leaves for array in layer.arrays] if may_skip else []
        saved_values, scheme_states = untrained_values.copy(), [array.scheme_state() for array in arrays]

        def restore() -> None:
            for array, state in zip(arrays, scheme_states, strict=True):
                array.restore_scheme_state(state)
            untrained_values[...] = saved_values

        return restore

    def describe_first_nonfinite(self, x: Any, targets: Any, batch_size: int) -> str:
        """Compute the gradients again, checking all intermediate values."""
        return find_first_nonfinite(self.trainable.grid, x, lambda: self.compute_gradients(x, targets, batch_size))


class ModelStep(LayerModelStep):
    """Training step that updates the parameters in `model.trained_parameters`."""

    def compute_gradients(self, x: Any, targets: Any, batch_size: int) -> tuple[float, bool]:
        """Run the forward and backward pass, and sum the gradients."""
        model, context = self.model, self.model.context
        x = to_backend_images(model, x)
        model.input.check_tile_shape("x", x)
        local_targets = model.local_targets(targets, batch_size)
        scales, graphs = self._cost_part_factors(local_targets, batch_size), self._get_or_capture_graphs(x)
        self.parameters.reset_gradients()
        if graphs is None:
            value = self._run_micro_batches(x, local_targets, batch_size, scales)
        else:
            value, dy = self._cost_and_gradient(graphs.forward(x), local_targets, scales)
            graphs.backward(dy)
            self.parameters.mark_all_gradients_written()
        with context.grid.observers.observe("cost"):
            value = context.backend.xp.asarray(value, np.float64).reshape(1)
            loss = model.output.sum_over_ranks(value, replicas=True)
        self.parameters.sync.record_finiteness(are_all_finite(loss))
        model.trained_parameters.sum_gradients(to_owners=True, loss_scale=self.loss_scale)
        return self.parameters.fetch_loss_and_flags(loss)

    def _run_micro_batches(self, x: Any, targets: Any, batch_size: int, scales: list[float]) -> Any:
        """Return this rank's share of the mean cost, and fill its shares of the gradients, in micro-batches."""
        model, trained_parameters = self.model, self.model.trained_parameters
        first_sample, cost = model.context.grid.sample_range(batch_size)[0], 0.0
        ranges = micro_batch_ranges(len(x), model.accumulate)
        rounds = [ranges] if model.executor.spans_batch else [[part] for part in ranges]
        for batches in rounds:
            phases = [Phase(True, model.step, first_sample + lo) for lo, _ in batches]
            runs = model.executor.forward_together([x[lo:hi] for lo, hi in batches], phases)
            try:
                with model.context.grid.observers.observe("cost"):
                    dys = []
                    for run, (lo, hi) in zip(runs, batches, strict=True):
                        part_value, dy = self._cost_and_gradient(run.output, targets[lo:hi], scales)
                        cost += part_value
                        dys.append(dy)
                is_last = batches is rounds[-1] and not trained_parameters.first_node
                on_layer_done = self.parameters.mark_gradients_ready if is_last else None
                model.executor.backward_together(runs, dys, trained_parameters.first_node, on_layer_done=on_layer_done)
            finally:
                for run in runs:
                    run.close()
        return cost

    def _get_or_capture_graphs(self, x: Any) -> PassGraphs | None:
        """Return captured graphs of the passes for images of this shape; None if the step is not captured."""
        model, parameters = self.model, self.parameters
        executor, first_node = model.executor, model.trained_parameters.first_node
        if len(micro_batch_ranges(len(x), model.accumulate)) > 1:
            return None

        def forward(x: Any) -> Pass:
            return executor.forward(x, Phase(True, model.step, 0))

        def backward(run: Pass, dy: Any) -> None:
            parameters.reset_gradients()
            executor.backward_together([run], [dy], first_node, close=False)
            parameters.zero_unassigned()

        kernels = model.context.backend.kernels
        return executor.get_or_capture_graphs(len(x), first_node, lambda: PassGraphs(kernels, forward, backward, x))

    def update_parameters(self) -> None:
        """Update the values with the optimiser."""
        model = self.model
        optimizer = model.optimizer.with_momentum(model.scheduled_momentum)
        num_updates = model.step - model.steps_without_optimizer
        model.trained_parameters.update(optimizer, model.slots, num_updates, model.learning_rate_scale)

    def _cost_part_factors(self, targets: Any, batch_size: int) -> list[float]:
        """Return the factor of each part of the summed cost. Collective if a factor depends on targets."""
        cost, output = self.model.cost, self.model.output
        denominators = local_weighted_denominators(cost, (len(targets), *output.local_shape[1:]), targets)
        if denominators:
            denominators = output.sum_over_ranks(np.array(denominators), replicas=True).tolist()
        factors_and_counts = part_factors_and_denominators(cost, denominators, batch_size, self.model.output_shape)
        return [factor / count if count else 0.0 for factor, count in factors_and_counts]

    def _cost_and_gradient(self, y: Any, targets: Any, scales: list[float]) -> tuple[Any, Any]:
        """Return this rank's share of the mean cost, for these samples, and its gradient times the loss scale."""
        sum_over_tiles, observers = self.model.output.sum_over_ranks, self.model.context.grid.observers
        value, gradients = 0.0, []
        for (_, part), scale in zip(parts_of(self.model.cost), scales, strict=True):
            part_value = part.local_sum(y, targets, sum_over_tiles)
            _check_cost_result(part, "local_sum", part_value, y, ())
            observers.on_value(None, "cost", self.model.context.backend.xp.asarray(part_value).reshape(1))
            gradient = part.local_sum_gradient(y, targets, sum_over_tiles)
            _check_cost_result(part, "local_sum_gradient", gradient, y, y.shape)
            observers.on_value(None, "gradient of the cost", gradient)
            value = value + scale * part_value
            gradients.append(gradient * self.model.dtype.type(scale * self.loss_scale))
        return value, sum(gradients[1:], gradients[0])


def _check_cost_result(cost: Cost, method: str, result: Any, y: Any, shape: tuple[int, ...]) -> None:
    """Raise PlanMismatchError, naming the cost, if a result has a wrong shape, or a wrong or too narrow dtype."""
    result_shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", y.dtype)
    if shape and result_shape == shape and dtype.kind == "f" and dtype.itemsize >= y.dtype.itemsize:
        return
    if not shape and (isinstance(result, int | float) or (result_shape in ((), (1,)) and dtype.kind in "iuf")):
        return
    result_text = (
        f"an object of type {type(result).__name__}"
        if result_shape is None
        else f"shape {result_shape} and dtype {dtype}"
    )
    expected_text = f"an array of shape {shape} and dtype {y.dtype}" if shape else "a number, or an array of shape ()"
    with set_error_subject(cost):
        raise PlanMismatchError(f"cost: {type(cost).__name__}.{method} returns {result_text}; expected {expected_text}")
