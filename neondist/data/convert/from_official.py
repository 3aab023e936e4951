"""IDX files and CIFAR-10 batches as sources of a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...terminal.console import counted
from ..datasets.cifar10_files import BATCH_FILES, RECORD_BYTES, CIFAR10Files, decode_batch
from ..datasets.idx import IMAGES_MAGIC, LABELS_MAGIC, MaybeGzipStream, open_idx, read_idx_header
from ..split_source import ImagesAndLabels, SplitSource, samples_per_block

_PIXEL_DTYPE = np.dtype("u1")
_LABEL_DTYPE = np.dtype("i8")
_CIFAR_CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_idx_magic_number(path: Path) -> int:
    """Return the magic number of an IDX file, plain or gzipped; 0 for other files."""
    with MaybeGzipStream(path) as stream:
        magic = int.from_bytes(stream.read(4), "big")
    return magic if magic in (IMAGES_MAGIC, LABELS_MAGIC) else 0


def find_idx_files(folder: Path) -> list[Path]:
    """Return the IDX files of a folder: training files, images first, then those with test or t10k in their name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and "idx" in path.name)
    magic_by_path = {path: read_idx_magic_number(path) for path in files}
    idx_paths = (path for path in files if magic_by_path[path])
    ordered_paths = sorted(idx_paths, key=lambda path: (_has_test_in_name(path), magic_by_path[path] == LABELS_MAGIC))
    # the same file may exist both plain and gzipped
    return list({path.name.removesuffix(".gz"): path for path in ordered_paths}.values())


def _has_test_in_name(path: Path) -> bool:
    return "t10k" in path.name or "test" in path.name


def idx_splits(paths: list[Path]) -> dict[str, SplitSource]:
    """Return the splits of IDX files: images and labels of the training samples, and optionally of the test samples."""
    magic_numbers = [read_idx_magic_number(path) for path in paths]
    if magic_numbers not in ([IMAGES_MAGIC, LABELS_MAGIC], [IMAGES_MAGIC, LABELS_MAGIC] * 2):
        raise DataError(f"{paths[0]}: expected an image file and a label file, or two such pairs: training, then test")
    paths_by_split = (("train", paths[:2]), ("test", paths[2:]))
    return {name: _idx_split(*pair) for name, pair in paths_by_split if pair}


def _idx_split(images: Path, labels: Path) -> SplitSource:
    image_header, label_header = read_idx_header(images, IMAGES_MAGIC), read_idx_header(labels, LABELS_MAGIC)
    if image_header.count != label_header.count:
        raise DataError(
            f"{images} has {counted(image_header.count, 'image')}, {labels} has {counted(label_header.count, 'label')};"
            " take both files from the same set"
        )

    def read_blocks() -> Iterator[ImagesAndLabels]:
        with open_idx(labels, LABELS_MAGIC) as reader:
            classes = np.concatenate(list(reader.read_chunks(1 << 20))).astype(_LABEL_DTYPE)
        start = 0
        with open_idx(images, IMAGES_MAGIC) as pixels:
            for chunk in pixels.read_chunks(samples_per_block(image_header.sample_shape, _PIXEL_DTYPE)):
                yield chunk[..., None], classes[start : start + len(chunk)]
                start += len(chunk)

    return SplitSource(image_header.count, (*image_header.sample_shape, 1), _PIXEL_DTYPE, (), _LABEL_DTYPE, read_blocks)


def cifar_splits(path: Path) -> dict[str, SplitSource]:
    """Return the splits of the binary CIFAR-10 batches, in a folder or a .tar.gz."""
    source = CIFAR10Files(path)
    sizes = source.file_sizes()
    for name, size in sizes.items():
        if not size or size % RECORD_BYTES:
            raise DataError(
                f"{path}: {name} has {size} bytes, not a multiple of the record size {RECORD_BYTES}; download it again"
            )

    def make_split(names: list[str]) -> SplitSource:
        def read_blocks() -> Iterator[ImagesAndLabels]:
            for batch in source.read_batches(names):
                for images, classes in decode_batch(batch):
                    if classes.max(initial=0) > 9:
                        raise DataError(
                            f"{path}: has class {classes.max()}, so it is damaged or CIFAR-100; download CIFAR-10"
                        )
                    yield images, classes

        num_samples = sum(sizes[name] for name in names) // RECORD_BYTES
        return SplitSource(num_samples, (32, 32, 3), _PIXEL_DTYPE, (), _LABEL_DTYPE, read_blocks, _CIFAR_CLASS_NAMES)

    return {name: make_split(names) for name, names in BATCH_FILES.items()}
