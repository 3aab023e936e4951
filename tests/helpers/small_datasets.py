"""Small data files and process grids for tests of datasets."""

import gzip
import struct
from pathlib import Path

import numpy as np

from neondist.comm import ProcessGrid, loopback
from neondist.data.datasets.idx import IMAGES_MAGIC, LABELS_MAGIC
from neondist.data.datasets.mnist import TEST, TRAIN

GRIDS = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1), (1, 2, 3), (2, 1, 2), (1, 9, 1), (1, 1, 30)]


def make_grids(replicas, rows, cols):
    """Return the grids of all virtual ranks in rank order, for calls without communication."""
    return loopback.run(replicas * rows * cols, lambda t: ProcessGrid(t, replicas=replicas, rows=rows, cols=cols))


def encode_idx(array, magic=None, extents=None):
    """Return the bytes of an IDX file; `magic` and `extents` override fields of its header."""
    extents = array.shape if extents is None else extents
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + len(extents)}I", magic, *extents) + array.astype(np.uint8).tobytes()


def write_bytes(path: Path, raw: bytes) -> Path:
    """Write bytes to a file, compressed if its name ends in .gz."""
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def write_mnist(folder: Path, suffix=".gz", counts=(50, 20), seed=0) -> dict:
    """Write the four MNIST files with random contents; return their arrays by (split, kind)."""
    rng = np.random.RandomState(seed)
    folder.mkdir(exist_ok=True)
    arrays = {}
    for name, pair, n in (("train", TRAIN, counts[0]), ("test", TEST, counts[1])):
        images, labels = rng.randint(0, 256, (n, 28, 28)), rng.randint(0, 10, n)
        write_bytes(folder / f"{pair.images.name}{suffix}", encode_idx(images, IMAGES_MAGIC))
        write_bytes(folder / f"{pair.labels.name}{suffix}", encode_idx(labels, LABELS_MAGIC))
        arrays[name, "images"], arrays[name, "labels"] = images, labels
    return arrays


def assemble_image(tiles, boxes, shape):
    """Assemble the tiles (n, *tile, C) of all ranks; cells outside all tiles are NaN."""
    image = np.full(shape, np.nan)
    for tile, box in zip(tiles, boxes, strict=True):
        image[(slice(None), *box.slices)] = tile
    return image
