"""Runs of a case by neondist, on one rank or many, and by PyTorch; results are arrays by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .build import model as make_model
from .build import process_grid
from .case import Case, Grid
from .layouts import laid_out, values

Arrays = dict[str, np.ndarray]


class Wrong(AssertionError):
    """Failure of a case: its results differ from the reference."""


@dataclass
class Kept:
    """Results of one rank, and the state that continues on another grid.

    Attributes
    ----------
    found : dict
        Whole arrays by name.
    sent : list of (samples, {layer: bytes of halos}, bytes summed)
        By this rank, in every training step.
    """

    found: Arrays
    step: int
    state: Arrays
    slots: Arrays
    sent: list[tuple[int, dict[str, int], int]]


class Data:
    """Images, gradients of outputs, and targets of a case, the same for all who play it."""

    def __init__(self, case: Case, output_shape: tuple[int, ...]) -> None:
        self.case, self.output_shape = case, tuple(output_shape)

    def images(self, number: int, samples: int) -> np.ndarray:
        """Return whole images."""
        rng = np.random.default_rng([self.case.seed, number])
        x = values(rng, (samples, *self.case.shape), self.case.layout)
        return x + self.case.nudge * rng.normal(size=x.shape)

    def gradient(self, samples: int) -> np.ndarray:
        """Return a gradient of the outputs."""
        rng = np.random.default_rng([self.case.seed, 100])
        return values(rng, (samples, *self.output_shape), self.case.layout)

    def targets(self, number: int, samples: int) -> np.ndarray:
        """Return labels, or what the outputs should be."""
        rng = np.random.default_rng([self.case.seed, 200 + number])
        if self.case.cost == "SumSquared":
            return rng.normal(size=(samples, *self.output_shape))
        return rng.integers(0, self.output_shape[-1], (samples, *self.output_shape[:-1]))


def first_state(case: Case) -> tuple[Arrays, tuple[int, ...]]:
    """Return parameters that are not first values, statistics that are not 0 and 1, and the output's shape."""
    model = make_model(case, dist=False)
    model.build(case.shape, case.batch)
    rng = np.random.default_rng([case.seed, 300])
    state = {name: array + 0.3 * rng.normal(size=array.shape) for name, array in model.state().items()}
    return {name: abs(array) if name.endswith("/var") else array for name, array in state.items()}, model.output_shape


def first_part(case: Case, state: Arrays, comm: Any = None) -> Kept:
    """Both passes, some training, and an evaluation, on the case's first grid (serially without `comm`)."""
    player = Player(case, case.grid, comm)
    player.model.load_state(state)
    player.passes()
    for number in range(case.steps):
        player.train(number, case.batch)
    player.evaluate(case.rest)
    player.train(case.steps, case.rest)
    return player.end()


def second_part(case: Case, kept: Kept, comm: Any = None) -> Kept:
    """Go on, on the other grid, from the state of the first."""
    player = Player(case, case.other, comm)
    player.model.load_state(kept.state)
    player.model.load_optimizer_state(kept.slots)
    player.model.step = kept.step
    player.train(kept.step, case.batch)
    player.evaluate(case.batch)
    return player.end()


class Player:
    """One rank's model, and what it has found so far."""

    def __init__(self, case: Case, grid: Grid, comm: Any) -> None:
        self.case, self.found = case, {}
        self.model = make_model(case, dist=comm is not None)
        self.model.build(case.shape, case.batch, process_grid(comm, grid) if comm is not None else None)
        self.data = Data(case, self.model.output_shape)
        self.lent: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.sent: list[tuple[int, dict[str, int], int]] = []

    def passes(self) -> None:
        """One pass forward and one back; another one, of other images, comes between."""
        model, samples = self.model, self.case.batch
        run = model.forward(self._tile("the images", model.scatter(self.data.images(99, samples))), batch_size=samples)
        self._lend("what forward returned", run.output)
        self.found["y"] = model.gather(run.output)
        dy = self._tile("the gradient", model.scatter_output(self.data.gradient(samples)))
        between = model.forward(
            self._tile("other images", model.scatter(self.data.images(97, samples))), training=False
        )
        self._lend("what the other backward returned", between.backward(dy))
        dx = run.backward(dy)
        self._lend("what backward returned", dx)
        self.found["dx"] = model.gather_input(dx)
        self.found |= {f"gradient {name}": array for name, array in model.gradients().items()}

    def train(self, number: int, samples: int) -> None:
        """One training step."""
        model = self.model
        x = self._tile("the images", model.scatter(self.data.images(number, samples)))
        halos, sums = self._bytes(), model.bytes_summed
        loss = model.train_batch(x, self.data.targets(number, samples), batch_size=samples)
        self.found[f"loss {number}"] = np.array(loss)
        sent = {name: count - halos[name] for name, count in self._bytes().items()}
        self.sent.append((samples, sent, model.bytes_summed - sums))

    def evaluate(self, samples: int) -> None:
        """One pass forward that trains nothing."""
        x = self.model.scatter(self.data.images(98, samples))
        y = self.model.fprop(self._tile("the images", x), training=False, batch_size=samples)
        self._lend("what an evaluation returned", y)
        self.found[f"evaluated {samples}"] = self.model.gather(y)

    def end(self) -> Kept:
        """Return what was found, after a look at all arrays that were lent."""
        model = self.model
        for what, array, copy in self.lent:
            if not np.array_equal(array, copy, equal_nan=True):
                raise Wrong(f"{what} was changed by a later call")
        state = model.state()
        self.found |= {f"state {name}": array for name, array in state.items()}
        for layer in model.leaves:  # the next model may get the memory that this one's messages go to
            layer.settle()
        return Kept(self.found, model.step, state, model.optimizer_state(), self.sent)

    def _bytes(self) -> dict[str, int]:
        return {layer.name: layer.bytes_sent for layer in self.model.leaves}

    def _tile(self, what: str, tile: np.ndarray) -> np.ndarray:
        """Return a tile in the layout of the case, and remember its values."""
        array = laid_out(tile, "plain" if self.case.nudge else self.case.layout)
        self._lend(what, array)
        return array

    def _lend(self, what: str, array: np.ndarray) -> None:
        self.lent.append((what, array, array.copy()))


def of_torch(case: Case, state: Arrays, output_shape: tuple[int, ...]) -> Arrays:
    """Return the same arrays as both parts together, by PyTorch."""
    import torch

    from .oracle import Oracle

    oracle, data, found = Oracle(case, state), Data(case, output_shape), {}
    x = torch.tensor(data.images(99, case.batch), requires_grad=True)
    y = oracle.forward(x, training=True)
    y.backward(torch.tensor(data.gradient(case.batch)))
    found |= {"y": y.detach().numpy(), "dx": x.grad.numpy()}
    for name, tensor in oracle.trained.items():
        found[f"gradient {name}"] = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy().copy()
    parts: Iterator[tuple[int, int]] = iter([*((n, case.batch) for n in range(case.steps)), (case.steps, case.rest)])
    for number, samples in parts:
        if number == case.steps:
            _evaluate(oracle, data, case.rest, found)
        found[f"loss {number}"] = _train(oracle, data, number, samples)
    found |= _state("state", oracle)
    found["again loss"] = _train(oracle, data, oracle.step, case.batch)
    _evaluate(oracle, data, case.batch, found, "again ")
    return found | _state("again state", oracle)


def _train(oracle: Any, data: Data, number: int, samples: int) -> np.ndarray:
    import torch

    x, targets = data.images(number, samples), data.targets(number, samples)
    return np.array(oracle.train(torch.tensor(x), torch.tensor(targets)))


def _evaluate(oracle: Any, data: Data, samples: int, found: Arrays, word: str = "") -> None:
    import torch

    with torch.no_grad():
        y = oracle.forward(torch.tensor(data.images(98, samples)), training=False)
    found[f"{word}evaluated {samples}"] = y.numpy()


def _state(word: str, oracle: Any) -> Arrays:
    return {f"{word} {name}": tensor.detach().numpy().copy() for name, tensor in oracle.tensors.items()}


def joined(first: Kept, second: Kept) -> Arrays:
    """Return what both parts found, named as `of_torch` does."""
    again = {f"again {'loss' if name.startswith('loss') else name}": array for name, array in second.found.items()}
    return first.found | again
