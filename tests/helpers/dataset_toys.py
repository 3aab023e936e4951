"""Small data files and grids for the tests of the data sets."""

import gzip
import struct
from pathlib import Path

import numpy as np

from neondist.comm import ProcessGrid, loopback
from neondist.data.datasets.idx import IMAGES, LABELS
from neondist.data.datasets.mnist import TEST, TRAIN

GRIDS = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1), (1, 2, 3), (2, 1, 2), (1, 9, 1), (1, 1, 30)]


def grids(replicas, rows, cols):
    """Return the grid objects of all virtual ranks, in rank order; good for calls that send nothing."""
    return loopback.run(replicas * rows * cols, lambda t: ProcessGrid(t, replicas=replicas, rows=rows, cols=cols))


def idx(array, magic=None, extents=None):
    """Return the bytes of an IDX file, right unless the header is told otherwise."""
    extents = array.shape if extents is None else extents
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + len(extents)}I", magic, *extents) + array.astype(np.uint8).tobytes()


def put(path: Path, raw: bytes) -> Path:
    """Write bytes to a file, gzipped if it is named so."""
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def small_mnist(folder: Path, suffix=".gz", counts=(50, 20), seed=0) -> dict:
    """Write the four files with random contents; return them by (split, kind)."""
    draw = np.random.RandomState(seed)
    folder.mkdir(exist_ok=True)
    made = {}
    for name, pair, n in (("train", TRAIN, counts[0]), ("test", TEST, counts[1])):
        images, labels = draw.randint(0, 256, (n, 28, 28)), draw.randint(0, 10, n)
        put(folder / f"{pair.images.name}{suffix}", idx(images, IMAGES))
        put(folder / f"{pair.labels.name}{suffix}", idx(labels, LABELS))
        made[name, "images"], made[name, "labels"] = images, labels
    return made


def whole(tiles, boxes, shape):
    """Put the tiles (n, *tile, C) of all ranks together; a cell that no rank has stays NaN."""
    image = np.full(shape, np.nan)
    for tile, box in zip(tiles, boxes, strict=True):
        image[(slice(None), *box.slices)] = tile
    return image
