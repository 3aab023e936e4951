"""report.html: results of a run on one self-contained page."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..formats.base import convert_read_errors
from ..formats.class_colours import class_colours
from ..io.files import short_reason
from ..io.regular_file import open_regular, read_bytes
from ..io.run_event_log import read_events
from ..terminal.console import counted
from .class_names import read_run_class_names
from .html_elements import (
    SPLIT_COLOURS,
    encode_png,
    escape_html,
    html_page,
    image_html,
    is_plottable,
    scrollable_html,
    table_html,
    text_file_html,
    value_html,
)
from .job_report import server_job_html
from .state import EpochRecord
from .svg_plot import line_plot_svg

_PICTURE_FILES = ("tiles.png",)  # curves are drawn from the records
_MAX_TABLE_ROWS, _MAX_TABLE_COLUMNS, _MAX_NESTING = 5000, 100, 5
"""Limits of table rows, of columns, and of the nesting of a record's lists."""
_MAX_CLASSES_WITHOUT_PLOT = 20
"""Number of classes above which a table gets a plot."""
_COLOURED_CLASS_COUNT, _OTHER_CLASS_COLOUR = 255, (128, 128, 128)
"""Number of classes with their own colour, and the colour of others, such as ignored cells."""
_WORST_SAMPLES_ARRAYS = "sample", "loss", "image", "label", "prediction", "volume"
_MAX_PICTURE_BYTES = 1 << 27  # limit for a picture, and for the arrays of worst.npz
_TIME_AND_BYTES_TITLES = {"seconds": "training time (s)", "samples_per_second": "samples/s",
                "bytes_sent": "halo bytes sent, all ranks", "bytes_summed": "bytes summed, all ranks"}  # fmt: skip


def run_report_html(folder: Path) -> str:
    """Return the page about the run in a folder.

    Raises
    ------
    DataError
        There is no run, or its metrics.jsonl cannot be read.
    """
    records = read_epoch_records(folder / "metrics.jsonl")
    last = records[-1]
    plottable_names = {name for record in records for name, value in record.items() if is_plottable(value)}
    metrics = sorted(plottable_names - {"epoch", "step", *_TIME_AND_BYTES_TITLES})[:_MAX_TABLE_COLUMNS]
    plots = sorted(set(map(_name_without_split, metrics)), key=lambda name: (name != "loss", name != "error", name))
    last_rows = records[-_MAX_TABLE_ROWS:]
    class_names, worst_path = read_run_class_names(folder), folder / "worst.npz"
    pictures = [folder / name for name in _PICTURE_FILES if (folder / name).is_file()]
    return html_page(folder.resolve().name, [
        *_run_headline_html(records),
        f"<p>{counted(last['epoch'], 'epoch')}, step {value_html(last.get('step', '?'))}. Source: metrics.jsonl.</p>",
        "<h2>Curves</h2>",
        *(line_plot_svg(name, _points_by_split(name, metrics, records), x_label="epoch") for name in plots),
        "<h2>Epochs</h2>",
        _epoch_table_html(metrics, last_rows),
        *_class_tables_html(last, class_names),
        *(_worst_samples_html(_read_worst_samples(worst_path), class_names) if worst_path.is_file() else []),
        "<h2>Time and bytes</h2>",
        table_html(
            ["epoch", *_TIME_AND_BYTES_TITLES.values()],
            [[value_html(r.get(n)) for n in ("epoch", *_TIME_AND_BYTES_TITLES)] for r in last_rows],
        ),
        *server_job_html(folder, last_rows),
        *_supervision_events_html(folder),
        *(f"<h2>{p.name}</h2>{image_html(p.name, read_bytes(p, _MAX_PICTURE_BYTES, folder))}" for p in pictures),
        *(text_file_html(folder / n) for n in ("experiment.yaml", "environment.json") if (folder / n).is_file()),
    ])  # fmt: skip


def _run_headline_html(records: Sequence[EpochRecord]) -> list[str]:
    """Return the lowest error, or loss, of the selection split, and its epoch."""
    for number in ("error", "loss"):
        split = records[-1].selection_split
        scores = [(r[key], r["epoch"]) for r in records if is_plottable(r.get(key := f"{split}_{number}"))]
        if scores:
            value, epoch = min(scores)
            return [f"<p class='lead'>Lowest {split} {number}: {_format_score(number, value)}, epoch {epoch}</p>"]
    return []


def evaluation_page_html(
    name: str,
    settings: Mapping[str, str],
    results: Mapping[str, Any],
    samples: Mapping[str, np.ndarray] | None = None,
    class_names: Sequence[str] = (),
) -> str:
    """Return a page of the results of `neondist evaluate`.

    Parameters
    ----------
    settings : mapping
        Checkpoint and inputs of the evaluation, by name.
    samples : mapping, optional
        Pictures, as `find_worst_samples` returns them.
    class_names : sequence of str
        Names of classes 0, 1, ...; classes without a name are numbered.
    """
    rows_by_name = {**settings, **{name: value for name, value in results.items() if not isinstance(value, list)}}
    rows = [[escape_html(name), value_html(value)] for name, value in rows_by_name.items()]
    parts = [*_evaluation_headline_html(results), table_html((), rows), *_class_tables_html(results, class_names, "")]
    pictures = _worst_samples_html(samples, class_names, 256) if samples else []
    return html_page(f"Evaluation of {name}", parts + pictures)


def _evaluation_headline_html(results: Mapping[str, Any]) -> list[str]:
    """Return the error, or the loss, as the headline of an evaluation."""
    number = next((key for key in ("error", "loss") if is_plottable(results.get(key))), None)
    if number is None:
        return []
    split = results.get("split")
    label = f"{split} {number}".capitalize() if isinstance(split, str) else number.capitalize()
    return [f"<p class='lead'>{escape_html(label)}: {_format_score(number, results[number])}</p>"]


def _format_score(metric: str, value: float) -> str:
    return f"{100 * value:.4g} %" if metric == "error" else value_html(value)


def read_epoch_records(path: Path, tolerate_incomplete_end: bool = False) -> list[EpochRecord]:
    """Return the records of a log such as metrics.jsonl; raise DataError if there are none, or one is invalid.

    Parameters
    ----------
    tolerate_incomplete_end : bool
        Whether the log will be continued: it may then be missing or empty, and an incomplete last line is ignored.
    """
    if tolerate_incomplete_end and not path.exists():
        return []
    try:
        text = read_bytes(path, root=path.parent).decode()
        lines = text.split("\n")[:-1] if tolerate_incomplete_end else text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({short_reason(error)}); give a readable run folder") from None
    records = []
    for at, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not _is_epoch(values.get("epoch")) or not _is_shallow(values, _MAX_NESTING):
            raise DataError(f"{path}:{at}: is not a record (a JSON object with an integer 'epoch'); remove the line")
        records.append(EpochRecord(values))
    if not records and not tolerate_incomplete_end:
        raise DataError(f"{path}: no epoch is complete yet; wait until the first one ends")
    return records


def _is_epoch(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_shallow(value: Any, max_depth: int) -> bool:
    """Return whether lists and mappings are nested at most `max_depth` deep."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max_depth > 0 and all(_is_shallow(item, max_depth - 1) for item in items)


def _name_without_split(name: str) -> str:
    """Return a metric's name for a plot of all splits, such as 'loss' for 'train_loss'."""
    split, _, metric = name.partition("_")
    return metric if split in SPLIT_COLOURS and metric else name


def _epoch_table_html(metrics: Sequence[str], records: Sequence[EpochRecord]) -> str:
    names = {name: _name_without_split(name) for name in metrics}
    splits = [name.removesuffix(names[name]).rstrip("_") for name in metrics]
    groups = [("", 1), *((split, len(list(columns))) for split, columns in groupby(splits))]
    rows = [[value_html(record.get(name)) for name in ("epoch", *metrics)] for record in records]
    return table_html(["epoch", *names.values()], rows, groups if any(splits) else ())


def _points_by_split(
    metric: str, metrics: Sequence[str], records: Sequence[EpochRecord]
) -> dict[str, list[tuple[float, float]]]:
    """Return the points (epoch, value) of a metric by split; a plain name means the test split, if others exist."""
    splits = {f"{split}_{metric}": split for split in SPLIT_COLOURS if f"{split}_{metric}" in metrics}
    if metric in metrics:
        splits[metric] = "test" if splits else metric
    return {s: [(r["epoch"], r[name]) for r in records if is_plottable(r.get(name))] for name, s in splits.items()}


def _class_tables_html(record: Mapping[str, Any], class_names: Sequence[str], when: str = ", last epoch") -> list[str]:
    lists = {name: record[name] for name in [n for n in record if isinstance(record[n], list)][:_MAX_TABLE_COLUMNS]}
    parts = []
    matrices = {name for name, value in lists.items() if value and all(isinstance(row, list) for row in value)}
    columns = {name: value for name, value in lists.items() if name not in matrices}
    if columns:
        num_rows = min(_MAX_TABLE_ROWS, max(map(len, columns.values())))
        cell_rows = ([value_html(v[at]) if at < len(v) else "" for v in columns.values()] for at in range(num_rows))
        rows = [[_class_label_html(at, class_names), *row] for at, row in enumerate(cell_rows)]
        parts += [f"<h2>Classes{when}</h2>", table_html(["class", *columns], rows)]
        for name, value in columns.items() if num_rows > _MAX_CLASSES_WITHOUT_PLOT else ():
            if points := [(float(at), y) for at, y in enumerate(value[:_MAX_TABLE_ROWS]) if is_plottable(y)]:
                parts.append(line_plot_svg(name, {name: points}, points_only=True, x_label="class"))
    for name, value in lists.items():
        if name not in columns:
            parts += [
                f"<h2>{escape_html(name.replace('_', ' ').capitalize())}{when}</h2>"
                "<p>Rows: true classes. Columns: predicted classes.</p>",
                _confusion_matrix_html([row[:_MAX_TABLE_COLUMNS] for row in value[:_MAX_TABLE_COLUMNS]], class_names),
            ]
    return parts


def _supervision_events_html(folder: Path) -> list[str]:
    """Return a table of the events of a supervised run; nothing if the only events are its start and end."""
    events = [event for event in read_events(folder) if event["event"] != "run"][-_MAX_TABLE_ROWS:]
    if all(event["event"] in ("start", "end") for event in events):
        return []
    rows = []
    for event in events:
        rest = {name: value for name, value in event.items() if name not in ("time", "event", "generation", "ranks")}
        details = "; ".join(f"{name}: {_event_text(item)}" for name, item in rest.items() if item not in (None, [], {}))
        cells = [value_html(event.get(name)) for name in ("time", "generation", "event", "ranks")]
        rows.append([*cells, escape_html(details)])
    return ["<h2>Generations</h2>", table_html(["time", "generation", "event", "ranks", ""], rows)]


def _event_text(value: Any) -> str:
    """Return a value of an event as text: a number, a list, or a mapping such as ranks by host."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _worst_samples_html(samples: Mapping[str, np.ndarray], class_names: Sequence[str], width: int = 128) -> list[str]:
    """Return pictures of the samples with the largest losses."""
    labels, preds = samples["label"], samples["prediction"]
    dense = labels.ndim == 3
    parts = ["<h2>Samples with the largest losses</h2>"]
    if dense:
        image = "Middle slice of the volume" if samples["volume"].any() else "Image"
        parts += [f"<p>{image}, target, prediction.</p>", *_class_legend_html(class_names, labels, preds)]
    min_w = 3 * width + 8 if dense else max(width, 160)
    parts += [f"<div class='samples' style='grid-template-columns:repeat(auto-fill,minmax(min(100%,{min_w}px),1fr))'>"]
    for at, (sample, loss, image) in enumerate(zip(samples["sample"], samples["loss"], samples["image"], strict=True)):
        target, prediction = ("",) * 2 if dense else (_format_target(y[at], class_names) for y in (labels, preds))
        target_text = "" if dense else f": target {target}, prediction {prediction}"
        maps: Iterable[np.ndarray] = _colour_classes(np.stack([labels[at], preds[at]])) if dense else ()
        alts = f"image {int(sample)}", "target", "prediction"
        pictures = (
            image_html(alt, encode_png(pixels), width=width) for alt, pixels in zip(alts, (image, *maps), strict=False)
        )
        caption = f"sample {int(sample)}{target_text}; loss {float(loss):.4g}"
        parts.append(f"<figure><div class='row'>{''.join(pictures)}</div><figcaption>{caption}</figcaption></figure>")
    return [*parts, "</div>"]


def _class_legend_html(class_names: Sequence[str], *maps: np.ndarray) -> list[str]:
    """Return a legend of the classes in `maps`; nothing if the maps do not contain classes."""
    if any(class_map.dtype.kind not in "iu" for class_map in maps):
        return []
    classes = sorted({int(number) for class_map in maps for number in np.unique(class_map)})[:_MAX_TABLE_COLUMNS]
    colours = _colour_classes(np.array(classes))
    entries = (
        f"<span class='key'><svg width='11' height='11'><rect width='11' height='11' fill='rgb({r},{g},{b})'/></svg>"
        f" {_class_label_html(number, class_names)}</span>"
        for number, (r, g, b) in zip(classes, colours.tolist(), strict=True)
    )
    return [f"<p>Classes: {''.join(entries)}</p>"]


def _read_worst_samples(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a worst.npz; raise DataError if they are not those that a run writes."""
    with convert_read_errors(path), open_regular(path, path.parent) as file:
        with zipfile.ZipFile(file) as archive:
            unpacked_bytes = sum(member.file_size for member in archive.infolist())
        if unpacked_bytes > _MAX_PICTURE_BYTES:
            raise DataError(f"{path}: unpacks to {unpacked_bytes:,} bytes, more than any run writes; remove the file")
        file.seek(0)
        with np.load(file) as arrays:
            array_by_name = {name: arrays[name] for name in _WORST_SAMPLES_ARRAYS}
    sample, loss, image, label, prediction, volume = array_by_name.values()
    if (
        sample.ndim != 1
        or loss.ndim != 1
        or len({len(array) if array.ndim else 0 for array in array_by_name.values()}) != 1
        or image.ndim not in (3, 4)
        or image.shape[3:] not in ((), (1,), (3,))
        or image.dtype != np.uint8
        or sample.dtype.kind not in "iu"
        or loss.dtype.kind not in "iuf"
        or (volume.ndim, volume.dtype.kind) != (1, "b")
        or not {label.dtype.kind, prediction.dtype.kind} <= {*"iuf"}
        or (label.ndim == 3 and (label.shape != prediction.shape or not label.size))
        or sample.size > _MAX_TABLE_COLUMNS
    ):
        raise DataError(f"{path}: its arrays are not the worst samples of a run; remove the file")
    return array_by_name


def _format_target(value: np.ndarray, class_names: Sequence[str]) -> str:
    """Return the label of a class, or up to four numbers of another target."""
    if value.ndim == 0 and value.dtype.kind in "iu":
        return _class_label_html(int(value), class_names)
    return ", ".join(value_html(number) for number in np.ravel(value)[:4].tolist())


def _colour_classes(maps: np.ndarray) -> np.ndarray:
    """Return RGB maps (n, h, w, 3): classes in their colours, other numbers in grey."""
    if maps.dtype.kind in "iu":
        classes, class_indices = np.unique(maps, return_inverse=True)
        colours = np.array([*class_colours(_COLOURED_CLASS_COUNT), _OTHER_CLASS_COLOUR], np.uint8)
        colour_indices = np.where((classes >= 0) & (classes < _COLOURED_CLASS_COUNT), classes, _COLOURED_CLASS_COUNT)
        return colours[colour_indices][class_indices.reshape(maps.shape)]
    maps = np.nan_to_num(maps.astype(np.float64))
    low, high = maps.min(), maps.max()
    with np.errstate(all="ignore"):
        return np.repeat((255 * (maps - low) / (high - low or 1)).astype(np.uint8)[..., None], 3, axis=-1)


def _class_label_html(number: int, class_names: Sequence[str]) -> str:
    """Return the name of a class for HTML, or its number if it has none."""
    return escape_html(class_names[number]) if 0 <= number < len(class_names) else str(number)


def _confusion_matrix_html(counts: Sequence[Sequence[Any]], class_names: Sequence[str]) -> str:
    rows = []
    for at, row in enumerate(counts):
        total = sum(abs(float(n)) for n in row if is_plottable(n)) or 1
        shades = (0.6 * abs(float(n)) / total if is_plottable(n) else 0 for n in row)
        cells = (
            f"<td style='background:rgba(31,119,180,{shade:.3f})'>{value_html(n)}</td>"
            for n, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr><th>{_class_label_html(at, class_names)}</th>{''.join(cells)}</tr>")
    header_cells = "".join(f"<th>{_class_label_html(at, class_names)}</th>" for at in range(len(counts)))
    return scrollable_html(f"<table class='matrix'><tr><th></th>{header_cells}</tr>{''.join(rows)}</table>")
