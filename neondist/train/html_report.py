"""report.html: what a run has done, on one page that needs no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import DataError
from .state import Record

_PICTURES = ("curves.png", "tiles.png")
_WIDTH, _HEIGHT = 420, 220
_COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")
_SPLITS = ("train", "validation", "test")
_COSTS = {"seconds": "s of training", "samples_per_second": "samples/s", "bytes_sent": "bytes of halos, all ranks",
          "bytes_summed": "bytes given into sums, all ranks"}  # fmt: skip
_STYLE = """body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.2em .7em;border:1px solid #ccc;text-align:right}
figure{display:inline-block;margin:0 1.5em 1em 0}figcaption{font-weight:bold}
pre{background:#f6f6f6;padding:1em;overflow:auto}
img{max-width:100%}"""


def report(folder: Path) -> str:
    """Return the page about the run in a folder.

    Raises
    ------
    DataError
        There is no run, or its metrics.jsonl cannot be read.
    """
    records = _records(folder / "metrics.jsonl")
    last = records[-1]
    numbers = {name for record in records for name, value in record.items() if _is_number(value)}
    metrics = sorted(numbers - {"epoch", "step", *_COSTS})
    parts = [
        f"<h1>{escape(folder.resolve().name)}</h1>",
        f"<p>{last['epoch']} epochs, {last.get('step', '?')} steps; from records of metrics.jsonl.</p>",
        "<h2>Curves</h2>",
        *(_curve(base, _named(base, metrics), records) for base in dict.fromkeys(map(_base, metrics))),
        "<h2>Epochs</h2>",
        _table(["epoch", *metrics], [[_told(record.get(name)) for name in ("epoch", *metrics)] for record in records]),
        *_of_classes(last),
        "<h2>Time and bytes</h2>",
        _table(["epoch", *_COSTS.values()], [[_told(r.get(name)) for name in ("epoch", *_COSTS)] for r in records]),
        *(_picture(folder / name) for name in _PICTURES if (folder / name).is_file()),
        *(_text(folder / name) for name in ("experiment.yaml", "environment.json") if (folder / name).is_file()),
    ]
    head = f"<!doctype html><meta charset='utf-8'><title>{escape(folder.resolve().name)}</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "\n"


def _records(path: Path) -> list[Record]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); name the folder of a run") from None
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


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _base(name: str) -> str:
    """Return 'loss' of 'train_loss': what one picture shows of all splits."""
    split, _, rest = name.partition("_")
    return rest if split in _SPLITS and rest else name


def _named(base: str, metrics: Sequence[str]) -> list[str]:
    return [name for name in metrics if _base(name) == base]


def _told(value: Any) -> str:
    if _is_number(value):
        return f"{value:,}" if type(value) is int else f"{value:.5g}"
    return "" if value is None else escape(str(value))


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _curve(title: str, names: Sequence[str], records: Sequence[Record]) -> str:
    """Return a picture of some numbers over the epochs."""
    lines = {name: [(r["epoch"], r[name]) for r in records if _is_number(r.get(name))] for name in names}
    points = [point for line in lines.values() for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        right = (x - first) / (last - first or 1) * (_WIDTH - 70) + 55
        down = _HEIGHT - 30 - (y - low) / (high - low or 1) * (_HEIGHT - 50)
        return f"{right:.1f},{down:.1f}"

    drawn = []
    for at, (name, line) in enumerate(lines.items()):
        colour, spots = _COLOURS[at % len(_COLOURS)], [place(*point) for point in line]
        dots = spots if len(spots) <= 40 else []
        drawn.append(f"<polyline points='{' '.join(spots)}' fill='none' stroke='{colour}' stroke-width='2'/>")
        drawn += ["<circle cx='{}' cy='{}' r='3' fill='{}'/>".format(*spot.split(","), colour) for spot in dots]
        drawn.append(f"<text x='{60 + 110 * at}' y='14' fill='{colour}' font-size='12'>{escape(name)}</text>")
    ends = [(4, _HEIGHT - 26, low), (4, 28, high), (52, _HEIGHT - 8, first), (_WIDTH - 30, _HEIGHT - 8, last)]
    drawn += [f"<text x='{x}' y='{y}' font-size='11'>{_told(value)}</text>" for x, y, value in ends]
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'>{''.join(drawn)}</svg></figure>"
    )


def _of_classes(record: Record) -> list[str]:
    """Return tables of what the last epoch has of each class."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    parts = []
    columns = {name: value for name, value in lists.items() if not any(isinstance(one, list) for one in value)}
    if columns:
        count = max(map(len, columns.values()))
        rows = [
            [str(at), *(_told(value[at]) if at < len(value) else "" for value in columns.values())]
            for at in range(count)
        ]
        parts += ["<h2>Classes, last epoch</h2>", _table(["class", *columns], rows)]
    for name, value in lists.items():
        if name not in columns:
            parts += [
                f"<h2>{escape(name)}, last epoch</h2><p>Rows: what is; columns: what was said.</p>",
                _matrix(value),
            ]
    return parts


def _matrix(table: Sequence[Sequence[Any]]) -> str:
    rows = []
    for at, row in enumerate(table):
        total = sum(n for n in row if _is_number(n)) or 1
        shades = (0.6 * n / total if _is_number(n) else 0 for n in row)
        cells = (
            f"<td style='background:rgba(31,119,180,{shade:.3f})'>{_told(n)}</td>"
            for n, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr><th>{at}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{at}</th>" for at in range(len(table)))
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<h2>{escape(path.name)}</h2><img alt='{escape(path.name)}' src='data:image/png;base64,{data}'>"


def _text(path: Path) -> str:
    return f"<h2>{escape(path.name)}</h2><pre>{escape(path.read_text('utf-8', errors='replace'))}</pre>"
