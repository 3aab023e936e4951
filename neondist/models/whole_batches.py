"""Serial models created in a scope: they become distributed, but take and return whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from ..comm import ProcessGrid
from ..layers import Sequential
from ..plan import Plan
from ..registry import DistributedMixin, dist_class
from ..strategies import Strategy, StrategyBuilder
from .model import Model
from .scope import MODEL_CLASS_SELECTOR


@contextmanager
def distribute_created_models(
    grid: ProcessGrid, strategy: StrategyBuilder | Strategy, created: list[Model]
) -> Iterator[None]:
    """Context that distributes serial models created by this thread over a grid, and adds them to `created`."""
    token = MODEL_CLASS_SELECTOR.set(partial(_whole_batch_class, grid, strategy, created))
    try:
        yield
    finally:
        MODEL_CLASS_SELECTOR.reset(token)


def _whole_batch_class(grid: ProcessGrid, strategy: StrategyBuilder | Strategy, models: list[Model], cls: type) -> type:
    """Return the whole-batch class of a serial model; a distributed class is unchanged."""
    if issubclass(cls, DistributedMixin):
        return cls
    base: Any = dist_class(cls)

    @wraps(base.__init__)
    def __init__(self: Any, layers: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, [layer.distributed_counterpart() for layer in Sequential(layers).layers], *args, **kwargs)
        self.configure_execution(strategy=self.strategy or strategy)
        models.append(self)

    class_attributes = {"__init__": __init__, "default_grid": grid, "serial_name": cls.__name__}
    return type(f"_WholeBatch{cls.__name__}", (_ScatterGatherModel, base), class_attributes)


class _ScatterGatherModel(DistributedMixin, Model):
    """A distributed model with the interface of a serial one: whole arrays, the same on every rank."""

    default_grid: ProcessGrid
    serial_name: str

    def build(
        self, input_shape: Sequence[int], batch_size: int, grid: ProcessGrid | None = None, plan: Plan | None = None
    ) -> None:
        """Build the model, by default on the scope's grid."""
        super().build(input_shape, batch_size, grid or self.default_grid, plan)

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one step on a whole batch, and return its mean loss."""
        return super().train_batch(super().scatter(x), targets, batch_size or len(x))

    def fprop(self, x: Any, training: bool = True, batch_size: int | None = None) -> Any:
        """Return the whole output of a whole batch."""
        return super().gather(super().fprop(super().scatter(x), training, batch_size or len(x)))

    def bprop(self, dy: Any) -> Any:
        """Return the whole gradient of the input."""
        return super().gather_input(super().bprop(super().scatter_output(dy)))

    def scatter(self, images: Any) -> Any:
        """Return the argument unchanged: arrays are whole already."""
        return images

    def gather(self, y: Any) -> Any:
        return y

    def scatter_output(self, dy: Any) -> Any:
        return dy

    def gather_input(self, dx: Any) -> Any:
        return dx

    @property
    def display_name(self) -> str:
        return self.serial_name
