"""Evaluation of a trained network on files: images of any size, and their labels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...costs import Dice
from ...costs.mean import local_weighted_denominators, mean_cost, parts_of, weighted_mean_parts
from ...data.datasets.hdf5_tiles import PrefetchingSplit
from ...data.datasets.image_lists import is_picture, open_mask
from ...errors import ConfigError, DataError
from ...formats import TileSource, open_source
from ...geometry import Box
from ...metrics.base import Metric, PerSampleMetric
from ...metrics.output_layout import OutputLayout
from ...models import TrainableModel
from ...terminal.console import counted
from ...terminal.progress_line import first_rank_progress
from ..callbacks.subsampling import sampled_slices, subsampling_step
from ..callbacks.worst_samples import find_worst_samples, scale_to_uint8
from ..checkpoint_evaluation import MAX_PICTURE_EXTENT
from ..experiment import FitExperiment, add_misclassification
from ..loop import drop_ignored_cells, evaluate
from ..state import format_evaluation_results
from .checkpoint_prediction import open_checkpoint_prediction
from .images import SourceSamples, open_images
from .predict import compute_and_write_parts
from .prediction_methods import BlockwisePrediction, PredictionMethod, WholeImagePrediction
from .trained_module import TrainedModule


def evaluate_files(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    labels: str | Path,
    grid: ProcessGrid | None = None,
    block: int | None = None,
    samples: dict[str, np.ndarray] | None = None,
    axes: str | None = None,
) -> dict[str, Any]:
    """Return the cost and the metrics of a checkpoint's network over images and labels in files. Collective.

    As in `predict`, images may be of any size, and are evaluated whole or in blocks.

    Parameters
    ----------
    experiment, checkpoint, source, grid, block, axes : as in `predict`
    labels : path
        Input for `nd.open_source`: integer classes with the outputs' extent, or targets with the outputs' shape.
    samples : dict, optional
        Filled with small pictures, as by `find_worst_samples`; in block-wise evaluation, of the first image only.

    Returns
    -------
    dict
        'samples', 'loss', 'error' (misclassification rate) and metrics by name, equal on every rank; None for values
        that do not apply to the targets.

    Raises
    ------
    UserError
        As in `predict`; ConfigError if evaluation is block-wise and the cost needs whole images.
    """
    grid = experiment.open_grid() if grid is None else grid
    settings = {"the checkpoint": checkpoint, "the source": source, "labels": labels, "block": block, "axes": axes}
    grid.check("evaluate images", settings | {"samples": samples is not None})
    extra_cells = max(
        (metric.overlap_cells for metric in experiment.metrics if isinstance(metric, PerSampleMetric)), default=0
    )
    prediction = open_checkpoint_prediction(experiment, checkpoint, source, grid, block, None, extra_cells, axes)
    opener = getattr(experiment.dataset, "open_mask", open_mask)
    return _evaluate_by_prediction(prediction, experiment.model, experiment.metrics, labels, grid, samples, opener)


def evaluate_module(
    trained: TrainedModule,
    source: str | Path,
    labels: str | Path,
    grid: ProcessGrid | None = None,
    block: int | None = None,
    samples: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Return the cross entropy and the misclassification rate of a module with trained weights over files. Collective.

    Parameters
    ----------
    trained : TrainedModule
        The module; if it classifies windows, labels refer to the cells of its score map.
    source, labels, grid, block, samples : as in `evaluate_files`

    Returns
    -------
    dict
        'samples', 'loss' and 'error', equal on every rank; None for values that do not apply to the targets.

    Raises
    ------
    UserError
        As in `evaluate_files`.
    """
    grid = ProcessGrid() if grid is None else grid
    settings = {"the source": source, "labels": labels, "block": block, "samples": samples is not None}
    grid.check("evaluate images", settings)
    prediction = trained.open_prediction_method(source, grid, block, None)
    return _evaluate_by_prediction(prediction, trained.model, add_misclassification(None), labels, grid, samples)


def _evaluate_by_prediction(
    prediction: AbstractContextManager[tuple[PredictionMethod, SourceSamples, dict[str, str]]],
    model: TrainableModel,
    metrics: Sequence[Metric],
    labels: str | Path,
    grid: ProcessGrid,
    samples: dict[str, np.ndarray] | None,
    opener: Callable[..., TileSource] = open_mask,
) -> dict[str, Any]:
    """Evaluate cost and metrics by the method that `prediction` yields. Collective."""
    with first_rank_progress(grid.rank, sys.stderr) as progress, prediction as (method, images, _):
        with all_or_none(grid.world):
            for metric in metrics:
                metric.check_output_shape(method.output_shape)
            targets = _open_labels(labels, method, images, opener)
        with closing(targets), _name_label_file_in_errors(labels):
            if isinstance(method, WholeImagePrediction):
                results = _evaluate_whole_images(method, metrics, images, targets, samples)
            else:
                assert isinstance(method, BlockwisePrediction)
                with all_or_none(grid.world):
                    tiles = _TargetTiles(targets, Box.of(targets.shape[1:-1]))
                    sums = _BlockMetricAccumulator(
                        model, metrics, method, tiles, grid, with_pictures=samples is not None
                    )
                compute_and_write_parts(method, range(method.num_parts), grid, sums, progress)
                results = sums.compute_loss_and_metrics()
                if samples is not None and sums.thumbnail is not None:
                    samples |= sums.thumbnail.gather_pictures(results["loss"])
    return format_evaluation_results(images.shape[0], results)


def _open_labels(
    labels: str | Path, method: PredictionMethod, images: SourceSamples, open_class_map: Callable[..., TileSource]
) -> SourceSamples:
    *extent, channels = method.output_shape
    expected, problem = (images.shape[0], *extent), DataError("")
    # files without axis names are ambiguous; a PNG with a palette holds class indices
    is_png = Path(labels).suffix.lower() == ".png"
    for depth in (1, channels) if is_png else (channels, 1):
        try:
            is_class_map = depth == 1 and (is_png or not is_picture(str(labels)))
            image = open_images(labels, (*extent, depth), opener=open_class_map if is_class_map else open_source)
        except DataError as error:
            problem = error
            continue
        dtype = image.source.dtype
        if image.shape[:-1] == expected and (depth == channels or dtype.kind in "iub"):
            return image
        image.close()
        if image.shape[:-1] == expected:
            problem = DataError(
                f"{labels}: contains one {dtype} value per cell; give classes as integers, or"
                f" {counted(channels, 'channel')}"
            )
            continue
        problem = DataError(
            f"{labels}: has labels of shape {list(image.shape[:-1])}, but the outputs have shape {list(expected)}; give"
            " a label per cell of the outputs"
        )
    raise problem


@contextmanager
def _name_label_file_in_errors(labels: str | Path) -> Iterator[None]:
    """Name the file in errors about labels."""
    try:
        yield
    except DataError as error:
        if str(error).startswith("targets: "):
            error.args = (f"{labels}: {str(error).removeprefix('targets: ')}",)
        raise


class _BlockMetricAccumulator:
    """Accumulator of cost and metrics over blocks; Dice and per-sample metrics sum over each sample's blocks first."""

    def __init__(
        self, model: TrainableModel, metrics: Sequence[Metric], method: BlockwisePrediction, targets: _TargetTiles,
        grid: ProcessGrid, with_pictures: bool,
    ) -> None:  # fmt: skip
        self.cost, self.metrics = model.per_cell_cost(), metrics
        self.method, self.targets = method, targets
        self.cost_parts: list[Any] = [part for _, part in parts_of(self.cost)]
        self.grid, num_samples, output_shape = grid, len(targets), method.output_shape
        self.sums_per_sample: dict[Any, np.ndarray] = {}  # (samples, numbers), by cost or metric
        for part in self.cost_parts:
            if part.reduced_elements_per_sample(output_shape):
                if not isinstance(part, Dice):
                    raise ConfigError(
                        f"cost: {type(part).__name__} needs whole images; give more memory (--memory) or use more ranks"
                    )
                self.sums_per_sample[part] = np.zeros((num_samples, 2 * output_shape[-1]))
        for metric in self.metrics:
            if isinstance(metric, PerSampleMetric):
                self.sums_per_sample[metric] = np.zeros((num_samples, 2))
        layout = OutputLayout(grid, output_shape, lambda sums, replicas: _sum_over_ranks(grid, sums))
        self.meter_by_metric = {
            metric: metric.create_meter(layout) for metric in self.metrics if metric not in self.sums_per_sample
        }
        self.thumbnail = _Thumbnail(method, targets.images, grid) if with_pictures else None  # reads the images again
        self.local_sums = np.zeros(len(self.cost_parts) + len(weighted_mean_parts(self.cost)))
        # an empty block initialises all sums on every rank
        self._add_block(
            range(0), np.zeros((0, *output_shape), method.dtype), targets.to_targets(np.zeros((0, *targets.shape[1:])))
        )

    def write(self, part: int, y: np.ndarray | None) -> None:
        if y is not None:
            samples, box = self.method.local_output_samples_and_box(part)
            targets = self.targets.to_targets(self.targets.images.read_raw(samples, box.slices))
            self._add_block(samples, y, targets)
            if self.thumbnail is not None and 0 in samples:
                self.thumbnail.paste_block(box, y[0], targets[0])

    def mark_part_done(self, part: int) -> None:
        """Do nothing: there is no journal."""

    def compute_loss_and_metrics(self) -> dict[str, Any]:
        """Return the means, computed from sums over all ranks. Collective."""
        sums_by_key = {key: _sum_over_ranks(self.grid, table) for key, table in self.sums_per_sample.items()}
        costs, weights = np.split(_sum_over_ranks(self.grid, self.local_sums), [len(self.cost_parts)])
        for at, part in enumerate(self.cost_parts):
            costs[at] += part.losses_from_sums(sums_by_key[part]).sum() if part in sums_by_key else 0
        num_samples = len(self.targets)
        results: dict[str, Any] = {"loss": mean_cost(self.cost, costs, weights, num_samples, self.method.output_shape)}
        for metric in self.metrics:
            if metric in sums_by_key:
                results |= metric.result(np.array([metric.values_from_sums(sums_by_key[metric]).sum(), num_samples]))  # type: ignore[attr-defined]
            else:
                results |= self.meter_by_metric[metric].result()
        return results

    def _add_block(self, samples: range, y: np.ndarray, targets: np.ndarray) -> None:
        own_slices = slice(None), *(slice(size) for size in self.method.plan.size)  # without overlap
        full_block, y, targets = (y, targets), y[own_slices], targets[own_slices]
        for key, table in self.sums_per_sample.items():
            cells = full_block if getattr(key, "overlap_cells", 0) else (y, targets)
            table[samples.start : samples.stop] += key.sums_per_sample(*cells)
        costs = [0.0 if part in self.sums_per_sample else float(part.local_sum(y, targets)) for part in self.cost_parts]
        self.local_sums += [*costs, *local_weighted_denominators(self.cost, y.shape, targets)]
        cells = drop_ignored_cells(y, targets, getattr(self.cost, "ignore_index", None))
        for meter in self.meter_by_metric.values():
            meter.add(*cells)


class _Thumbnail:
    """Subsampled first image with targets and outputs, assembled from blocks; middle slice of a volume."""

    def __init__(self, method: BlockwisePrediction, labels: SourceSamples, grid: ProcessGrid) -> None:
        self.method, self.labels, self.grid = method, labels, grid
        self.extent = method.output_shape[:-1]
        self.source = method.source_aligned_with_output()  # None if outputs are not aligned with the image's cells
        is_drawable = self.source is not None and len(self.extent) in (2, 3)
        self.pixel_step = subsampling_step(self.extent[-2:], MAX_PICTURE_EXTENT) if is_drawable else 0
        picture_shape = [-(-n // self.pixel_step) for n in self.extent[-2:]] if self.pixel_step else []
        self.label_and_prediction_maps = {name: np.zeros(picture_shape) for name in ("label", "prediction")}
        self.image = np.zeros((*picture_shape, 1 if self.source is None else self.source.shape[-1]))
        self.has_classes = False

    def paste_block(self, box: Box, y: np.ndarray, targets: np.ndarray) -> None:
        """Paste the cells (*cells, C) of a block."""
        if self.source is None or not self.pixel_step:
            return
        own = [slice(lo, min(hi, lo + n)) for lo, hi, n in zip(box.lo, box.hi, self.method.plan.size, strict=True)]
        middle_cells = [n // 2 for n in self.extent[:-2]]
        if any(not cut.start <= at < cut.stop for cut, at in zip(own, middle_cells, strict=False)):
            return
        rows, columns = (slice(-(-cut.start // self.pixel_step), -(-cut.stop // self.pixel_step)) for cut in own[-2:])
        plane = Box(tuple(cut.start for cut in own[-2:]), tuple(cut.stop for cut in own[-2:]))
        sampled = sampled_slices(plane, self.pixel_step)
        index: Any = (*(at - cut.start for at, cut in zip(middle_cells, own, strict=False)), *sampled)
        own_part = tuple(slice(0, cut.stop - cut.start) for cut in own)
        self.has_classes = targets.ndim < y.ndim
        prediction = y.argmax(-1) if self.has_classes else y[..., 0]
        for name, cells in (("prediction", prediction), ("label", targets if self.has_classes else targets[..., 0])):
            self.label_and_prediction_maps[name][rows, columns] = cells[own_part][index]
        region = (*self.method.images.sample_slices(range(0, 1)), *own, slice(0, self.image.shape[-1]))
        self.image[rows, columns] = self.source.read(region).reshape(*(cut.stop - cut.start for cut in own), -1)[index]

    def gather_pictures(self, loss: float) -> dict[str, np.ndarray]:
        """Return the pictures, as `find_worst_samples` does. Collective."""
        if not self.pixel_step:
            return {}
        maps = {name: _sum_over_ranks(self.grid, cells)[None] for name, cells in self.label_and_prediction_maps.items()}
        if _sum_over_ranks(self.grid, np.array([float(self.has_classes)]))[0]:
            maps = {name: cells.astype(np.int64) for name, cells in maps.items()}
        image = scale_to_uint8(_sum_over_ranks(self.grid, self.image)[None])
        is_volume = np.array([len(self.extent) == 3])
        return {"image": image, **maps, "sample": np.zeros(1, np.int64), "loss": np.array([loss]), "volume": is_volume}


class _ImageTiles:
    """A rank's tile of each image in a file, as in a split."""

    def __init__(self, images: SourceSamples, tile_box: Box) -> None:
        self.images, self.box = images, tile_box
        self.shape = (images.shape[0], *tile_box.shape, images.shape[-1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, sample_numbers: np.ndarray) -> np.ndarray:
        return self.read_cells(sample_numbers, Box.of(self.box.shape).slices)

    def read_cells(self, sample_numbers: np.ndarray, cells: Sequence[slice]) -> np.ndarray:
        """Return cells of consecutive images; slices are relative to the tile."""
        first_sample = int(sample_numbers[0]) if len(sample_numbers) else 0
        cells_and_offsets = zip(cells, self.box.lo, strict=True)
        image_cells = [slice(c.start + o, c.stop + o) for c, o in cells_and_offsets]
        return self.images.read_raw(range(first_sample, first_sample + len(sample_numbers)), image_cells)


class _TargetTiles(_ImageTiles):
    """A rank's tile of each label image in a file."""

    def __getitem__(self, sample_numbers: np.ndarray) -> np.ndarray:
        return self.to_targets(super().__getitem__(sample_numbers))

    def to_targets(self, raw_cells: np.ndarray) -> np.ndarray:
        """Return classes (n, *cells), or regression targets (n, *cells, C)."""
        if self.images.source.dtype.kind in "iub" and raw_cells.shape[-1] == 1:
            return raw_cells[..., 0].astype(np.int64)
        return raw_cells


def _evaluate_whole_images(
    method: WholeImagePrediction,
    metrics: Sequence[Metric],
    images: SourceSamples,
    labels: SourceSamples,
    samples: dict[str, np.ndarray] | None,
) -> dict[str, Any]:
    """Evaluate whole images, one tile per rank. Collective."""
    factor, offset = np.asarray(images.factor, "f8"), np.asarray(images.subtrahend, "f8")
    tile_box = method.grid.partition(method.output_shape[:-1]).box(method.grid.tile)
    tiles = _ImageTiles(images, method.model.input.own), _TargetTiles(labels, tile_box)
    split = PrefetchingSplit(*tiles, mean=offset / factor, std=1 / factor, scale=1.0)
    with closing(split):
        results = evaluate(method.model, split, method.batch_size, metrics)
        if samples is not None:
            samples |= find_worst_samples(method.model, split, method.batch_size, MAX_PICTURE_EXTENT)
        return results


def _sum_over_ranks(grid: ProcessGrid, sums: np.ndarray) -> np.ndarray:
    total = np.array(sums)
    grid.world.allreduce(total)
    return total
