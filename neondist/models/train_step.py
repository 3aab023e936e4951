"""One step of training: gradients, what is not finite, and the update."""

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
    """A step of a model of either kind, or of a stage of pretraining, whose counts stay its owner's.

    Attributes
    ----------
    scaler : LossScaler or None
        Has a factor of the loss, by which gradients are too large until they are summed.
    """

    def __init__(self, owner: Trainable) -> None:
        self.owner, self.scaler = owner, owner.whole.loss_scaler

    @abstractmethod
    def saved(self) -> Callable[[], None]:
        """Keep what a forward pass changes; return the function that puts it back."""

    @abstractmethod
    def gradients(self, x: Any, targets: Any, batch: int) -> tuple[float, bool]:
        """Return the mean cost over the global batch, and whether it and all gradients are finite; collective.

        Fills the gradients of what is trained.
        """

    @abstractmethod
    def locate(self, x: Any, targets: Any, batch: int) -> str:
        """Return in words what was not finite first; collective. It may go forward once more."""

    @abstractmethod
    def update(self) -> None:
        """Change what is trained by its gradients."""

    @property
    def loss_scale(self) -> float:
        """The factor of the gradients until they are summed."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # it looks at the results itself
    def run(self, x: Any, targets: Any, batch: int) -> float:
        """Return the mean cost; where a step is skipped NaN, with everything but the count of steps as before."""
        owner, model = self.owner, self.owner.whole
        put_back, observers = self.saved(), owner.grid.observers
        with observers.during("step"):
            loss, good = self.gradients(x, targets, batch)
            if good:
                with observers.during("update"):
                    if model.remote is None:
                        self.update()
                    else:
                        model.remote.update(owner.learning_rate_scale)
        where = None
        if not good:
            put_back()
        if not good and self.scaler is not None and np.isfinite(loss):
            model.nonfinite_monitor.overflowed(owner.step, self.scaler)
        else:
            if not good:
                where = self.locate(x, targets, batch)
                put_back()
            model.nonfinite_monitor.after_step(owner.step, model.nonfinite, where)
            if good and self.scaler is not None:
                self.scaler.update(overflow=False)
        owner.step += 1
        if not good:
            owner.uncounted += 1
            return float("nan")
        return loss


class LayerStep(TrainStep):
    """A step of layers."""

    def __init__(self, owner: Trainable) -> None:
        super().__init__(owner)
        model: Any = owner.whole  # a Model
        self.model, self.parameters = model, model.built

    def saved(self) -> Callable[[], None]:
        """Keep running statistics, and what border schemes remember."""
        buffers = self.parameters.buffers
        skips = self.model.nonfinite == "skip" or self.scaler is not None
        kept, memory = buffers.copy(), SchemeMemory(self.model.leaves, skips)

        def put_back() -> None:
            memory.put_back()
            buffers[...] = kept

        return put_back

    def locate(self, x: Any, targets: Any, batch: int) -> str:
        """Compute the gradients once more, and look at everything in between."""
        return locate(self.owner.grid, x, lambda: self.gradients(x, targets, batch))


class ModelStep(LayerStep):
    """A step of what `model.trained` is."""

    def gradients(self, x: Any, targets: Any, batch: int) -> tuple[float, bool]:
        """Go forward and back, and add up the gradients."""
        model, context = self.model, self.model.context
        x = images_for(model, x)
        model.input.check_tile("x", x)
        local = model.local_targets(targets, batch)
        scales, graphs = self._scales(local, batch), self._graphs(x)
        self.parameters.begin_gradients()
        if graphs is None:
            value = self._in_rounds(x, local, batch, scales)
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

    def _in_rounds(self, x: Any, targets: Any, batch: int, scales: list[float]) -> Any:
        """Return this rank's share of the mean cost, and fill in its shares of the gradients, in micro-batches."""
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
                        found, dy = self._cost_of(run.output, targets[lo:hi], scales)
                        value += found
                        dys.append(dy)
                last = batches is rounds[-1] and not trained.first
                done = self.parameters.ready if last else None
                model.executor.backward_together(runs, dys, trained.first, done=done)
            finally:
                for run in runs:
                    run.close()
        return value

    def _graphs(self, x: Any) -> PassGraphs | None:
        """Return the graphs of the passes of a step with such images; None: it is an ordinary one."""
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
        """Let the optimiser change the values."""
        model = self.model
        optimizer, count = model.optimizer.with_momentum(model.momentum), model.step - model.uncounted
        model.trained.update(optimizer, model.slots, count, model.learning_rate_scale)

    def _scales(self, targets: Any, batch: int) -> list[float]:
        """Return what the sum of each part of the cost is multiplied by; collective where it depends on targets."""
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
            found = part.value(y, targets, total)
            observers.value(None, "cost", self.model.context.backend.xp.asarray(found).reshape(1))
            slope = part.gradient(y, targets, total)
            observers.value(None, "gradient of the cost", slope)
            value = value + scale * found
            slopes.append(slope * self.model.dtype.type(scale * self.loss_scale))
        return value, sum(slopes[1:], slopes[0])
