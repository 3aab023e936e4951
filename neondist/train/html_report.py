"""report.html: what a run has done, on one page that needs no other file."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..io.files import reason
from .page import is_number, page, picture, plot, png, table, text, told
from .state import Record

_PICTURES = ("curves.png", "tiles.png")
_SPLITS = ("train", "validation", "test")
_COSTS = {"seconds": "s of training", "samples_per_second": "samples/s", "bytes_sent": "bytes of halos, all ranks",
          "bytes_summed": "bytes given into sums, all ranks"}  # fmt: skip


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
    metrics = sorted(numbers - {"epoch", "step", *_COSTS})
    pictures = [folder / name for name in _PICTURES if (folder / name).is_file()]
    return page(folder.resolve().name, [
        f"<p>{last['epoch']} epochs, {last.get('step', '?')} steps; from records of metrics.jsonl.</p>",
        "<h2>Curves</h2>",
        *(plot(base, _lines(base, metrics, records)) for base in dict.fromkeys(map(_base, metrics))),
        "<h2>Epochs</h2>",
        table(["epoch", *metrics], [[told(record.get(name)) for name in ("epoch", *metrics)] for record in records]),
        *_of_classes(last),
        *_worst(folder / "worst.npz"),
        "<h2>Time and bytes</h2>",
        table(["epoch", *_COSTS.values()], [[told(r.get(name)) for name in ("epoch", *_COSTS)] for r in records]),
        *(f"<h2>{path.name}</h2>{picture(path.name, path.read_bytes())}" for path in pictures),
        *(text(folder / name) for name in ("experiment.yaml", "environment.json") if (folder / name).is_file()),
    ])  # fmt: skip


def page_of_numbers(name: str, of: Mapping[str, str], found: Mapping[str, Any]) -> str:
    """Return a page of what `neondist evaluate` has found; `of`: what it is about, by name."""
    numbers = {**of, **{name: value for name, value in found.items() if not isinstance(value, list)}}
    rows = [[escape(name), told(value)] for name, value in numbers.items()]
    return page(name, [table(["", ""], rows), *_of_classes(found, "")])


def read_records(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl; DataError if there are none, or one cannot be read."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); name the folder of a run") from None
    found = []
    for at, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or type(values.get("epoch")) is not int:
            raise DataError(f"{path}:{at}: is no record of an epoch; remove the line, or go on by --resume")
        found.append(Record.of(values))
    if not found:
        raise DataError(f"{path}: has no epoch yet; wait for the first")
    return found


def _base(name: str) -> str:
    """Return 'loss' of 'train_loss': what one picture shows of all splits."""
    split, _, rest = name.partition("_")
    return rest if split in _SPLITS and rest else name


def _lines(base: str, metrics: Sequence[str], records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Return some numbers over the epochs."""
    named = [name for name in metrics if _base(name) == base]
    return {name: [(r["epoch"], r[name]) for r in records if is_number(r.get(name))] for name in named}


def _of_classes(record: Mapping[str, Any], when: str = ", last epoch") -> list[str]:
    """Return tables of what a record has of each class."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    parts = []
    columns = {name: value for name, value in lists.items() if not any(isinstance(one, list) for one in value)}
    if columns:
        count = max(map(len, columns.values()))
        rows = [
            [str(at), *(told(value[at]) if at < len(value) else "" for value in columns.values())]
            for at in range(count)
        ]
        parts += [f"<h2>Classes{when}</h2>", table(["class", *columns], rows)]
    for name, value in lists.items():
        if name not in columns:
            parts += [
                f"<h2>{escape(name)}{when}</h2><p>Rows: what is; columns: what was said.</p>",
                _matrix(value),
            ]
    return parts


def _worst(path: Path) -> list[str]:
    """Return pictures of the samples with the largest loss, if the run has come to its end."""
    if not path.is_file():
        return []
    try:
        with np.load(path) as file:
            found = {name: file[name] for name in ("sample", "loss", "image", "label", "said")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); remove it") from None
    dense = found["label"].ndim == 3
    parts = ["<h2>Largest losses</h2>"]
    if dense:
        parts += ["<p>The image (of a volume the middle slice), its labels, and what was said.</p>"]
    for sample, loss, *shown in zip(*found.values(), strict=True):
        words = "" if dense else f": {_few(shown[1])}, said {_few(shown[2])}"
        maps: Iterable[np.ndarray] = _coloured(np.stack(shown[1:])) if dense else ()
        pictures = (picture("", png(each), width=128) for each in (shown[0], *maps))
        parts.append(f"<figure>{''.join(pictures)}<figcaption>{sample}{words}; loss {loss:.4g}</figcaption></figure>")
    return parts


def _few(value: np.ndarray) -> str:
    """Return a class, or up to four numbers."""
    return ", ".join(told(number) for number in np.ravel(value)[:4].tolist())


def _coloured(maps: np.ndarray) -> np.ndarray:
    """Return colours (n, h, w, 3) of classes; numbers are grey."""
    if maps.dtype.kind in "iu":
        return (maps[..., None] * np.array([97, 57, 151]) % 256).astype(np.uint8)  # neighbours are far apart
    low, high = maps.min(), maps.max()
    return np.repeat((255 * (maps - low) / (high - low or 1)).astype(np.uint8)[..., None], 3, axis=-1)


def _matrix(counts: Sequence[Sequence[Any]]) -> str:
    rows = []
    for at, row in enumerate(counts):
        total = sum(n for n in row if is_number(n)) or 1
        shades = (0.6 * n / total if is_number(n) else 0 for n in row)
        cells = (
            f"<td style='background:rgba(31,119,180,{shade:.3f})'>{told(n)}</td>"
            for n, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr><th>{at}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{at}</th>" for at in range(len(counts)))
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
