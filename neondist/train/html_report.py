"""report.html: results of a run on one self-contained page."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..formats.base import faults
from ..formats.class_colours import class_colours
from ..io.files import reason
from ..io.generation_log import read_events
from ..io.regular_file import open_regular, read_bytes
from .job_report import describe_job
from .page import SPLIT_COLOURS, format_value, is_number, page, picture, png, safe, scrolled, table, text
from .state import Record
from .svg_plot import plot

_PICTURES = ("tiles.png",)  # curves are drawn from the records
_ROWS, _COLUMNS, _DEPTH = 5000, 100, 5
"""the most of a table that is shown, and how deep lists of a record are nested"""
_FEW_CLASSES = 20
"""classes up to which a table needs no plot beside it"""
_CLASSES, _NO_CLASS = 255, (128, 128, 128)
"""classes with a colour each, and that of others, such as cells that are ignored"""
_LARGEST = 1 << 27  # bytes of a picture, or of arrays
_COSTS = {"seconds": "training time (s)", "samples_per_second": "samples/s", "bytes_sent": "halo bytes sent, all ranks",
          "bytes_summed": "bytes summed, all ranks"}  # fmt: skip


def report(folder: Path) -> str:
    """Return the page about the run in a folder.

    Raises
    ------
    DataError
        There is no run, or its metrics.jsonl cannot be read.
    """
    records = read_records(folder / "metrics.jsonl")
    last = records[-1]
    numbers = {name for record in records for name, value in record.items() if is_number(value)}
    metrics = sorted(numbers - {"epoch", "step", *_COSTS})[:_COLUMNS]
    shown = records[-_ROWS:]
    pictures = [folder / name for name in _PICTURES if (folder / name).is_file()]
    return page(folder.resolve().name, [
        *_headline(records),
        f"<p>{last['epoch']} epochs, {format_value(last.get('step', '?'))} steps. Source: metrics.jsonl.</p>",
        "<h2>Curves</h2>",
        *(plot(base, _lines(base, metrics, records), along="epoch") for base in dict.fromkeys(map(_base, metrics))),
        "<h2>Epochs</h2>",
        table(["epoch", *metrics], [[format_value(one.get(name)) for name in ("epoch", *metrics)] for one in shown]),
        *_of_classes(last),
        *(_worst(_arrays(folder / "worst.npz")) if (folder / "worst.npz").is_file() else []),
        "<h2>Time and bytes</h2>",
        table(["epoch", *_COSTS.values()], [[format_value(r.get(name)) for name in ("epoch", *_COSTS)] for r in shown]),
        *describe_job(folder, shown),
        *_of_generations(folder),
        *(f"<h2>{path.name}</h2>{picture(path.name, read_bytes(path, _LARGEST, folder))}" for path in pictures),
        *(text(folder / name) for name in ("experiment.yaml", "environment.json") if (folder / name).is_file()),
    ])  # fmt: skip


def _headline(records: Sequence[Record]) -> list[str]:
    """Return the lowest error, or loss, of the split by which settings are chosen, and its epoch."""
    for number in ("error", "loss"):
        split = records[-1].selection
        known = [(r[key], r["epoch"]) for r in records if is_number(r.get(key := f"{split}_{number}"))]
        if known:
            value, epoch = min(known)
            return [f"<p class='lead'>Lowest {split} {number}: {_shown(number, value)}, epoch {epoch}</p>"]
    return []


def page_of_numbers(
    name: str, of: Mapping[str, str], found: Mapping[str, Any], samples: Mapping[str, np.ndarray] | None = None
) -> str:
    """Return a page of what `neondist evaluate` has found.

    Parameters
    ----------
    of : mapping
        The checkpoint, and what it was evaluated on, by name.
    samples : mapping, optional
        Pictures, as `worst_samples` returns them.
    """
    numbers = {**of, **{name: value for name, value in found.items() if not isinstance(value, list)}}
    rows = [[safe(name), format_value(value)] for name, value in numbers.items()]
    parts = [*_result(found), table((), rows), *_of_classes(found, "")]
    return page(f"Evaluation of {name}", parts + (_worst(samples, 256) if samples else []))


def _result(found: Mapping[str, Any]) -> list[str]:
    """Return the error, or the loss, as the headline of an evaluation."""
    number = next((one for one in ("error", "loss") if is_number(found.get(one))), None)
    if number is None:
        return []
    split = found.get("split")
    name = f"{split} {number}".capitalize() if isinstance(split, str) else number.capitalize()
    return [f"<p class='lead'>{safe(name)}: {_shown(number, found[number])}</p>"]


def _shown(number: str, value: float) -> str:
    return f"{100 * value:.4g} %" if number == "error" else format_value(value)


def read_records(path: Path, continued: bool = False) -> list[Record]:
    """Return the records of a metrics.jsonl; DataError if there are none, or one cannot be read.

    Parameters
    ----------
    continued : bool
        The log is to be continued: it may be missing or empty, and an unfinished last line is left out.
    """
    if continued and not path.exists():
        return []
    try:
        text = read_bytes(path, root=path.parent).decode()
        lines = text.split("\n")[:-1] if continued else text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); name the folder of a run") from None
    found = []
    for at, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not _is_epoch(values.get("epoch")) or not _is_flat(values, _DEPTH):
            raise DataError(f"{path}:{at}: is not a record of an epoch; remove the line, or continue with --resume")
        found.append(Record.of(values))
    if not found and not continued:
        raise DataError(f"{path}: no epoch is complete yet; wait for the first")
    return found


def _is_epoch(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_flat(value: Any, depth: int) -> bool:
    """Return whether nothing is nested deeper than a record's lists are."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_flat(one, depth - 1) for one in inside)


def _base(name: str) -> str:
    """Return 'loss' of 'train_loss': what one picture shows of all splits."""
    split, _, rest = name.partition("_")
    return rest if split in SPLIT_COLOURS and rest else name


def _lines(base: str, metrics: Sequence[str], records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Return a number over the epochs by split; one that names no split is that of the test split beside others."""
    named = {f"{split}_{base}": split for split in SPLIT_COLOURS if f"{split}_{base}" in metrics}
    if base in metrics:
        named[base] = "test" if named else base
    return {split: [(r["epoch"], r[name]) for r in records if is_number(r.get(name))] for name, split in named.items()}


def _of_classes(record: Mapping[str, Any], when: str = ", last epoch") -> list[str]:
    """Return tables of what a record has of each class."""
    lists = {name: record[name] for name in [n for n in record if isinstance(record[n], list)][:_COLUMNS]}
    parts = []
    matrices = {name for name, value in lists.items() if value and all(isinstance(one, list) for one in value)}
    columns = {name: value for name, value in lists.items() if name not in matrices}
    if columns:
        count = min(_ROWS, max(map(len, columns.values())))
        rows = [
            [str(at), *(format_value(value[at]) if at < len(value) else "" for value in columns.values())]
            for at in range(count)
        ]
        parts += [f"<h2>Classes{when}</h2>", table(["class", *columns], rows)]
        for name, value in columns.items() if count > _FEW_CLASSES else ():
            if points := [(float(at), one) for at, one in enumerate(value[:_ROWS]) if is_number(one)]:
                parts.append(plot(name, {name: points}, dots=True, along="class"))
    for name, value in lists.items():
        if name not in columns:
            parts += [
                f"<h2>{safe(name.replace('_', ' ').capitalize())}{when}</h2>"
                "<p>Rows: true classes. Columns: predicted classes.</p>",
                _matrix([row[:_COLUMNS] for row in value[:_COLUMNS]]),
            ]
    return parts


def _of_generations(folder: Path) -> list[str]:
    """Return a table of the events of a supervised run; nothing where there was none but its start and its end."""
    events = [one for one in read_events(folder) if one["event"] != "run"][-_ROWS:]
    if all(one["event"] in ("start", "end") for one in events):
        return []
    rows = []
    for one in events:
        rest = {name: value for name, value in one.items() if name not in ("time", "event", "generation", "ranks")}
        what = "; ".join(f"{name}: {_in_words(value)}" for name, value in rest.items() if value not in (None, [], {}))
        rows.append([format_value(one.get(name)) for name in ("time", "generation", "event", "ranks")] + [safe(what)])
    return ["<h2>Generations</h2>", table(["time", "generation", "event", "ranks", ""], rows)]


def _in_words(value: Any) -> str:
    """Return a value of an event: text, a number, a list, or a table such as ranks by host."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _worst(found: Mapping[str, np.ndarray], width: int = 128) -> list[str]:
    """Return pictures of the samples with the largest losses."""
    label, said = found["label"], found["said"]
    dense = label.ndim == 3
    parts = ["<h2>Samples with the largest losses</h2>"]
    if dense:
        parts += ["<p>Image (middle slice of a volume), target, prediction.</p>", *_key(label, said)]
    least = 3 * width + 8 if dense else max(width, 160)
    parts += [f"<div class='samples' style='grid-template-columns:repeat(auto-fill,minmax(min(100%,{least}px),1fr))'>"]
    for at, (sample, loss, image) in enumerate(zip(found["sample"], found["loss"], found["image"], strict=True)):
        words = "" if dense else f": target {_few(label[at])}, prediction {_few(said[at])}"
        maps: Iterable[np.ndarray] = _coloured(np.stack([label[at], said[at]])) if dense else ()
        alts = f"image {int(sample)}", "target", "prediction"
        pictures = (picture(alt, png(each), width=width) for alt, each in zip(alts, (image, *maps), strict=False))
        caption = f"sample {int(sample)}{words}; loss {float(loss):.4g}"
        parts.append(f"<figure><div class='row'>{''.join(pictures)}</div><figcaption>{caption}</figcaption></figure>")
    return [*parts, "</div>"]


def _key(*maps: np.ndarray) -> list[str]:
    """Return the colours of the classes in some maps."""
    if any(one.dtype.kind not in "iu" for one in maps):
        return []
    classes = sorted({int(number) for one in maps for number in np.unique(one)})[:_COLUMNS]
    colours = _coloured(np.array(classes))
    named = (
        f"<span class='key'><svg width='11' height='11'><rect width='11' height='11' fill='rgb({r},{g},{b})'/></svg>"
        f" {number}</span>"
        for number, (r, g, b) in zip(classes, colours.tolist(), strict=True)
    )
    return [f"<p>Classes: {''.join(named)}</p>"]


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a worst.npz; DataError if they are not what a run writes."""
    with faults(path), open_regular(path, path.parent) as file:
        with zipfile.ZipFile(file) as archive:
            size = sum(one.file_size for one in archive.infolist())
        if size > _LARGEST:
            raise DataError(f"{path}: unpacks to {size:,} bytes, more than any run writes; remove it")
        file.seek(0)
        with np.load(file) as arrays:
            found = {name: arrays[name] for name in ("sample", "loss", "image", "label", "said")}
    sample, loss, image, label, said = found.values()
    if (
        sample.ndim != 1
        or loss.ndim != 1
        or len({len(one) if one.ndim else 0 for one in found.values()}) != 1
        or image.ndim not in (3, 4)
        or image.shape[3:] not in ((), (1,), (3,))
        or image.dtype != np.uint8
        or sample.dtype.kind not in "iu"
        or loss.dtype.kind not in "iuf"
        or not {label.dtype.kind, said.dtype.kind} <= {*"iuf"}
        or (label.ndim == 3 and (label.shape != said.shape or not label.size))
        or sample.size > _COLUMNS
    ):
        raise DataError(f"{path}: its arrays are not the worst samples of a run; remove it")
    return found


def _few(value: np.ndarray) -> str:
    """Return a class, or up to four numbers."""
    return ", ".join(format_value(number) for number in np.ravel(value)[:4].tolist())


def _coloured(maps: np.ndarray) -> np.ndarray:
    """Return colours (n, h, w, 3) of classes; numbers are grey."""
    if maps.dtype.kind in "iu":
        known, places = np.unique(maps, return_inverse=True)
        colours = np.array([*class_colours(_CLASSES), _NO_CLASS], np.uint8)
        chosen = np.where((known >= 0) & (known < _CLASSES), known, _CLASSES)
        return colours[chosen][places.reshape(maps.shape)]
    maps = np.nan_to_num(maps.astype(np.float64))
    low, high = maps.min(), maps.max()
    with np.errstate(all="ignore"):
        return np.repeat((255 * (maps - low) / (high - low or 1)).astype(np.uint8)[..., None], 3, axis=-1)


def _matrix(counts: Sequence[Sequence[Any]]) -> str:
    rows = []
    for at, row in enumerate(counts):
        total = sum(abs(float(n)) for n in row if is_number(n)) or 1
        shades = (0.6 * abs(float(n)) / total if is_number(n) else 0 for n in row)
        cells = (
            f"<td style='background:rgba(31,119,180,{shade:.3f})'>{format_value(n)}</td>"
            for n, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr><th>{at}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{at}</th>" for at in range(len(counts)))
    return scrolled(f"<table class='matrix'><tr><th></th>{head}</tr>{''.join(rows)}</table>")
