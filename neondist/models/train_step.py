"""One training step: gradients, the check for non-finite numbers, and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..costs.mean import parts_of, terms_of, weights_of
from ..halo import Phase
from ..parallel import finite
from ..plan import micro_batches
from ..runtime import Pass, PassGraphs
from ..runtime.observers.nonfinite import SchemeMemory, locate
from .passes import images_for
from .trainable import Trainable


class TrainStep(ABC):
    """A step of a model of either kind, or of a stage of pretraining; the owner keeps the step counts.

    Attributes
    ----------
    scaler : LossScaler or None
        Scales the loss, and with it the gradients until they are summed.
    """

    def __init__(self, owner: Trainable) -> None:
        self.owner, self.scaler = owner, owner.whole.loss_scaler

    @abstractmethod
    def save_state(self) -> Callable[[], None]:
        """Save the state that a forward pass changes; return a function that restores it."""

    @abstractmethod
    def gradients(self, x: Any, targets: Any, batch: int) -> tuple[float, bool]:
        """Return the mean cost over the global batch, and whether it and all gradients are finite; collective.

        Fills the gradients of the trained parameters.
        """

    @abstractmethod
    def locate(self, x: Any, targets: Any, batch: int) -> str:
        """Describe the first non-finite value; collective, and may repeat the forward pass."""

    @abstractmethod
    def update(self) -> None:
        """Update the trained parameters by their gradients."""

    @property
    def loss_scale(self) -> float:
        """The factor of the gradients until they are summed."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # results are checked explicitly
    def run(self, x: Any, targets: Any, batch: int) -> float:
        """Run the step and return the mean cost; NaN for a skipped step, which changes only the count of steps."""
        owner, model = self.owner, self.owner.whole
        restore, observers = self.save_state(), owner.grid.observers
        with observers.during("step"):
            loss, is_finite = self.gradients(x, targets, batch)
            if is_finite:
                with observers.during("update"):
                    if model.remote is None:
                        self.update()
                    else:
                        model.remote.update(owner.learning_rate_scale)
        location = None
        if not is_finite:
            restore()
        if not is_finite and self.scaler is not None and np.isfinite(loss):
            model.nonfinite_monitor.overflowed(owner.step, self.scaler)
        else:
            if not is_finite:
                location = self.locate(x, targets, batch)
                restore()
            model.nonfinite_monitor.after_step(owner.step, model.nonfinite, location)
            if is_finite and self.scaler is not None:
                self.scaler.update(overflow=False)
        owner.step += 1
        if not is_finite:
            owner.uncounted += 1
            return float("nan")
        return loss


class LayerStep(TrainStep):
    """A step of layers."""

    def __init__(self, owner: Trainable) -> None:
        super().__init__(owner)
        model: Any = owner.whole  # a Model
        self.model, self.parameters = model, model.built

    def save_state(self) -> Callable[[], None]:
        """Save running statistics, and the memory of border schemes."""
        buffers = self.parameters.buffers
        skips = self.model.nonfinite == "skip" or self.scaler is not None
        kept, memory = buffers.copy(), SchemeMemory(self.model.leaves, skips)

        def restore() -> None:
            memory.restore()
            buffers[...] = kept

        return restore

    def locate(self, x: Any, targets: Any, batch: int) -> str:
        """Compute the gradients again, checking all intermediate values."""
        return locate(self.owner.grid, x, lambda: self.gradients(x, targets, batch))


class ModelStep(LayerStep):
    """A step of the parameters in `model.trained`."""

    def gradients(self, x: Any, targets: Any, batch: int) -> tuple[float, bool]:
        """Run the forward and backward pass, and sum the gradients."""
        model, context = self.model, self.model.context
        x = images_for(model, x)
        model.input.check_tile("x", x)
        local = model.local_targets(targets, batch)
        scales, graphs = self._scales(local, batch), self._graphs(x)
        self.parameters.begin_gradients()
        if graphs is None:
            value = self._run_rounds(x, local, batch, scales)
        else:
            value, dy = self._cost_of(graphs.forward(x), local, scales)
            graphs.backward(dy)
            self.parameters.settled()
        with context.grid.observers.during("cost"):
            value = context.backend.xp.asarray(value, np.float64).reshape(1)
            loss = model.output.total(value, replicas=True)
        self.parameters.sync.note(finite(loss))
        model.trained.sum_gradients(for_update=True, scale=self.loss_scale)
        return self.parameters.read_flags(loss)

    def _run_rounds(self, x: Any, targets: Any, batch: int, scales: list[float]) -> Any:
        """Return this rank's share of the mean cost, and fill its shares of the gradients, in micro-batches."""
        model, trained = self.model, self.model.trained
        first, value = model.context.grid.sample_range(batch)[0], 0.0
        parts = micro_batches(len(x), model.accumulate)
        rounds = [parts] if model.executor.over_batch else [[part] for part in parts]
        for batches in rounds:
            phases = [Phase(True, model.step, first + lo) for lo, _ in batches]
            runs = model.executor.forward_together([x[lo:hi] for lo, hi in batches], phases)
            try:
                with model.context.grid.observers.during("cost"):
                    dys = []
                    for run, (lo, hi) in zip(runs, batches, strict=True):
                        part_value, dy = self._cost_of(run.output, targets[lo:hi], scales)
                        value += part_value
                        dys.append(dy)
                last = batches is rounds[-1] and not trained.first
                done = self.parameters.ready if last else None
                model.executor.backward_together(runs, dys, trained.first, done=done)
            finally:
                for run in runs:
                    run.close()
        return value

    def _graphs(self, x: Any) -> PassGraphs | None:
        """Return captured graphs of the passes for such images; None if the step is not captured."""
        model, parameters = self.model, self.parameters
        executor, first = model.executor, model.trained.first
        if len(micro_batches(len(x), model.accumulate)) > 1:
            return None

        def forward(x: Any) -> Pass:
            return executor.forward(x, Phase(True, model.step, 0))

        def backward(run: Pass, dy: Any) -> None:
            parameters.begin_gradients()
            executor.backward_together([run], [dy], first, close=False)
            parameters.settle()

        return executor.graphs(len(x), first, lambda: PassGraphs(model.context.backend.kernels, forward, backward, x))

    def update(self) -> None:
        """Update the values with the optimiser."""
        model = self.model
        optimizer, count = model.optimizer.with_momentum(model.momentum), model.step - model.uncounted
        model.trained.update(optimizer, model.slots, count, model.learning_rate_scale)

    def _scales(self, targets: Any, batch: int) -> list[float]:
        """Return the factor of each part of the summed cost; collective if it depends on targets."""
        cost, output = self.model.cost, self.model.output
        weights = weights_of(cost, (len(targets), *output.local_shape[1:]), targets)
        if weights:
            weights = output.total(np.array(weights), replicas=True).tolist()
        terms = terms_of(cost, weights, batch, self.model.output_shape)
        return [factor / count if count else 0.0 for factor, count in terms]

    def _cost_of(self, y: Any, targets: Any, scales: list[float]) -> tuple[Any, Any]:
        """Return this rank's share of the mean cost, from samples, and its gradient."""
        total, observers = self.model.output.total, self.model.context.grid.observers
        value, slopes = 0.0, []
        for (_, part), scale in zip(parts_of(self.model.cost), scales, strict=True):
            part_value = part.value(y, targets, total)
            observers.value(None, "cost", self.model.context.backend.xp.asarray(part_value).reshape(1))
            slope = part.gradient(y, targets, total)
            observers.value(None, "gradient of the cost", slope)
            value = value + scale * part_value
            slopes.append(slope * self.model.dtype.type(scale * self.loss_scale))
        return value, sum(slopes[1:], slopes[0])
