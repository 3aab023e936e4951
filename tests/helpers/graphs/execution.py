"""Execution of a case by neondist, on any number of ranks, and by PyTorch, with results as arrays by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .build import build_model as make_model
from .build import make_process_grid
from .case import Case, Grid
from .layouts import apply_layout, draw_values

Arrays = dict[str, np.ndarray]
REGRESSIONS = ("SumSquared", "MSE", "MAE", "Huber")


class Mismatch(AssertionError):
    """Failure of a case: its results differ from the reference."""


@dataclass
class RankResult:
    """Results of one rank, and the state to resume from on another grid.

    Attributes
    ----------
    arrays : dict
        Full arrays by name.
    sent : list of (samples, {layer: bytes of halos}, bytes summed)
        Of this rank, in every training step.
    """

    arrays: Arrays
    step: int
    state: Arrays
    slots: Arrays
    sent: list[tuple[int, dict[str, int], int]]


class CaseData:
    """Images, output gradients and targets of a case, identical for all runs."""

    def __init__(self, case: Case, output_shape: tuple[int, ...]) -> None:
        self.case, self.output_shape = case, tuple(output_shape)

    def images(self, number: int, samples: int) -> np.ndarray:
        """Return full images."""
        rng = np.random.default_rng([self.case.seed, number])
        x = draw_values(rng, (samples, *self.case.shape), self.case.layout)
        return x + self.case.perturbation * rng.normal(size=x.shape)

    def gradient(self, samples: int) -> np.ndarray:
        """Return an output gradient."""
        rng = np.random.default_rng([self.case.seed, 100])
        return draw_values(rng, (samples, *self.output_shape), self.case.layout)

    def targets(self, number: int, samples: int) -> np.ndarray:
        """Return labels, or target outputs."""
        rng = np.random.default_rng([self.case.seed, 200 + number])
        if self.case.cost[0] in REGRESSIONS:
            return rng.normal(size=(samples, *self.output_shape))
        return rng.integers(0, max(2, self.output_shape[-1]), (samples, *self.output_shape[:-1]))


def draw_state(case: Case) -> tuple[Arrays, tuple[int, ...]]:
    """Return perturbed parameters and statistics, and the output shape."""
    model = make_model(case, dist=False)
    model.build(case.shape, case.batch)
    rng = np.random.default_rng([case.seed, 300])
    state = {name: array + 0.3 * rng.normal(size=array.shape) for name, array in model.state().items()}
    return {name: abs(array) if name.endswith("/var") else array for name, array in state.items()}, model.output_shape


def run_first_part(case: Case, state: Arrays, comm: Any = None) -> RankResult:
    """Run passes, training and an evaluation on the first grid, or serially without `comm`."""
    run = CaseRun(case, case.grid, comm)
    run.model.load_state(state)
    run.run_passes()
    for number in range(case.steps):
        run.train(number, case.batch)
    run.evaluate(case.last_batch)
    run.train(case.steps, case.last_batch)
    return run.finish()


def run_second_part(case: Case, first: RankResult, comm: Any = None) -> RankResult:
    """Continue from the state of the first part on the second grid, or serially without `comm`."""
    run = CaseRun(case, case.second_grid, comm)
    run.model.load_state(first.state)
    run.model.load_optimizer_state(first.slots)
    run.model.step = first.step
    run.train(first.step, case.batch)
    run.evaluate(case.batch)
    return run.finish()


class CaseRun:
    """Model of one rank and its results."""

    def __init__(self, case: Case, grid: Grid, comm: Any) -> None:
        self.case, self.arrays = case, {}
        self.model = make_model(case, dist=comm is not None)
        self.model.build(case.shape, case.batch, make_process_grid(comm, grid) if comm is not None else None)
        self.data = CaseData(case, self.model.output_shape)
        self.watched: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.sent: list[tuple[int, dict[str, int], int]] = []

    def run_passes(self) -> None:
        """Run a forward and a backward pass, with passes of other images in between."""
        model, samples = self.model, self.case.batch
        forward_pass = model.forward(
            self._tile("images", model.scatter(self.data.images(99, samples))), batch_size=samples
        )
        self._watch("output of forward", forward_pass.output)
        self.arrays["y"] = model.gather(forward_pass.output)
        dy = self._tile("output gradient", model.scatter_output(self.data.gradient(samples)))
        other = model.forward(self._tile("other images", model.scatter(self.data.images(97, samples))), training=False)
        self._watch("result of the other backward", other.backward(dy))
        forward_pass.backward(-dy)
        dx = forward_pass.backward(dy)
        self._watch("result of backward", dx)
        self.arrays["dx"] = model.gather_input(dx)
        self.arrays |= {f"gradient {name}": array for name, array in model.gradients().items()}

    def train(self, number: int, samples: int) -> None:
        """Run one training step."""
        model = self.model
        x = self._tile("images", model.scatter(self.data.images(number, samples)))
        halos, sums = self._bytes(), model.bytes_summed
        loss = model.train_batch(x, self.data.targets(number, samples), batch_size=samples)
        self.arrays[f"loss {number}"] = np.array(loss)
        sent = {name: count - halos[name] for name, count in self._bytes().items()}
        self.sent.append((samples, sent, model.bytes_summed - sums))

    def evaluate(self, samples: int) -> None:
        """Run a forward pass in evaluation mode."""
        x = self.model.scatter(self.data.images(98, samples))
        y = self.model.fprop(self._tile("images", x), training=False, batch_size=samples)
        self._watch("output of an evaluation", y)
        self.arrays[f"evaluated {samples}"] = self.model.gather(y)

    def finish(self) -> RankResult:
        """Check that watched arrays are unchanged, and return the results."""
        model = self.model
        for label, array, copy in self.watched:
            if not np.array_equal(array, copy, equal_nan=True):
                raise Mismatch(f"{label}: changed by a later call")
        state = model.state()
        self.arrays |= {f"state {name}": array for name, array in state.items()}
        for layer in model.leaves:  # messages must not arrive in memory that the next model may reuse
            layer.wait_for_messages()
        return RankResult(self.arrays, model.step, state, model.optimizer_state(), self.sent)

    def _bytes(self) -> dict[str, int]:
        return {layer.name: layer.bytes_sent for layer in self.model.leaves}

    def _tile(self, label: str, tile: np.ndarray) -> np.ndarray:
        """Return a tile in the memory layout of the case, and watch it for changes."""
        array = apply_layout(tile, "plain" if self.case.perturbation else self.case.layout)
        self._watch(label, array)
        return array

    def _watch(self, label: str, array: np.ndarray) -> None:
        self.watched.append((label, array, array.copy()))


def run_torch(case: Case, state: Arrays, output_shape: tuple[int, ...]) -> Arrays:
    """Return the arrays of both parts, computed by PyTorch."""
    import torch

    from .oracle import Oracle

    oracle, data, arrays = Oracle(case, state), CaseData(case, output_shape), {}
    x = torch.tensor(data.images(99, case.batch), requires_grad=True)
    y = oracle.forward(x, training=True)
    y.backward(torch.tensor(data.gradient(case.batch)))
    arrays |= {"y": y.detach().numpy(), "dx": x.grad.numpy()}
    for name, tensor in oracle.trained.items():
        arrays[f"gradient {name}"] = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy().copy()
    parts: Iterator[tuple[int, int]] = iter(
        [*((n, case.batch) for n in range(case.steps)), (case.steps, case.last_batch)]
    )
    for number, samples in parts:
        if number == case.steps:
            _evaluate_torch(oracle, data, case.last_batch, arrays)
        arrays[f"loss {number}"] = _train_torch(oracle, data, number, samples)
    arrays |= _collect_state("state", oracle)
    arrays["again loss"] = _train_torch(oracle, data, oracle.step, case.batch)
    _evaluate_torch(oracle, data, case.batch, arrays, "again ")
    return arrays | _collect_state("again state", oracle)


def _train_torch(oracle: Any, data: CaseData, number: int, samples: int) -> np.ndarray:
    import torch

    x, targets = data.images(number, samples), data.targets(number, samples)
    return np.array(oracle.train(torch.tensor(x), torch.tensor(targets)))


def _evaluate_torch(oracle: Any, data: CaseData, samples: int, arrays: Arrays, prefix: str = "") -> None:
    import torch

    with torch.no_grad():
        y = oracle.forward(torch.tensor(data.images(98, samples)), training=False)
    arrays[f"{prefix}evaluated {samples}"] = y.numpy()


def _collect_state(prefix: str, oracle: Any) -> Arrays:
    return {f"{prefix} {name}": tensor.detach().numpy().copy() for name, tensor in oracle.tensors.items()}


def merge_results(first: RankResult, second: RankResult) -> Arrays:
    """Merge the arrays of both parts, with the names of `run_torch`."""
    resumed = {f"again {'loss' if name.startswith('loss') else name}": array for name, array in second.arrays.items()}
    return first.arrays | resumed
