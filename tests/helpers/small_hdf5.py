"""Small HDF5 files and folders of images."""

import h5py
import numpy as np


def write_hdf5(path, shape=(13, 10, 2), counts=(20, 7), maps=None, dtype="u1", chunks=True, **libver):
    """Write an HDF5 file of random images; return its arrays by (part, kind)."""
    rng, arrays = np.random.default_rng(0), {}
    with h5py.File(path, "w", **libver) as file:
        for part, count in zip(("train", "test"), counts, strict=True):
            arrays[part, "images"] = rng.integers(0, 200, (count, *shape)).astype(dtype)
            arrays[part, "labels"] = rng.integers(0, 3, (count, *(maps or ())), dtype="i4")
            for kind in ("images", "labels"):
                array = arrays[part, kind]
                cut = (1, *(max(1, n // 3) for n in array.shape[1:])) if chunks and array.ndim > 1 else None
                file.create_dataset(f"{part}/{kind}", data=array, chunks=cut)
    return arrays


def write_image_folder(folder, classes=("cat", "dog"), count=3, size=(12, 9), mode="RGB", suffix=".png", seed=0):
    """Write random images into one folder per class; return (image, label) pairs in the order of the names."""
    from PIL import Image

    rng, images = np.random.default_rng(seed), []
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            shape = size if mode == "L" else (*size, 3)
            array = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(array).save(folder / name / f"{index:03d}{suffix}")
            images.append((array.reshape(*size, -1), label))
    return images
