"""curves.png: loss and error over the epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...comm import all_or_none
from ...io.files import has_matplotlib, write_figure
from ..html_elements import SPLIT_COLOURS, axis_range_and_is_logarithmic, is_plottable
from ..state import EpochRecord, TrainState
from .hook import Hook
from .progress_bar import is_metric

_MARKER_BY_SPLIT = {"train": "o", "validation": "^", "test": "s"}
_MAX_METRIC_PANELS = 4
"""Largest number of panels for metrics, in addition to loss and error."""


class CurvesPicture(Hook):
    """Draw the curves on rank 0 at the end of a run, even a failed one; do nothing without matplotlib."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_run(self, run: TrainState) -> None:
        """Draw the curves."""
        with all_or_none(run.grid.world):
            self._draw(run)

    on_stop = after_run

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """Draw the curves so far."""
        self._draw(run)

    def _draw(self, run: TrainState) -> None:
        if run.is_first_rank and run.history and has_matplotlib():
            write_curves_picture(run.history, self.path)


def write_curves_picture(history: Sequence[EpochRecord], path: Path) -> None:
    """Plot the losses of `history`, and the errors and metrics, if any."""
    from matplotlib.figure import Figure

    last, error = history[-1], history[-1].selection_value("error")
    has_error = error is not None
    record_fields = (name for record in history for name, value in record.items() if is_metric(name, value))
    metric_names = list(dict.fromkeys(name.removeprefix("validation_") for name in record_fields))[:_MAX_METRIC_PANELS]
    num_panels = 1 + has_error + len(metric_names)
    figure = Figure(figsize=(5 * num_panels, 4), layout="constrained")
    loss_axes, *other_axes = figure.subplots(1, num_panels, squeeze=False)[0]
    error_axes, metric_axes = other_axes[:has_error], other_axes[has_error:]
    loss_axes.set(title="Loss", ylabel="mean loss per sample")
    for name in _MARKER_BY_SPLIT:
        _plot_line(loss_axes, history, f"{name}_loss", name)
        for axes in error_axes:
            _plot_line(axes, history, f"{name}_error", name, factor=100)
    for axes in error_axes:
        title = f"{last.selection_split.capitalize()} error: {100 * error:.2f} % after epoch {last['epoch']}"
        axes.set(title=title, ylabel="misclassified (%)")
    for axes, name in zip(metric_axes, metric_names, strict=True):
        axes.set(title=name)
        _plot_line(axes, history, f"validation_{name}", "validation")
        _plot_line(axes, history, name, "test")
    for axes in (loss_axes, *error_axes, *metric_axes):
        if axes.get_lines():
            axes.legend()
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _set_y_scale_and_limits(axes)
        axes.grid(alpha=0.3)
    write_figure(path, figure)


def _set_y_scale_and_limits(axes: Any) -> None:
    """Set the scale and limits of the y axis, with plain numbers at the ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = [y for line in axes.get_lines() for y in line.get_ydata()]
    low, _, is_logarithmic = axis_range_and_is_logarithmic(values) if values else (None, None, False)
    if is_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif low == 0:
        axes.set_ylim(0, None if max(values) > 0 else 1)


def _plot_line(axes: Any, history: Sequence[EpochRecord], record_field: str, split: str, factor: float = 1) -> None:
    points = [(r["epoch"], factor * r[record_field]) for r in history if is_plottable(r.get(record_field))]
    marker = _MARKER_BY_SPLIT[split] if len(points) <= 40 else None  # more markers would hide the line
    if points:
        axes.plot(*zip(*points, strict=True), color=SPLIT_COLOURS[split], marker=marker, label=split)
