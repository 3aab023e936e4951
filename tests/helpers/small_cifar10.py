"""Small CIFAR-10 files."""

import io
import tarfile

import numpy as np

NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def draw_batches(count=4, seed=0):
    """Return random records (count, 3073) by the name of their file."""
    rng = np.random.default_rng(seed)
    batches = {name: rng.integers(0, 256, (count, 3073), dtype=np.uint8) for name in NAMES}
    for records in batches.values():
        records[:, 0] %= 10
    return batches


def write_folder(path, batches):
    path.mkdir()
    for name, records in batches.items():
        (path / name).write_bytes(records.tobytes())
    return path


def write_archive(path, batches):
    with tarfile.open(path, "w:gz") as file:
        for name, records in batches.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = records.nbytes
            file.addfile(info, io.BytesIO(records.tobytes()))
    return path
