"""Building blocks of self-contained HTML pages about runs: tables, images, text."""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..io.regular_file import read_bytes
from ..terminal.console import escape_invisible

_MAX_PLOTTED_VALUE = sys.float_info.max / 4  # so that differences are finite
_MAX_TEXT_FILE_BYTES = 1 << 22
_MIN_LOGARITHMIC_AXIS_RATIO = 20  # ratio of the largest to the smallest value above which an axis is logarithmic
_MIN_ZERO_BASED_AXIS_RATIO = 2  # ratio at or above which a linear axis begins at 0
SPLIT_COLOURS = {"train": "#1f77b4", "validation": "#2ca02c", "test": "#ff7f0e"}
_STYLE_SHEET = """body{font:15px/1.4 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
h1,h2,h3{line-height:1.2;overflow-wrap:anywhere}h2{margin-top:1.6em}
table{border-collapse:collapse}td,th{padding:.2em .7em;border:1px solid #ccc;text-align:right}
td.text{text-align:left}th.group{text-align:center}
figure{display:inline-block;vertical-align:top;margin:0 .8em 1em 0;max-width:100%}
pre{background:#f6f6f6;padding:1em;overflow:auto}img,svg{max-width:100%;height:auto}
.samples{display:grid;gap:1em}.samples figure{margin:0}.row{display:flex;gap:4px;align-items:flex-start}
.row img{image-rendering:pixelated;min-width:0}.lead{font-size:1.3em;font-weight:bold}
.key{font-size:13px;margin-right:1em;white-space:nowrap}
.wide{overflow-x:auto;margin:.5em 0;background:linear-gradient(90deg,#fff 2em,#fff0) 0/4em 100% no-repeat local,
linear-gradient(270deg,#fff 2em,#fff0) 100%/4em 100% no-repeat local,
linear-gradient(90deg,#0003,#0000) 0/.8em 100% no-repeat,linear-gradient(270deg,#0003,#0000) 100%/.8em 100% no-repeat}
@media(max-width:500px){body{margin:1em auto}h1{font-size:1.6em}.lead{font-size:1.15em}
td,th{padding:.15em .4em;font-size:13px}figure{margin-right:0}
.matrix td,.matrix th{padding:.1em .25em}}"""


def html_page(title: str, body_parts: Iterable[str]) -> str:
    """Return an HTML page."""
    head_html = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{escape_html(title)}</title>"
        f"<style>{_STYLE_SHEET}</style>"
    )
    return head_html + "\n".join([f"<h1>{escape_html(title)}</h1>", *body_parts]) + "\n"


def is_plottable(value: Any) -> bool:
    """Return whether a value can be plotted."""
    return type(value) in (int, float) and abs(value) <= _MAX_PLOTTED_VALUE


def axis_range_and_is_logarithmic(values: Sequence[float]) -> tuple[float, float, bool]:
    """Return the ends of an axis, and whether it is logarithmic, which requires positive values that vary greatly.

    Linear axes begin at 0 unless values are negative or vary little.
    """
    low, high = min(values), max(values)
    is_logarithmic = low > 0 and _MIN_LOGARITHMIC_AXIS_RATIO * low < high
    starts_at_zero = not is_logarithmic and low >= 0 and (_MIN_ZERO_BASED_AXIS_RATIO * low <= high or low == high)
    return 0.0 if starts_at_zero else low, high, is_logarithmic


def value_text(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if is_plottable(value):
        return f"{value:,}" if type(value) is int else f"{value:.5g}"
    return "" if value is None else str(value)


def value_html(value: Any) -> str:
    """Return a value as HTML text."""
    return escape_html(value_text(value))


def escape_html(text: str, max_length: int = 200) -> str:
    """Return untrusted text as HTML: truncated to `max_length`, with special and invisible characters escaped."""
    visible_text = escape_invisible(text[:max_length], keep="\n\t")
    return escape(visible_text + " [...]" * (len(text) > max_length))


def table_html(
    header: Iterable[str], rows: Iterable[Iterable[str]], column_groups: Iterable[tuple[str, int]] = ()
) -> str:
    """Return a table of cells from `value_html`; without a header row if `header` is empty.

    Parameters
    ----------
    column_groups : iterable of (str, int)
        Names of groups of neighbouring columns, and the number of columns of each, for a row above `header`.
    """
    groups = "".join(f"<th class='group' colspan='{count}'>{escape_html(name)}</th>" for name, count in column_groups)
    names = "".join(f"<th>{escape_html(name).replace('_', '_<wbr>')}</th>" for name in header)  # may break after _
    html_rows = [f"<tr>{row}</tr>" for row in (groups, names) if row]
    html_rows += [
        "<tr>" + "".join(f"<td{_css_class_attribute(cell)}>{cell}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return scrollable_html(f"<table>{''.join(html_rows)}</table>")


def _css_class_attribute(cell: str) -> str:
    return "" if not cell or cell[0].isdigit() or cell[0] in "-." else " class='text'"


def scrollable_html(content: str) -> str:
    """Return content that scrolls horizontally in narrow windows."""
    return f"<div class='wide'>{content}</div>"


def image_html(title: str, png: bytes, **attributes: object) -> str:
    """Return an image."""
    attrs = "".join(f" {name}='{escape(str(value))}'" for name, value in attributes.items())
    return f"<img alt='{escape_html(title)}'{attrs} src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def encode_png(pixels: np.ndarray) -> bytes:
    """Return uint8 pixels (h, w), (h, w, 1) or (h, w, 3) as a PNG file."""
    height, width, num_channels = (*pixels.shape, 1)[:3]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each row begins with its filter type, 0

    def encode_chunk(chunk_type: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + chunk_type + data + struct.pack(">I", zlib.crc32(chunk_type + data))

    header = struct.pack(">2I5B", width, height, 8, 2 if num_channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(encode_chunk(*part) for part in chunks)


def text_file_html(path: Path) -> str:
    """Return the text of a file of a run."""
    content = read_bytes(path, _MAX_TEXT_FILE_BYTES, path.parent).decode("utf-8", errors="replace")
    return f"<h2>{escape_html(path.name)}</h2><pre>{escape_html(content, _MAX_TEXT_FILE_BYTES)}</pre>"
