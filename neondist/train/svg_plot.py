"""Line and point plots for reports, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .html_elements import SPLIT_COLOURS, axis_range_and_is_logarithmic, escape_html, value_html

_PLOT_WIDTH, _PLOT_HEIGHT = 330, 210  # three fit in a row of a page, one in 400 pixels without scaling
_TOP_MARGIN, _RIGHT_MARGIN, _BOTTOM_MARGIN = 10, 16, 38
_CHARACTER_WIDTH = 6.4  # pixels of width
_TARGET_TICK_INTERVALS = 4  # approximate number of intervals between ticks
_MIN_AXIS_LENGTH = 1e-300  # division by smaller differences may overflow
_MIN_RELATIVE_VARIATION = 1e-12  # smaller relative variations are rounding errors
_BEST_POINT_COLOUR = "#d62728"
_LINE_COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")


@dataclass(frozen=True)
class Axis:
    """Ends, scale and ticks of an axis."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def vertical(cls, values: Sequence[float]) -> Axis:
        """Return a y axis that ends at ticks, with the scale of `axis_range_and_is_logarithmic`."""
        low, high, logarithmic = axis_range_and_is_logarithmic(values)
        if logarithmic:
            ticks = _logarithmic_ticks(low, high)
        else:
            low, high = _widen_empty_range(low, high)
            step = _tick_spacing(low, high)
            ticks = [at * step for at in range(math.floor(low / step), math.ceil(high / step) + 1)]
        return cls(min(low, ticks[0]), max(high, ticks[-1]), logarithmic, tuple(ticks))

    @classmethod
    def horizontal(cls, values: Sequence[float], logarithmic: bool) -> Axis:
        """Return an x axis; a linear axis ends at the extreme values, and integers have integer ticks."""
        low, high = min(values), max(values)
        if logarithmic and _MIN_RELATIVE_VARIATION * high < high - low:
            ticks = _logarithmic_ticks(low, high)
            return cls(min(low, ticks[0]), max(high, ticks[-1]), True, tuple(ticks))
        if high - low <= max(_MIN_AXIS_LENGTH, _MIN_RELATIVE_VARIATION * max(abs(low), abs(high))):
            return cls(low - 1, high + 1, False, (low,))
        step = _tick_spacing(low, high)
        if all(float(value).is_integer() for value in values):
            step = max(step, 1.0)
        return cls(low, high, False, tuple(
            at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)
        ))  # fmt: skip

    def relative_position(self, value: float) -> float:
        """Return the relative position of a value, from 0 to 1."""
        transform = math.log if self.logarithmic else float
        return (transform(value) - transform(self.low)) / (transform(self.high) - transform(self.low) or 1)

    def tick_labels(self) -> list[str]:
        """Return tick labels with enough digits to distinguish them."""
        if self.logarithmic or len(self.ticks) < 2:
            return [value_html(tick) for tick in self.ticks]
        step, max_tick = self.ticks[1] - self.ticks[0], max(map(abs, self.ticks))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if max_tick < 1e6 and digits <= 5:
            return [f"{tick:,.{digits}f}" for tick in self.ticks]
        return [f"{tick:.{max(2, math.ceil(math.log10(max_tick / step)) + 1)}g}" for tick in self.ticks]


def _widen_empty_range(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, widened if they coincide."""
    if high - low > max(_MIN_AXIS_LENGTH, _MIN_RELATIVE_VARIATION * max(abs(low), abs(high))):
        return low, high
    return (min(low, 0.0), max(high, 0.0)) if abs(high) > 4 * _MIN_AXIS_LENGTH else (0.0, 1.0)


def _tick_spacing(low: float, high: float) -> float:
    """Return a tick spacing: 1, 2 or 5 times a power of ten."""
    min_spacing = (high - low) / _TARGET_TICK_INTERVALS
    power_of_ten = 10.0 ** math.floor(math.log10(min_spacing))
    return next(multiple * power_of_ten for multiple in (1, 2, 5, 10) if multiple * power_of_ten >= 0.999 * min_spacing)


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis that enclose its ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:  # decades are enough
        decades = -(-(last - first) // (_TARGET_TICK_INTERVALS + 1))
        return [10.0**at for at in range(first, last + decades, decades) if at < 308]
    ticks = [multiple * 10.0**at for at in range(first, last) for multiple in (1, 2, 5)] + [10.0**last]
    first_tick, last_tick = max(t for t in ticks if t <= low * 1.001), min(t for t in ticks if t >= high * 0.999)
    return [tick for tick in ticks if first_tick <= tick <= last_tick]


def line_plot_svg(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    points_only: bool = False,
    logarithmic_x: bool = False,
    best_point: tuple[float, float] | None = None,
    x_label: str = "",
) -> str:
    """Return an SVG plot of named lines, each a sequence of points (x, y).

    Parameters
    ----------
    points_only : bool
        Draw points without lines.
    logarithmic_x : bool
        Use a logarithmic x axis. `axis_range_and_is_logarithmic` chooses the scale of y.
    best_point : (x, y), optional
        A point to mark.
    x_label : str
        Label of the x axis.
    """
    points = [point for line in lines.values() for point in line]
    x_axis = Axis.horizontal([x for x, _ in points], logarithmic_x)
    y_axis = Axis.vertical([y for _, y in points])
    y_labels = y_axis.tick_labels()
    plot_left = 10 + _CHARACTER_WIDTH * max(map(len, y_labels))
    width, height = _PLOT_WIDTH - plot_left - _RIGHT_MARGIN, _PLOT_HEIGHT - _TOP_MARGIN - _BOTTOM_MARGIN

    def to_pixels(x: float, y: float) -> tuple[str, str]:
        return (
            f"{plot_left + x_axis.relative_position(x) * width:.1f}",
            f"{_TOP_MARGIN + (1 - y_axis.relative_position(y)) * height:.1f}",
        )

    bottom, svg, legend = _PLOT_HEIGHT - _BOTTOM_MARGIN, [], []
    for tick, label in zip(y_axis.ticks, y_labels, strict=True):
        _, y = to_pixels(x_axis.low, tick)
        svg.append(f"<path d='M{plot_left:.1f} {y}H{_PLOT_WIDTH - _RIGHT_MARGIN}' stroke='#ddd'/>")
        svg.append(f"<text x='{plot_left - 6:.1f}' y='{float(y) + 4:.1f}' text-anchor='end'>{label}</text>")
    for tick, label in zip(x_axis.ticks, x_axis.tick_labels(), strict=True):
        x, _ = to_pixels(tick, y_axis.low)
        svg.append(f"<path d='M{x} {bottom}v4' stroke='#888'/>")
        svg.append(f"<text x='{x}' y='{bottom + 18}' text-anchor='middle'>{label}</text>")
    svg.append(
        f"<path d='M{plot_left:.1f} {_TOP_MARGIN}V{bottom}H{_PLOT_WIDTH - _RIGHT_MARGIN}' fill='none' stroke='#888'/>"
    )
    middle = plot_left + width / 2
    if x_label:
        svg.append(f"<text x='{middle:.1f}' y='{_PLOT_HEIGHT - 4}' text-anchor='middle'>{escape_html(x_label)}</text>")
    for at, (name, line) in enumerate(lines.items()):
        colour = SPLIT_COLOURS.get(name, _LINE_COLOURS[at % len(_LINE_COLOURS)])
        positions = [to_pixels(*point) for point in line]
        if not points_only:
            path_points = " ".join(map(",".join, positions))
            svg.append(f"<polyline points='{path_points}' fill='none' stroke='{colour}' stroke-width='2'/>")
        if points_only or len(positions) <= 40:
            svg += [f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'/>" for x, y in positions]
        if name != title:
            legend.append(_legend_entry_html(escape_html(name), f"<circle cx='5' cy='5' r='5' fill='{colour}'/>"))
    if scaled := [name for name, axis in (("x", x_axis), ("y", y_axis)) if axis.logarithmic]:
        legend.append(_legend_entry_html(f"logarithmic: {', '.join(scaled)}"))
    if best_point is not None:
        x, y = to_pixels(*best_point)
        ring_style = f"fill='none' stroke='{_BEST_POINT_COLOUR}' stroke-width='2'/>"
        svg.append(f"<circle cx='{x}' cy='{y}' r='7' {ring_style}")
        best_text = f"best: {value_html(best_point[1])} at {value_html(best_point[0])}"
        legend.append(_legend_entry_html(best_text, f"<circle cx='5' cy='5' r='4' {ring_style}"))
    return (
        f"<figure><figcaption><b>{escape_html(title)}</b><div>{''.join(legend)}</div></figcaption>"
        f"<svg width='{_PLOT_WIDTH}' height='{_PLOT_HEIGHT}' viewBox='0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}' role='img'"
        f" aria-label='{escape_html(title)}' font-size='11' fill='#444'>{''.join(svg)}</svg></figure>"
    )


def _legend_entry_html(text: str, mark_svg: str = "") -> str:
    icon_svg = f"<svg width='10' height='10'>{mark_svg}</svg> " if mark_svg else ""
    return f"<span class='key'>{icon_svg}{text}</span>"
