"""What pages about runs are made of: tables and pictures, in one file that needs no other."""

from __future__ import annotations

import base64
import math
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..console import visible
from ..io.regular_file import read_bytes

_LARGEST = sys.float_info.max / 4  # so that differences are finite
_MOST_TEXT = 1 << 22  # bytes
_WIDTH, _HEIGHT = 420, 220
_FAR_APART = 20  # largest over smallest value from which an axis is logarithmic
_NEAR = 2  # from which one that is not begins at 0
_BEST = "#d62728"
_COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")
_STYLE = """body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.2em .7em;border:1px solid #ccc;text-align:right}
figure{display:inline-block;margin:0 1.5em 1em 0;max-width:100%}figcaption{font-weight:bold}
pre{background:#f6f6f6;padding:1em;overflow:auto}
img,svg{max-width:100%;height:auto}img{image-rendering:pixelated;margin-right:4px}.wide{overflow-x:auto}.lead{font-size:1.3em;font-weight:bold}
.key{font-weight:normal;font-size:12px;margin-right:1em;white-space:nowrap}"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return the page."""
    head = (
        f"<!doctype html><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{safe(title)}</title><style>{_STYLE}</style>"
    )
    return head + "\n".join([f"<h1>{safe(title)}</h1>", *parts]) + "\n"


def is_number(value: Any) -> bool:
    """Tell whether something can be drawn."""
    return type(value) in (int, float) and abs(value) <= _LARGEST


def axis_range(values: Sequence[float]) -> tuple[float, float, bool]:
    """Return the ends of an axis for some values, and whether it is logarithmic: where they are positive and far apart.

    Other axes begin at 0 unless values are negative or vary little.
    """
    low, high = min(values), max(values)
    powers = low > 0 and _FAR_APART * low < high
    return (0.0 if not powers and 0 <= _NEAR * low <= high else low), high, powers


def told(value: Any) -> str:
    """Return a value as tables show it."""
    if is_number(value):
        return f"{value:,}" if type(value) is int else f"{value:.5g}"
    return "" if value is None else safe(str(value))


def safe(text: str, most: int = 200) -> str:
    """Return foreign text as HTML shows it: escaped, characters that cannot be seen by their numbers, and not long."""
    shown = visible(text[:most], keep="\n\t")
    return escape(shown + " [...]" * (len(text) > most))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of what `told` gives."""
    lines = ["<tr>" + "".join(f"<th>{safe(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return scrolled(f"<table>{''.join(lines)}</table>")


def scrolled(content: str) -> str:
    """Return content that scrolls by itself where the window is narrower."""
    return f"<div class='wide'>{content}</div>"


def plot(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    dots: bool = False,
    powers: bool = False,
    best: tuple[float, float] | None = None,
) -> str:
    """Return a picture of points (x, y) by the names of lines.

    Parameters
    ----------
    dots : bool
        Points are not joined.
    powers : bool
        The axis of x is logarithmic. Whether that of y is, `axis_range` says.
    best : (x, y), optional
        A point to mark.
    """
    points = [point for line in lines.values() for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high, far = axis_range([y for _, y in points])
    across, upwards = math.log if powers else float, math.log if far else float
    bottom, top = upwards(low), upwards(high)

    def place(x: float, y: float) -> tuple[str, str]:
        right = (across(x) - across(first)) / (across(last) - across(first) or 1) * (_WIDTH - 70) + 55
        down = _HEIGHT - 30 - (upwards(y) - bottom) / (top - bottom or 1) * (_HEIGHT - 50)
        return f"{right:.1f}", f"{down:.1f}"

    drawn, keys = [], []
    for at, (name, line) in enumerate(lines.items()):
        colour, spots = _COLOURS[at % len(_COLOURS)], [place(*point) for point in line]
        if not dots:
            joined = " ".join(map(",".join, spots))
            drawn.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='2'/>")
        if dots or len(spots) <= 40:
            drawn += [f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'/>" for x, y in spots]
        keys.append(f"<span class='key' style='color:{colour}'>{safe(name)}</span>")
    if scaled := [axis for axis, on in (("x", powers), ("y", far)) if on]:
        keys.append(f"<span class='key'>logarithmic: {', '.join(scaled)}</span>")
    if best is not None:
        x, y = place(*best)
        drawn.append(f"<circle cx='{x}' cy='{y}' r='7' fill='none' stroke='{_BEST}' stroke-width='2'/>")
        keys.append(f"<span class='key' style='color:{_BEST}'>best: {told(best[1])} at {told(best[0])}</span>")
    ends = [(4, _HEIGHT - 26, low), (4, 28, high), (52, _HEIGHT - 8, first), (_WIDTH - 30, _HEIGHT - 8, last)]
    drawn += [f"<text x='{x}' y='{y}' font-size='11'>{told(value)}</text>" for x, y, value in ends]
    return (
        f"<figure><figcaption>{safe(title)}<div>{''.join(keys)}</div></figcaption>"
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>"
        f"{''.join(drawn)}</svg></figure>"
    )


def picture(title: str, png: bytes, **attributes: object) -> str:
    """Return an image."""
    more = "".join(f" {name}='{escape(str(value))}'" for name, value in attributes.items())
    return f"<img alt='{safe(title)}'{more} src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of uint8 (h, w), (h, w, 1) or (h, w, 3)."""
    height, width, colours = (*pixels.shape, 1)[:3]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with its filter, which is none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">2I5B", width, height, 8, 2 if colours == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def text(path: Path) -> str:
    """Return the text of a file of a run."""
    content = read_bytes(path, _MOST_TEXT, path.parent).decode("utf-8", errors="replace")
    return f"<h2>{safe(path.name)}</h2><pre>{safe(content, _MOST_TEXT)}</pre>"
