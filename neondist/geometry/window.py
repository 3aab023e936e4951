"""Window of a layer that slides over the image."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard, overload

from ..errors import ConfigError, ShapeError
from ..registry import suggest
from ..registry.arguments import type_checked
from ..terminal.console import counted
from .box import Box
from .lattice import AxisCells, cells_used_by, hull_of

MODES = ("zeros", "reflect", "replicate", "wrap")


@dataclass(frozen=True, init=False)
class Window:
    """Kernel, stride, padding and dilation on every spatial axis; integers only.

    Parameters
    ----------
    kernel, stride, dilation : int or tuple of int
        An int applies to all axes. The number of axes is `ndim`, or else the length of the tuples given, or else 2.
    padding : int, (int, ...) per axis, or ((before, after), ...) per side
        Negative values crop the image; they are allowed only for a kernel of 1.
    fill : float
        Value of the cells outside the image in mode 'zeros' (-inf for max pooling).
    mode : {'zeros', 'reflect', 'replicate', 'wrap'}, or one per axis
        Padding mode. The attribute is a tuple if modes differ between axes, else a str.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    fill: float
    mode: str | tuple[str, ...]

    @type_checked
    def __init__(
        self,
        kernel: int | Sequence[int] = 3,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[Any] = 1,
        dilation: int | Sequence[int] = 1,
        fill: float = 0.0,
        mode: str | Sequence[str] = "zeros",
        *,
        ndim: int | None = None,
    ) -> None:
        modes = (mode,) if isinstance(mode, str) else tuple(mode)
        lengths = {len(v) for v in (kernel, stride, padding, dilation) if _is_sequence(v)}
        lengths |= set() if isinstance(mode, str) else {len(modes)}
        if len(lengths) > 1 or (ndim is not None and lengths - {ndim}):
            raise ConfigError(
                f"kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}"
                f"{'' if isinstance(mode, str) else f', padding_mode {list(modes)}'}: the tuples differ in length,"
                " or have a length other than the number of spatial axes; give an int or one entry per axis"
            )
        axes = ndim if ndim is not None else (lengths.pop() if lengths else 2)
        for name in modes:
            if name not in MODES:
                raise ConfigError(f"padding_mode '{name}' is unknown{suggest(str(name), MODES)}")
        self._set("kernel", _per_axis("kernel_size", kernel, axes, minimum=1))
        self._set("stride", _per_axis("stride", stride, axes, minimum=1))
        self._set("padding", _per_side(padding, axes))
        self._set("dilation", _per_axis("dilation", dilation, axes, minimum=1))
        if any(min(sides) < 0 < k - 1 for sides, k in zip(self.padding, self.kernel, strict=True)):
            raise ConfigError(f"padding {padding}: only a kernel of 1 may crop (negative padding); use values >= 0")
        self._set("fill", float(fill))
        self._set("mode", modes[0] if len({*modes}) == 1 else modes)

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the class is frozen

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def modes(self) -> tuple[str, ...]:
        """The padding mode of every axis."""
        return (self.mode,) * self.ndim if isinstance(self.mode, str) else self.mode

    @property
    def wraps(self) -> bool:
        """Whether the image wraps around on some axis."""
        return "wrap" in self.modes

    @property
    def span(self) -> tuple[int, ...]:
        """Extent of one window along every axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @classmethod
    def for_pointwise(cls, ndim: int) -> Window:
        """Return the window of a pointwise operation."""
        return cls(1, padding=0, ndim=ndim)

    @property
    def pointwise(self) -> bool:
        """Whether every output cell depends only on the input cell at the same position."""
        return all(v == 1 for v in (*self.kernel, *self.stride)) and not any(p for side in self.padding for p in side)

    @overload
    def output_extent(self, extent: int) -> int: ...
    @overload
    def output_extent(self, extent: Sequence[int]) -> tuple[int, ...]: ...
    def output_extent(self, extent: int | Sequence[int]) -> int | tuple[int, ...]:
        """Return the number of windows along every axis (an int is the extent of axis 0)."""
        if isinstance(extent, Sequence):
            return tuple(self._output_extent_along(axis, n) for axis, n in enumerate(extent))
        return self._output_extent_along(0, int(extent))

    def _output_extent_along(self, axis: int, n: int) -> int:
        return max(0, (n + sum(self.padding[axis]) - self.span[axis]) // self.stride[axis] + 1)

    def needs(self, output_box: Box) -> Box:
        """Return the hull of the cells that `output_box` depends on; may extend outside the image."""
        return Box.from_ranges(
            hull_of(self.axis_window(axis).used_cells(*ends)) for axis, ends in enumerate(output_box.axes())
        )

    def used_cells(self, lo: int, hi: int) -> AxisCells:
        """Return the cells, inside the image or not, that outputs [lo, hi) of a window of one axis depend on."""
        (kernel,), (stride,), ((padding, _),), (dilation,) = self.kernel, self.stride, self.padding, self.dilation
        return cells_used_by(lo, hi, kernel, stride, padding, dilation)

    def scale_factor(self, axis: int) -> tuple[int, int]:
        """Return integers a and b such that a shift by b outputs shifts the window by a input cells."""
        return self.stride[axis], 1

    def axis_window(self, axis: int) -> Window:
        """Return the window of one axis."""
        window = copy(self)
        for field in ("kernel", "stride", "padding", "dilation"):
            window._set(field, (getattr(self, field)[axis],))
        window._set("mode", self.modes[axis])
        return window

    def check(self, extent: Sequence[int]) -> None:
        """Raise ShapeError or ConfigError if the window cannot slide over an image of this extent."""
        if len(extent) != self.ndim:
            raise ShapeError(
                f"a {self.ndim}-D window does not fit extent {tuple(extent)}; give the window one entry per axis"
            )
        for axis, (n, sides) in enumerate(zip(extent, self.padding, strict=True)):
            if self.span[axis] == 1 > n + sum(sides):
                raise ShapeError(
                    f"cropping {-sum(sides)} of {counted(n, 'cell')} on axis {axis} leaves none; crop less"
                )
            if self.span[axis] > n + sum(sides):
                raise ShapeError(
                    f"kernel_size {self.kernel} (dilation {self.dilation}) spans {self.span[axis]} cells on axis"
                    f" {axis}, more than the padded input has ({n} + {sides[0]} + {sides[1]}); use a smaller kernel or"
                    " more padding"
                )
            if self.modes[axis] == "reflect" and max(sides) >= n:
                raise ConfigError(
                    f"padding {sides} with padding_mode 'reflect' must be less than the image's {counted(n, 'cell')}"
                    f" on axis {axis}; use less padding or padding_mode 'replicate'"
                )


def same_padding(
    extent: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the padding for an output of ceil(extent / stride) cells; an odd total has one cell more at the end."""
    total_padding = [
        max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
        for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True)
    ]
    return tuple((t // 2, t - t // 2) for t in total_padding)


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence, checking the common types first: models create thousands of windows."""
    return isinstance(value, tuple) or (not isinstance(value, int) and isinstance(value, Sequence))


def _per_axis(field: str, value: int | Sequence[int], axes: int, minimum: int) -> tuple[int, ...]:
    values: tuple[Any, ...] = tuple(value) if _is_sequence(value) else (value,) * axes
    if all(type(v) is int and v >= minimum for v in values):
        return values
    if any(isinstance(v, bool) or not isinstance(v, Integral) or v < minimum for v in values):
        raise ConfigError(f"{field} {value}: expected integers of at least {minimum}")
    return tuple(int(v) for v in values)


def _per_side(value: int | Sequence[Any], axes: int) -> tuple[tuple[int, int], ...]:
    values = tuple(value) if _is_sequence(value) else (value,) * axes
    sides = tuple(tuple(v) if _is_sequence(v) else (v, v) for v in values)
    if all(len(side) == 2 and type(side[0]) is type(side[1]) is int for side in sides):
        return sides
    if any(len(side) != 2 or any(not isinstance(p, Integral) for p in side) for side in sides):
        raise ConfigError(f"padding {value}: expected an integer, one integer per axis, or ((before, after), ...)")
    return tuple((int(before), int(after)) for before, after in sides)
