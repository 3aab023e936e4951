"""Grids of small pictures; knows pixels only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_figure

SEAM = 1.0  # the white between pictures


def draw_rows(path: Path, rows: Sequence[np.ndarray], title: str) -> None:
    """Write rows of pictures (n, h, w, C) of one size, all of a row in one scale of grey or colour around 0."""
    lines = [_stack([_scaled(p, np.abs(row).max(initial=0)) for p in row], 1) for row in rows]
    _write(path, np.concatenate(lines), title)


def draw_blocks(path: Path, blocks: Mapping[tuple[int, ...], np.ndarray], title: str) -> None:
    """Write blocks by (row, column): each holds pictures (h, w, C, n) in one scale around 0."""
    rows = sorted({place[0] for place in blocks})
    lines = []
    for row in rows:
        line = [_block(pictures) for place, pictures in sorted(blocks.items()) if place[0] == row]
        lines.append(np.concatenate([_framed(block, 2) for block in line], axis=1))
    _write(path, np.concatenate(lines), title)


def _block(pictures: np.ndarray) -> np.ndarray:
    """Return n pictures in a block that is as square as can be."""
    each = [_scaled(p, np.abs(pictures).max(initial=0)) for p in np.moveaxis(pictures, -1, 0)]
    wide = -(-len(each) // max(1, int(len(each) ** 0.5)))
    each += [np.ones_like(each[0])] * (-len(each) % wide)
    return np.concatenate([_stack(each[at : at + wide], 1) for at in range(0, len(each), wide)])


def _scaled(picture: np.ndarray, most: float) -> np.ndarray:
    """Return (h, w, 3) in [0, 1]: 0 is the middle."""
    grey = 0.5 + 0.5 * picture / most if most > 0 else np.full(picture.shape, 0.5)
    return np.broadcast_to(grey, (*picture.shape[:2], 3))


def _stack(pictures: Sequence[np.ndarray], seam: int) -> np.ndarray:
    return np.concatenate([_framed(p, seam) for p in pictures], axis=1)


def _framed(picture: np.ndarray, seam: int) -> np.ndarray:
    return np.pad(picture, ((0, seam), (0, seam), (0, 0)), constant_values=SEAM)


def _write(path: Path, pixels: np.ndarray, title: str) -> None:
    from matplotlib.figure import Figure

    height, width = pixels.shape[:2]
    figure: Any = Figure(figsize=(10, 0.6 + 9.8 * height / width), layout="constrained")
    axes = figure.subplots()
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=11)
    axes.set_axis_off()
    write_figure(path, figure)
