"""worst.npz: samples of the selection split with the largest losses at the end of a run, with small pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.namespace import to_host
from ...comm import ProcessGrid, all_or_none
from ...costs.labels import mask_ignored
from ...costs.mean import local_weighted_denominators, mean_cost, parts_of, weighted_mean_parts
from ...data import Split
from ...errors import ConfigError
from ...geometry import Box
from ...io.files import atomic_replacement
from ...metrics.classes import scores_and_labels
from ...models import Trainable
from ..loop import evaluate_batches
from ..state import TrainState
from .hook import Hook
from .subsampling import assemble_subsampled_images, sampled_slices, subsampling_step

MAX_WORST_SAMPLES, MAX_PICTURE_EXTENT = 12, 96


class WorstSamples(Hook):
    """Write the worst samples of `dataset.selection_split`, on rank 0, when all epochs are complete.

    A volume is shown by its middle slice. Nothing is written if there is only a training split, if samples are neither
    images nor volumes, or for a PyTorch loss that is not a mean over cells.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_run(self, run: TrainState) -> None:
        """Evaluate the split sample by sample and write the file. Collective."""
        model = run.model
        if len(run.dataset.splits) == 1 or model is not model.whole_model:
            return
        with model.whole_model.use_averaged_weights():
            samples = find_worst_samples(model, run.dataset.selection_split, run.batch_size)
        with all_or_none(run.grid.world):
            if samples and run.is_first_rank:
                with atomic_replacement(self.path) as file:
                    np.savez_compressed(file, **samples)  # type: ignore[arg-type]


def find_worst_samples(
    model: Trainable, split: Split, batch_size: int, max_extent: int = MAX_PICTURE_EXTENT
) -> dict[str, np.ndarray]:
    """Return a split's samples with the largest losses, and small pictures of these samples, on every rank. Collective.

    Returns
    -------
    dict
        'sample' and 'loss' (n,), 'image' (n, h, w, 1 or 3) in uint8, 'label' and 'prediction', each (n, h, w) or
        (n, ...), and 'volume' (n,), whether a picture is the middle slice of a volume. Empty for samples that are not
        images or volumes, and for a PyTorch loss that is not a mean over cells.
    """
    if len(model.whole_model.input.extent) not in (2, 3) or not len(split):
        return {}
    try:
        cost = model.whole_model.per_cell_cost()
    except ConfigError:
        return {}
    losses = compute_sample_losses(model, cost, split, batch_size)
    numbers_by_loss = np.where(np.isnan(losses), -np.inf, -losses).argsort(kind="stable")
    worst_numbers = numbers_by_loss[: min(MAX_WORST_SAMPLES, batch_size)]
    is_volume = np.full(len(worst_numbers), len(model.whole_model.input.extent) == 3)
    pictures = _sample_pictures(model, split, worst_numbers, max_extent)
    return {**pictures, "sample": worst_numbers, "loss": losses[worst_numbers], "volume": is_volume}


def compute_sample_losses(model: Trainable, cost: Any, split: Split, batch_size: int) -> np.ndarray:
    """Return each sample's cost in float64, 0 if all its cells are ignored, on every rank. Collective."""
    cost_parts = parts_of(cost)
    sums = np.zeros((len(cost_parts) + len(weighted_mean_parts(cost)), len(split)))
    for sample_numbers, y, targets, _ in evaluate_batches(model, split, batch_size):
        for at, number in enumerate(sample_numbers):
            sample = y[at : at + 1], targets[at : at + 1]
            costs = [float(part.local_sum(*sample, model.output.sum_over_ranks)) for _, part in cost_parts]
            sums[:, number] = [*costs, *local_weighted_denominators(cost, sample[0].shape, sample[1])]
    sums = model.output.sum_over_ranks(sums, replicas=True)
    costs, weights = sums[: len(cost_parts)].T, sums[len(cost_parts) :].T
    losses = (
        mean_cost(cost, *sums_, 1, model.output_shape) if sums_[1].any() or not sums_[1].size else 0.0
        for sums_ in zip(costs, weights, strict=True)
    )
    return np.fromiter(losses, "f8", len(split))


def _sample_pictures(
    model: Trainable, split: Split, sample_numbers: np.ndarray, max_extent: int
) -> dict[str, np.ndarray]:
    """Return small uint8 images, with labels and predictions (classes or numbers) per sample or cell."""
    grid, images, extent = model.grid, model.whole_model.input, model.output_shape[:-1]
    own_samples = slice(*grid.sample_range(len(sample_numbers)))
    x = (split.lazy_images if model.is_streamed else split.images)(sample_numbers[own_samples], model.dtype)
    y, targets, _ = model.evaluate_batch(x, split.targets(sample_numbers[own_samples]), len(sample_numbers))
    y, ignore_index = to_host(y), model.cost.ignore_index
    labels, valid_mask = mask_ignored(targets, ignore_index)
    classified = scores_and_labels(y, labels)
    if not all(grid.world.allgather(classified is not None)):  # numbers of one rank can look like classes
        classified = None
    prediction, label = (y, targets) if classified is None else (classified[0].argmax(-1), classified[1])
    if classified is not None and valid_mask is not None:
        label = np.where(valid_mask, label, ignore_index)
    if extent and classified is None:
        prediction, label = (cells[..., 0] if cells.ndim == y.ndim else cells for cells in (prediction, label))
    pixels = _assemble_middle_slices(grid, own_samples.start, images.own, images.extent, x, max_extent).astype("f8")
    box = grid.partition(extent).box(grid.tile) if extent else Box((), ())
    maps = {
        name: _assemble_middle_slices(grid, own_samples.start, box, extent, cells, max_extent)
        for name, cells in (("label", label), ("prediction", prediction))
    }
    return {"image": scale_to_uint8(pixels), **maps}


def scale_to_uint8(pixels: np.ndarray) -> np.ndarray:
    """Return pictures (n, h, w, C) as uint8, scaled to their range, and averaged over channels unless C is 1 or 3."""
    pixels = pixels if pixels.shape[-1] in (1, 3) else pixels.mean(axis=-1, keepdims=True)
    low, high = (reduce(pixels, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    return (255 * (pixels - low) / np.where(high > low, high - low, 1)).astype(np.uint8)


def _assemble_middle_slices(
    grid: ProcessGrid, first_sample: int, box: Box, extent: tuple[int, ...], cells: Any, max_extent: int
) -> np.ndarray:
    """Assemble samples (n, *extent, ...) on every rank from each rank's box. Collective.

    Large images are subsampled, and volumes reduced to the middle slice; only the cells shown are read from a LazyTile.
    """
    if not extent:
        return assemble_subsampled_images(grid, box, extent, 1, cells, first_sample)
    row_axis, step = box.ndim - 2, subsampling_step(extent[-2:], max_extent)
    plane = Box(box.lo[row_axis:], box.hi[row_axis:])
    rows, columns = sampled_slices(plane, step)
    middle = [slice(n // 2 - lo, n // 2 - lo + 1) for n, lo in zip(extent[:row_axis], box.lo, strict=False)]
    row_numbers = range(*rows.indices(box.shape[row_axis]))
    if any(cut.start not in range(n) for cut, n in zip(middle, box.shape, strict=False)) or not row_numbers:
        pixels = np.empty((0, 0, 0, *cells.shape[1 + box.ndim :]), cells.dtype)
    else:
        arrays = [cells[(slice(None), *middle, slice(row, row + 1), slice(None))] for row in row_numbers]
        selection: tuple[Any, ...] = (slice(None), *(0 for _ in middle), slice(None), columns)
        pixels = np.concatenate(arrays, axis=1 + row_axis)[selection]
    return assemble_subsampled_images(grid, plane, extent[row_axis:], step, pixels, first_sample)
