"""Synthetic images for the examples segmentation.yaml and volumes.yaml, in the file formats of their fields.

python examples/make_example_images.py slides|volumes [DIR] [SIDE]               writes training images and a new one
python examples/make_example_images.py picture OUT.png IMAGE RESULT [TRUTH]      plots them side by side
"""

import sys
from pathlib import Path

import numpy as np

import neondist as nd


def draw_ellipsoids(rng, shape, count, radii):
    """Return a mask of random ellipsoids: 1 inside, 0 outside."""
    mask = np.zeros(shape, np.uint8)
    for _ in range(count):
        radius = rng.uniform(*radii)
        centre, stretch = rng.uniform(0, shape), rng.uniform(0.7, 1.4, len(shape))
        reach = [(max(0, int(c - 1.5 * radius)), int(c + 1.5 * radius) + 2) for c in centre]
        box = tuple(slice(a, min(b, n)) for (a, b), n in zip(reach, shape, strict=True))
        grids = np.ogrid[box]
        distance = sum(((g - c) * s / radius) ** 2 for g, c, s in zip(grids, centre, stretch, strict=True))
        mask[box] |= (distance < 1).astype(np.uint8)
    return mask


def draw_smooth_field(rng, shape, spacing):
    """Return a smooth random field with a correlation length of about `spacing` cells, mean 0 and unit variance."""
    field = rng.normal(size=[n // spacing + 3 for n in shape])
    for axis, n in enumerate(shape):
        at = np.arange(n) / spacing
        low = at.astype(int)
        part = (at - low).reshape(-1, *[1] * (len(shape) - axis - 1))
        field = (1 - part) * field.take(low, axis) + part * field.take(low + 1, axis)
    return field / field.std()


def simulate_image(rng, mask, spacing, noise):
    """Return a simulated image of a microscope or scanner: bright objects, uneven light, noise; uint8."""
    light = 60 + 8 * draw_smooth_field(rng, mask.shape, spacing) + 50 * mask
    return np.clip(light + noise * rng.standard_normal(mask.shape, np.float32), 0, 255).astype(np.uint8)


def write_array(path, array, axes):
    """Write a whole array with an additional channel axis."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = array[..., None]
    with nd.create_sink(path, array.shape, array.dtype, axes, overwrite=True) as sink:
        sink.write([(0, n) for n in array.shape], array)
        sink.commit()


def write_images_and_masks(folder, shape, axes, suffix, count, density, radii, spacing, noise):
    """Write training images and masks, and an image `new` for prediction with its mask."""
    for number in range(count + 1):
        rng = np.random.default_rng(number)
        mask = draw_ellipsoids(rng, shape, int(np.prod(shape) * density), radii)
        name = f"{number:02}" if number < count else "new"
        write_array(
            folder / ("images" if number < count else ".") / f"{name}{suffix}",
            simulate_image(rng, mask, spacing, noise),
            axes,
        )
        write_array(folder / ("masks" if number < count else "truth") / f"{name}{suffix}", mask, axes)


def plot_side_by_side(out, *paths):
    """Plot the middle of each array: image, prediction and ground truth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(paths), figsize=(3 * len(paths), 3), squeeze=False, layout="constrained")
    for panel, path, title in zip(panels[0], paths, ("image", "prediction", "ground truth"), strict=False):
        with nd.open_source(path) as source:
            leading = len(source.shape) - 3
            middle = [(n // 2, n // 2 + 1) for n in source.shape[:leading]]
            sides = [(max(0, n // 2 - 200), min(n, n // 2 + 200)) for n in source.shape[leading:-1]]
            cells = source.read([*middle, *sides, (0, 1)]).squeeze(axis=(*range(leading), -1))
        panel.imshow(cells, cmap="gray")
        panel.set_title(title, fontsize=11)
        panel.set(xticks=[], yticks=[])
    figure.savefig(out, dpi=100)


def main(what, folder="data", side=None, *more):
    """Write the images of one example, or a picture."""
    if what == "picture":
        plot_side_by_side(folder, side, *more)
    elif what == "slides":
        n = int(side or 4096)
        write_images_and_masks(Path(folder), (n, n), "YXC", ".tif", 6, 1 / 3000, (8, 20), 256, 25)
    else:
        n = int(side or 64)
        write_images_and_masks(Path(folder), (n, n, n), "ZYXC", ".nii", 8, 1 / 12000, (5, 10), 32, 30)


if __name__ == "__main__":
    main(*sys.argv[1:])
