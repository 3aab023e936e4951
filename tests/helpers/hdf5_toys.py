"""Small HDF5 files, and folders of images to make them from."""

import h5py
import numpy as np


def small_hdf5(path, shape=(13, 10, 2), counts=(20, 7), maps=None, dtype="u1", chunks=True, **libver):
    """Write a file of random images; return its arrays by (part, kind)."""
    draw, made = np.random.default_rng(0), {}
    with h5py.File(path, "w", **libver) as file:
        for part, count in zip(("train", "test"), counts, strict=True):
            made[part, "images"] = draw.integers(0, 200, (count, *shape)).astype(dtype)
            made[part, "labels"] = draw.integers(0, 3, (count, *(maps or ())), dtype="i4")
            for kind in ("images", "labels"):
                array = made[part, kind]
                cut = (1, *(max(1, n // 3) for n in array.shape[1:])) if chunks and array.ndim > 1 else None
                file.create_dataset(f"{part}/{kind}", data=array, chunks=cut)
    return made


def image_folder(folder, classes=("cat", "dog"), count=3, size=(12, 9), mode="RGB", suffix=".png", seed=0):
    """Write random images below a folder for each class; return them in the order of their names."""
    from PIL import Image

    draw, made = np.random.default_rng(seed), []
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for at in range(count):
            shape = size if mode == "L" else (*size, 3)
            array = draw.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(array).save(folder / name / f"{at:03d}{suffix}")
            made.append((array.reshape(*size, -1), label))
    return made
