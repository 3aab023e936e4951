"""Create the MNIST subset of the package from the four official files.

Usage: python tools/make_embedded_mnist.py FOLDER

Draws 1,000 training and 200 test digits of each class, shuffles them, and writes four gzipped IDX files to
neondist/data/datasets/embedded. The output is reproducible: the draw is seeded, and gzip headers contain no time.
"""

from __future__ import annotations

import argparse
import gzip
import struct
from pathlib import Path

import numpy as np

from neondist.comm import ProcessGrid
from neondist.data import MNIST, Split
from neondist.data.datasets.idx import IMAGES_MAGIC, LABELS_MAGIC
from neondist.data.datasets.mnist import EMBEDDED_FOLDER, TEST, TRAIN, MnistPair

SEED = 28


def main() -> None:
    """Read and verify the official files, and write the subset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="folder of the four official files")
    parser.add_argument("--to", type=Path, default=EMBEDDED_FOLDER, help="output folder (default: the package)")
    args = parser.parse_args()
    dataset = MNIST(args.folder)
    dataset.open(ProcessGrid.serial())
    # RandomState is frozen: its stream is the same in every NumPy
    draw = np.random.RandomState(SEED)
    args.to.mkdir(parents=True, exist_ok=True)
    write(args.to, TRAIN, dataset.train, choose_subset(draw, dataset.train.labels, 1000))
    write(args.to, TEST, dataset.test, choose_subset(draw, dataset.test.labels, 200))


def choose_subset(draw: np.random.RandomState, labels: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of `count` samples of every class, shuffled."""
    chosen = [draw.permutation(np.flatnonzero(labels == digit))[:count] for digit in range(10)]
    return draw.permutation(np.concatenate(chosen))


def write(folder: Path, pair: MnistPair, split: Split, chosen: np.ndarray) -> None:
    """Write the chosen images and labels as gzipped IDX files under their official names."""
    images, labels = split.tiles[chosen][..., 0], split.targets(chosen).astype(np.uint8)
    for file, magic, array in ((pair.images, IMAGES_MAGIC, images), (pair.labels, LABELS_MAGIC, labels)):
        raw = struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()
        with (
            open(folder / f"{file.name}.gz", "wb") as plain,
            gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=plain, mtime=0) as packed,
        ):
            packed.write(raw)


if __name__ == "__main__":
    main()
