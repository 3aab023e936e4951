"""Figures of pages and of curves.png: limits, axes, the marked best point, and the chosen metrics."""

from __future__ import annotations

import json
import re

import pytest

from neondist.train.callbacks.curves_picture import write_curves_picture
from neondist.train.html_report import evaluation_page_html, run_report_html
from neondist.train.state import EpochRecord
from neondist.train.svg_plot import Axis, line_plot_svg


def make_records(losses, **metrics):
    return [
        EpochRecord(
            epoch=i + 1, step=i + 1, train_loss=loss, validation_loss=loss, **{k: v[i] for k, v in metrics.items()}
        )
        for i, loss in enumerate(losses)
    ]


@pytest.fixture
def draw_axes(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(
        "neondist.train.callbacks.curves_picture.write_figure", lambda path, figure: figures.append(figure)
    )

    def draw(history):
        write_curves_picture(history, tmp_path / "curves.png")
        return figures.pop().axes

    return draw


@pytest.mark.parametrize(
    ("losses", "scale", "bottom"),
    [
        ((2.0, 0.5), "linear", 0.0),
        ((-1.0, -3.0), "linear", None),
        ((10.2, 10.1), "linear", None),
        ((900, 0.1), "log", None),
    ],
    ids=["from_zero", "negative", "flat", "far"],
)
def test_limits_include_all_points(draw_axes, losses, scale, bottom):
    (panel,) = draw_axes(make_records(losses))
    assert panel.get_yscale() == scale
    low, high = panel.get_ylim()
    assert low <= min(losses) < max(losses) <= high
    assert low == bottom if bottom is not None else low != 0
    assert high - low < 2 * (max(losses) - min(losses)) or scale == "log"


def test_constant_zero_error_has_no_negative_limit(draw_axes):
    _, error = draw_axes(make_records((2.0, 0.5), validation_error=(0.0, 0.0)))
    assert error.get_ylim() == (0, 1)


def test_logarithmic_ticks_are_plain_numbers(draw_axes):
    (panel,) = draw_axes(make_records((50.0, 2.0)))
    panel.figure.draw_without_rendering()
    assert {"5", "10", "20"} <= {label.get_text() for label in panel.get_yticklabels()}


def test_epoch_table_groups_columns_by_split(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"epoch": 1, "train_loss": 2.0, "validation_loss": 1.0, "validation_iou": 0.5, "rmse": 3.0})
    )
    head = re.search(r"<h2>Epochs</h2>.*?<table>(<tr>.*?</tr><tr>.*?</tr>)", run_report_html(tmp_path), re.S)[1]
    groups = re.findall(r"colspan='(\d)'>(\w*)</th>", head)
    assert groups == [("1", ""), ("1", ""), ("1", "train"), ("2", "validation")]
    assert re.findall(r"<th>(\w+)</th>", head) == ["epoch", "rmse", "loss", "iou", "loss"]


def test_chosen_metrics_have_panels(draw_axes):
    history = make_records((2.0, 0.5), iou=(0.1, 0.4), validation_iou=(0.2, 0.3))
    _, iou = draw_axes(history)
    assert iou.get_title() == "iou"
    assert [line.get_label() for line in iou.lines] == ["validation", "test"]


def test_non_numeric_values_are_omitted(draw_axes):
    (panel,) = draw_axes(make_records(("<b>", 0.5)))
    assert [list(line.get_xdata()) for line in panel.lines] == [[2], [2]]


def test_best_point_is_marked_on_logarithmic_axes():
    text = line_plot_svg("rate", {"result": [(1e-3, 2.0), (1e-2, 0.1), (1e-1, 40.0)]}, True, True, (1e-2, 0.1))
    marker = re.search(r"<circle cx='([\d.]+)' cy='([\d.]+)' r='7'", text)
    dots = [(float(x), float(y)) for x, y in re.findall(r"cx='([\d.]+)' cy='([\d.]+)' r='3'", text)]
    assert (float(marker[1]), float(marker[2])) == dots[1]
    assert dots[1][0] == pytest.approx((dots[0][0] + dots[2][0]) / 2, abs=0.1)  # 0.01 is halfway from 0.001 to 0.1
    assert dots[0][1] == pytest.approx((dots[1][1] + dots[2][1]) / 2, abs=0.5)  # 2 is halfway from 0.1 to 40
    assert "best: 0.1 at 0.01" in text
    assert "logarithmic: x, y" in text


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.42, 0.06), ["0.0", "0.2", "0.4", "0.6"]),
        ((0.14, 0.14), ["0.00", "0.05", "0.10", "0.15"]),
        ((0.0, 0.0), ["0.0", "0.5", "1.0"]),
        ((-3.0, -3.0), ["-3", "-2", "-1", "0"]),
        ((1.2739, 1.3095), ["1.27", "1.28", "1.29", "1.30", "1.31"]),
        ((900, 0.1), ["0.1", "1", "10", "100", "1000"]),
        ((3e7, 3e7 + 4), ["30000000", "30000001", "30000002", "30000003", "30000004"]),
        ((0.0, 5e-324), ["0.0", "0.5", "1.0"]),
        ((-1e307, 4e307), None),
        ((1e-300, 1e307), None),
    ],
)
def test_ticks_include_all_values(values, labels):
    axis = Axis.vertical(values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 7
    assert labels is None or axis.tick_labels() == labels
    assert len(set(axis.tick_labels())) == len(axis.ticks)
    assert all(0 <= axis.relative_position(value) <= 1 for value in values)


def test_epoch_ticks_are_integers():
    assert Axis.horizontal([1, 2], logarithmic=False).tick_labels() == ["1", "2"]
    assert Axis.horizontal([5], logarithmic=False).tick_labels() == ["5"]
    assert Axis.horizontal([0, 1000], logarithmic=False).tick_labels() == ["0", "500", "1,000"]


def test_splits_have_distinct_colours(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 1, "train_loss": 1, "test_loss": 2, "iou": 0.5, "validation_iou": 1}'
    )
    loss, iou = run_report_html(tmp_path).split("<figure>")[1:3]
    assert re.findall("> (train|validation|test)<", loss + iou) == ["train", "test", "validation", "test"]


def test_report_begins_with_the_best_epoch(tmp_path):
    errors = ((1, 0.5), (2, 0.25), (3, 0.75))
    lines = [json.dumps({"epoch": epoch, "validation_loss": 1, "validation_error": error}) for epoch, error in errors]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "curves.png").write_bytes(b"also drawn from the records")
    text = run_report_html(tmp_path)
    assert "Lowest validation error: 25 %, epoch 2" in text
    assert "curves.png" not in text


def test_evaluate_page_has_a_figure():
    text = evaluation_page_html("e", {}, {"loss": 1.0, "iou_per_class": [0.5, None, "<script>", 0.25] * 6})
    assert text.count("<circle") == 12
    assert "<script>" not in text
    assert "<p class='lead'>Loss: 1</p>" in text
    assert "<svg" not in evaluation_page_html(
        "e", {}, {"loss": 1.0, "iou_per_class": [0.5, 0.25]}
    )  # the table is enough
