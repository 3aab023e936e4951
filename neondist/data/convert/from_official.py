"""IDX files and CIFAR-10 batches as sources of a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..datasets.cifar10_files import BATCHES, RECORD, Source, records
from ..datasets.idx import IMAGES, LABELS, UnpackedFile, open_idx, read_header
from ..split_source import Block, SplitSource, per_block

_BYTES = np.dtype("u1")
_CLASSES = np.dtype("i8")
_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def magic(path: Path) -> int:
    """Return the magic number of an IDX file, plain or gzipped, or 0."""
    with UnpackedFile(path) as stream:
        number = int.from_bytes(stream.read(4), "big")
    return number if number in (IMAGES, LABELS) else 0


def idx_folder(folder: Path) -> list[Path]:
    """Return the IDX files of a folder: training files, images first, then those with test or t10k in their name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and "idx" in path.name)
    kinds = {path: magic(path) for path in files}
    ordered = sorted((path for path in files if kinds[path]), key=lambda p: (_is_test(p), kinds[p] == LABELS))
    # the same file may exist both plain and gzipped
    return list({path.name.removesuffix(".gz"): path for path in ordered}.values())


def _is_test(path: Path) -> bool:
    return "t10k" in path.name or "test" in path.name


def idx_parts(paths: list[Path]) -> dict[str, SplitSource]:
    """Return the parts of IDX files: images and labels of the training samples, and optionally of the test samples."""
    kinds = [magic(path) for path in paths]
    if kinds not in ([IMAGES, LABELS], [IMAGES, LABELS] * 2):
        raise DataError(f"{paths[0]}: give IMAGES LABELS, or four IDX files, the test files last")
    pairs = (("train", paths[:2]), ("test", paths[2:]))
    return {name: _idx_part(*pair) for name, pair in pairs if pair}


def _idx_part(images: Path, labels: Path) -> SplitSource:
    header, digits = read_header(images, IMAGES), read_header(labels, LABELS)
    if header.count != digits.count:
        raise DataError(
            f"{images} has {header.count} images, {labels} has {digits.count} labels; take both files from the same set"
        )

    def blocks() -> Iterator[Block]:
        with open_idx(labels, LABELS) as reader:
            classes = np.concatenate(list(reader.chunks(1 << 20))).astype(_CLASSES)
        start = 0
        with open_idx(images, IMAGES) as pixels:
            for chunk in pixels.chunks(per_block(header.sample, _BYTES)):
                yield chunk[..., None], classes[start : start + len(chunk)]
                start += len(chunk)

    return SplitSource(header.count, (*header.sample, 1), _BYTES, (), _CLASSES, blocks)


def cifar_parts(path: Path) -> dict[str, SplitSource]:
    """Return the parts of the binary CIFAR-10 batches, in a folder or a .tar.gz."""
    source = Source(path)
    sizes = source.sizes()
    for name, size in sizes.items():
        if not size or size % RECORD:
            raise DataError(
                f"{path}: {name} has {size} bytes, not a multiple of the record size {RECORD}; download it again"
            )

    def make_part(names: list[str]) -> SplitSource:
        def blocks() -> Iterator[Block]:
            for batch in source.read_batches(names):
                for images, classes in records(batch):
                    if classes.max(initial=0) > 9:
                        raise DataError(f"{path}: has class {classes.max()}; it is damaged, or belongs to CIFAR-100")
                    yield images, classes

        count = sum(sizes[name] for name in names) // RECORD
        return SplitSource(count, (32, 32, 3), _BYTES, (), _CLASSES, blocks, _CIFAR_NAMES)

    return {name: make_part(names) for name, names in BATCHES.items()}
