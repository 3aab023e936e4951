"""Line and point plots for reports, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .page import SPLIT_COLOURS, axis_range, format_value, safe

_WIDTH, _HEIGHT = 330, 210  # three fit in a row of a page, one in 400 pixels without scaling
_TOP, _RIGHT, _BOTTOM = 10, 16, 38
_CHARACTER = 6.4  # pixels of width
_TICKS = 4  # approximate number of intervals between ticks
_TINY = 1e-300  # smaller differences cannot be divided
_FLAT = 1e-12  # smaller relative variations are rounding errors
_BEST = "#d62728"
_COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")


@dataclass(frozen=True)
class Axis:
    """Ends, scale and ticks of an axis."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def vertical(cls, values: Sequence[float]) -> Axis:
        """Return a y axis that ends at ticks, with the scale of `axis_range`."""
        low, high, powers = axis_range(values)
        if powers:
            ticks = _powers(low, high)
        else:
            low, high = _widened(low, high)
            step = _step(low, high)
            ticks = [at * step for at in range(math.floor(low / step), math.ceil(high / step) + 1)]
        return cls(min(low, ticks[0]), max(high, ticks[-1]), powers, tuple(ticks))

    @classmethod
    def horizontal(cls, values: Sequence[float], powers: bool) -> Axis:
        """Return an x axis: a linear one ends at the values; integers have integer ticks."""
        low, high = min(values), max(values)
        if powers and _FLAT * high < high - low:
            ticks = _powers(low, high)
            return cls(min(low, ticks[0]), max(high, ticks[-1]), True, tuple(ticks))
        if high - low <= max(_TINY, _FLAT * max(abs(low), abs(high))):
            return cls(low - 1, high + 1, False, (low,))
        step = _step(low, high)
        if all(float(value).is_integer() for value in values):
            step = max(step, 1.0)
        return cls(low, high, False, tuple(
            at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)
        ))  # fmt: skip

    def place(self, value: float) -> float:
        """Return the relative position of a value, from 0 to 1."""
        scale = math.log if self.logarithmic else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low) or 1)

    def labels(self) -> list[str]:
        """Return tick labels with enough digits to distinguish them."""
        if self.logarithmic or len(self.ticks) < 2:
            return [format_value(tick) for tick in self.ticks]
        step, most = self.ticks[1] - self.ticks[0], max(map(abs, self.ticks))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if most < 1e6 and digits <= 5:
            return [f"{tick:,.{digits}f}" for tick in self.ticks]
        return [f"{tick:.{max(2, math.ceil(math.log10(most / step)) + 1)}g}" for tick in self.ticks]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return distinct ends of an axis."""
    if high - low > max(_TINY, _FLAT * max(abs(low), abs(high))):
        return low, high
    return (min(low, 0.0), max(high, 0.0)) if abs(high) > 4 * _TINY else (0.0, 1.0)


def _step(low: float, high: float) -> float:
    """Return a tick spacing: 1, 2 or 5 times a power of ten."""
    least = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(many * power for many in (1, 2, 5, 10) if many * power >= 0.999 * least)


def _powers(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis that enclose its ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:  # decades are enough
        every = -(-(last - first) // (_TICKS + 1))
        return [10.0**at for at in range(first, last + every, every) if at < 308]
    ticks = [many * 10.0**at for at in range(first, last) for many in (1, 2, 5)] + [10.0**last]
    below, above = max(t for t in ticks if t <= low * 1.001), min(t for t in ticks if t >= high * 0.999)
    return [tick for tick in ticks if below <= tick <= above]


def plot(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    dots: bool = False,
    powers: bool = False,
    best: tuple[float, float] | None = None,
    along: str = "",
) -> str:
    """Return an SVG figure of lines of points (x, y) by name.

    Parameters
    ----------
    dots : bool
        Draw points without lines.
    powers : bool
        Use a logarithmic x axis. `axis_range` chooses the scale of y.
    best : (x, y), optional
        A point to mark.
    along : str
        Label of the x axis.
    """
    points = [point for line in lines.values() for point in line]
    horizontal, vertical = Axis.horizontal([x for x, _ in points], powers), Axis.vertical([y for _, y in points])
    heights = vertical.labels()
    left = 10 + _CHARACTER * max(map(len, heights))
    across, up = _WIDTH - left - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[str, str]:
        return f"{left + horizontal.place(x) * across:.1f}", f"{_TOP + (1 - vertical.place(y)) * up:.1f}"

    bottom, svg, keys = _HEIGHT - _BOTTOM, [], []
    for tick, label in zip(vertical.ticks, heights, strict=True):
        _, y = place(horizontal.low, tick)
        svg.append(f"<path d='M{left:.1f} {y}H{_WIDTH - _RIGHT}' stroke='#ddd'/>")
        svg.append(f"<text x='{left - 6:.1f}' y='{float(y) + 4:.1f}' text-anchor='end'>{label}</text>")
    for tick, label in zip(horizontal.ticks, horizontal.labels(), strict=True):
        x, _ = place(tick, vertical.low)
        svg.append(f"<path d='M{x} {bottom}v4' stroke='#888'/>")
        svg.append(f"<text x='{x}' y='{bottom + 18}' text-anchor='middle'>{label}</text>")
    svg.append(f"<path d='M{left:.1f} {_TOP}V{bottom}H{_WIDTH - _RIGHT}' fill='none' stroke='#888'/>")
    middle = left + across / 2
    svg.append(f"<text x='{middle:.1f}' y='{_HEIGHT - 4}' text-anchor='middle'>{safe(along)}</text>" if along else "")
    for at, (name, line) in enumerate(lines.items()):
        colour, positions = SPLIT_COLOURS.get(name, _COLOURS[at % len(_COLOURS)]), [place(*point) for point in line]
        if not dots:
            joined = " ".join(map(",".join, positions))
            svg.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='2'/>")
        if dots or len(positions) <= 40:
            svg += [f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'/>" for x, y in positions]
        if name != title:
            keys.append(_key(safe(name), f"<circle cx='5' cy='5' r='5' fill='{colour}'/>"))
    if scaled := [name for name, axis in (("x", horizontal), ("y", vertical)) if axis.logarithmic]:
        keys.append(_key(f"logarithmic: {', '.join(scaled)}"))
    if best is not None:
        x, y = place(*best)
        ring = f"fill='none' stroke='{_BEST}' stroke-width='2'/>"
        svg.append(f"<circle cx='{x}' cy='{y}' r='7' {ring}")
        text = f"best: {format_value(best[1])} at {format_value(best[0])}"
        keys.append(_key(text, f"<circle cx='5' cy='5' r='4' {ring}"))
    return (
        f"<figure><figcaption><b>{safe(title)}</b><div>{''.join(keys)}</div></figcaption>"
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'"
        f" aria-label='{safe(title)}' font-size='11' fill='#444'>{''.join(svg)}</svg></figure>"
    )


def _key(text: str, mark: str = "") -> str:
    icon = f"<svg width='10' height='10'>{mark}</svg> " if mark else ""
    return f"<span class='key'>{icon}{text}</span>"
