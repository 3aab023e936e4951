"""Small registered classes whose names do not collide with real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from neondist.config import load_experiment
from neondist.errors import ShapeError
from neondist.registry import DistributedMixin, Registered
from neondist.registry.ranges import NotNegative, Positive


class Toy(Registered):
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.arguments() == other.arguments()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.arguments()})"


class ToyRelu(Toy):
    pass


class ToyLayer(Toy):
    has_dist_counterpart = True


class ToyConv(ToyLayer):
    def __init__(
        self,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        padding: int | Literal["same"] | tuple[tuple[int, int], ...] = 0,
        bias: bool = True,
        scale: float = 1.0,
        activation: ToyRelu | None = None,
        name: str | None = None,
    ) -> None:
        if out_channels < 1:
            raise ShapeError(f"out_channels {out_channels} must be at least 1")
        if kernel_size == 0:
            raise ShapeError("a window needs a cell")
        if isinstance(kernel_size, tuple) and 0 in kernel_size:
            raise ShapeError(f"layer 'x' (ToyConv): kernel_size {kernel_size} has no cell")
        self.name = name


class ToyDist(DistributedMixin):
    pass


class ToyConvDist(ToyDist, ToyConv):
    pass


class ToySerial(ToyLayer):
    """Layer without a distributed class."""


class ToyWide(ToyConvDist):
    """User subclass that forwards its keyword arguments."""

    def __init__(self, width: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class ToySGD(Toy):
    def __init__(self, learning_rate: Positive | None = 0.1, betas: tuple[NotNegative, ...] = (0.9, 0.999)) -> None: ...


class ToyModel(Toy):
    has_dist_counterpart = True

    def __init__(self, layers: Sequence[ToyLayer], optimizer: ToySGD | None = None) -> None:
        for i, layer in enumerate(layers):
            if getattr(layer, "name", None) == "bad":
                error = ShapeError(f"layer {i} is bad")
                error.subject = layer  # type: ignore[attr-defined]
                raise error


class ToyModelDist(ToyDist, ToyModel):
    pass


class ToyExperiment(Toy):
    def __init__(
        self,
        model: ToyModel,
        epochs: int = 1,
        dist_flag: bool = True,
        grid: dict[str, int] | None = None,
        dtype: str | None = None,
        folder: Path | None = None,
        anything=None,
    ) -> None:
        self.model = model


def load(text: str, *overrides: str) -> Any:
    return load_experiment("exp.yaml", overrides, text=text, top="ToyExperiment")
