"""Inference on images of any size, with outputs written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...data import ClimateFiles
from ...errors import ConfigError, DataError, OutputError
from ...formats import TileSink, create_sink
from ...formats.draft import clean_up_if_published
from ...geometry import part_range
from ...io.files import make_folder
from ...io.files import partial_path as unfinished
from ...io.journal import ProgressJournal
from ...io.lock import FileLock
from ...terminal.console import say
from ...terminal.progress_line import ProgressLine, first_rank_progress
from ..experiment import FitExperiment
from . import output_kinds
from .checkpoint_prediction import open_checkpoint_prediction
from .forecast import forecast
from .images import SourceSamples
from .prediction_methods import PredictionMethod
from .trained_module import TrainedModule


def predict(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    target: str | Path,
    grid: ProcessGrid | None = None,
    classes: bool = False,
    *,
    probabilities: bool = False,
    raw: bool = False,
    block: int | None = None,
    overwrite: bool = False,
    steps: int | None = None,
    axes: str | None = None,
) -> tuple[int, ...]:
    """Write the outputs of a checkpoint's network for images of any size; return the shape of all outputs. Collective.

    Raw values are normalised as recorded in the checkpoint; the data set is not needed.
    If whole images fit in memory, each rank computes its tile of them. Otherwise each rank computes blocks of the
    output independently, each block from its whole receptive field. Results agree up to rounding. Layers that need the
    whole image, such as fully connected ones, cannot be computed block by block.

    An interrupted call resumes when it is repeated.

    Parameters
    ----------
    experiment : FitExperiment
        The experiment that wrote the checkpoint; its model's `memory` limits the total of all ranks on a machine.
    checkpoint : path
        Checkpoint, written on any number of ranks.
    source : path
        Input for `nd.open_source`; additional axes are samples.
    target : path
        Output for `nd.create_sink`. Several kinds of output go to separate files, such as 'out-classes.npy'.
    grid : ProcessGrid, optional
        Default: `experiment.open_grid()`.
    classes, probabilities, raw : bool
        Write the argmax of each cell, the softmax, or the raw outputs (default).
    block : int, optional
        Cells along each axis of an output block, fewer if memory is short. Default: whole images, or, if these
        do not fit, 2048 cells (2-D), 256 (3-D) or 262144 (1-D).
    overwrite : bool
        Replace an existing file or an unfinished output.
    steps : int, optional
        For a network trained on ClimateFiles: number of successive forecasts; see `forecast`.
    axes : str, optional
        A letter for each stored axis of the source, such as 'NYX' or 'CYX', if the file specifies none.

    Raises
    ------
    UserError
        On every rank: DataError for a file that cannot be read or does not match, OutputError if writing fails,
        ConfigError for a network that does not fit in memory.
    """
    grid = experiment.open_grid() if grid is None else grid
    if steps is not None or isinstance(experiment.dataset, ClimateFiles):
        if classes or probabilities or block is not None or axes is not None:
            raise ConfigError(
                "predict: forecasts are written as whole fields; leave out classes, probabilities, block and axes"
            )
        return forecast(experiment, checkpoint, source, target, grid, steps, overwrite)
    kinds = output_kinds.selected_output_kinds(raw, probabilities, classes)
    inputs = {"the checkpoint": checkpoint, "the source": source}
    grid.check("predict", inputs | _output_settings_to_compare(target, kinds, block, overwrite) | {"axes": axes})
    open_method = partial(open_checkpoint_prediction, experiment, checkpoint, source, grid, block, axes=axes)
    return _write_outputs(open_method, Path(target), grid, kinds, overwrite)


def predict_module(
    trained: TrainedModule,
    source: str | Path,
    target: str | Path,
    grid: ProcessGrid | None = None,
    classes: bool = False,
    *,
    probabilities: bool = False,
    raw: bool = False,
    block: int | None = None,
    overwrite: bool = False,
) -> tuple[int, ...]:
    """Write the outputs of a module with trained weights, as `predict` does for a checkpoint. Collective.

    Parameters
    ----------
    trained : TrainedModule
    source, target, grid, classes, probabilities, raw, block, overwrite : as in `predict`
        If the module classifies windows, `block` counts windows along each axis.

    Raises
    ------
    UserError
        As in `predict`.
    """
    grid = ProcessGrid() if grid is None else grid
    kinds = output_kinds.selected_output_kinds(raw, probabilities, classes)
    grid.check("predict", {"the source": source} | _output_settings_to_compare(target, kinds, block, overwrite))
    open_method = partial(trained.open_prediction_method, source, grid, block)
    return _write_outputs(open_method, Path(target), grid, kinds, overwrite)


def _output_settings_to_compare(
    target: str | Path, kinds: Sequence[str], block: int | None, overwrite: bool
) -> dict[str, Any]:
    """Return the output settings that must be equal on all ranks."""
    return {"the target": target, "the list of outputs": kinds, "block": block, "overwrite": overwrite}


def _write_outputs(
    open_method: Callable[
        [list[Any] | None], AbstractContextManager[tuple[PredictionMethod, SourceSamples, dict[str, str]]]
    ],
    target: Path,
    grid: ProcessGrid,
    kinds: Sequence[str],
    overwrite: bool,
) -> tuple[int, ...]:
    """Write the outputs by the method that `open_method` yields; return their shape. Collective."""
    paths = output_kinds.output_paths(kinds, target)
    with (
        first_rank_progress(grid.rank) as progress,
        _open_journal(target, grid) as (journal, resumed_method),
        open_method(resumed_method) as (method, images, identities),
    ):
        done_parts: set[int] = set()
        with all_or_none(grid.world):
            output_kinds.check_output_kinds(kinds, method.output_shape[-1], target)
            for path in paths.values():
                if path.resolve() in [Path(file).resolve() for file in images.source.files]:
                    raise OutputError(f"{path}: is the input; choose another output")
            job = {"outputs": kinds, "route": method.identity_for_resume, "input": images.file_identity(), **identities}
            if journal is not None:
                done_parts = journal.completed_parts(job, overwrite)
        done_parts = grid.world.bcast(done_parts)
        with all_or_none(grid.world):  # before new outputs, which another job's journal must not describe
            if journal is not None and not done_parts:
                journal.write_header(job)
        with _open_sinks(paths, method, images, grid, overwrite, done_parts, journal) as sinks:
            remaining_parts = [part for part in range(method.num_parts) if part not in done_parts]
            writer = OutputWriter(method, images, sinks, grid.world.bcast(journal))
            compute_and_write_parts(method, remaining_parts, grid, writer, progress)
            for sink in sinks.values():
                sink.commit()
        with all_or_none(grid.world):
            if journal is not None:
                journal.delete_file()
    num_channels = output_kinds.count_output_channels(kinds[0], method.output_shape[-1])
    return *images.sample_extents, *method.output_shape[:-1], *((num_channels,) if kinds[0] != "classes" else ())


def compute_and_write_parts(
    method: PredictionMethod, parts: Sequence[int], grid: ProcessGrid, writer: Any, progress: ProgressLine
) -> None:
    """Compute parts and pass the outputs to `writer`, reading and writing in the background."""
    parts = method.order_parts_for_reading(parts)
    num_concurrent = 1 if method.is_collective else grid.size
    parts_by_rank = [parts[slice(*part_range(len(parts), num_concurrent, rank))] for rank in range(num_concurrent)]
    own_parts = parts_by_rank[0 if method.is_collective else grid.rank]
    if grid.rank == 0:
        rounds = (part for parts_of_round in zip_longest(*parts_by_rank) for part in parts_of_round if part is not None)
        num_resumed = method.num_parts - len(parts)
        part_sizes = [0] * num_resumed + [method.count_cells(part) for part in rounds]
        progress.set_total_parts(method.num_parts, num_resumed, part_sizes=part_sizes, concurrent_parts=num_concurrent)
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as pool:
        prefetched = reader.submit(method.read_local_input, own_parts[0]) if own_parts else None
        pending: tuple[int, Future[None]] | None = None
        for at, part in enumerate(own_parts):
            assert prefetched is not None
            x = _call_all_or_none(method, grid, prefetched.result)
            prefetched = reader.submit(method.read_local_input, own_parts[at + 1]) if at + 1 < len(own_parts) else None
            with grid.observers.observe("layer", f"part {part}", "forward"):
                y = method.compute_local_output(part, x)
            _finish_pending_write(method, grid, pending, writer)
            pending = part, pool.submit(writer.write, part, y)
            progress.add_done_parts(num_concurrent, num_concurrent * method.count_cells(part))
        _finish_pending_write(method, grid, pending, writer)


def _call_all_or_none(method: PredictionMethod, grid: ProcessGrid, action: Callable[[], Any]) -> Any:
    """Return the result of an action; for a collective method, either all ranks raise an error or none does."""
    if not method.is_collective:
        return action()
    result = None
    with all_or_none(grid.world):
        result = action()
    return result


def _finish_pending_write(
    method: PredictionMethod, grid: ProcessGrid, pending: tuple[int, Future[None]] | None, writer: Any
) -> None:
    if pending is not None:
        _call_all_or_none(method, grid, pending[1].result)
        if not method.is_collective or grid.rank == 0:
            writer.mark_part_done(pending[0])


class OutputWriter:
    """Writer of outputs to files, with a journal of the parts on disk."""

    def __init__(
        self, method: PredictionMethod, images: SourceSamples, sinks: dict[str, TileSink], journal: ProgressJournal
    ) -> None:
        self.method, self.images, self.sinks, self.journal = method, images, sinks, journal

    def write(self, part: int, y: np.ndarray | None) -> None:
        """Write a part to all files."""
        if y is None:
            return
        samples, box = self.method.local_output_samples_and_box(part)
        for kind, sink in self.sinks.items():
            values = output_kinds.convert_to_output_kind(kind, y)
            if self.images.has_single_sample_axis:
                sink.write((*self.images.sample_slices(samples), *box.slices, slice(0, values.shape[-1])), values)
            for at, sample in enumerate(samples if not self.images.has_single_sample_axis else ()):
                sample_index = self.images.sample_slices(range(sample, sample + 1))
                cells = (*sample_index, *box.slices, slice(0, values.shape[-1]))
                sink.write(cells, values[at].reshape([cut.stop - cut.start for cut in cells]))
            sink.flush()

    def mark_part_done(self, part: int) -> None:
        """Mark a part as done in the journal."""
        self.journal.record_part(part)


@contextmanager
def _open_journal(target: Path, grid: ProcessGrid) -> Iterator[tuple[ProgressJournal | None, list[Any] | None]]:
    """Yield the journal of an output, on rank 0 only, and the method that it records, on all ranks."""
    draft = unfinished(target)
    with ExitStack() as stack:
        journal = None
        with all_or_none(grid.world):
            if grid.rank == 0:
                make_folder(target.parent)
                lock = FileLock(draft.with_name(draft.name + ".journal.lock"), target, "file with --output")
                stack.callback(lock.release)
                journal = ProgressJournal(draft.with_name(draft.name + ".journal"))
        yield journal, grid.world.bcast((journal.recorded_job or {}).get("route") if journal is not None else None)


@contextmanager
def _open_sinks(
    paths: dict[str, Path],
    method: PredictionMethod,
    images: SourceSamples,
    grid: ProcessGrid,
    overwrite: bool,
    done_parts: set[int],
    journal: ProgressJournal | None,
) -> Iterator[dict[str, TileSink]]:
    """Yield the incomplete output files by kind, resuming those of an earlier process.

    If all ranks fail before any part is done, all these files are removed.
    """
    *extent, channels = method.output_shape
    source, like, sinks = images.source, method.source_aligned_with_output(), {}
    axes = source.axes[: len(images.sample_extents)] + source.axes[len(images.sample_extents) : -1][: len(extent)] + "C"
    factories: list[Callable[..., TileSink]] = []
    published_kinds: list[str] = []  # renamed by a job that was interrupted before it deleted the journal
    if len(done_parts) == method.num_parts:
        with all_or_none(grid.world):
            if grid.rank == 0:
                published_kinds = [kind for kind, path in paths.items() if clean_up_if_published(path)]
        published_kinds = grid.world.bcast(published_kinds)
    with _remove_outputs_on_failure(factories, grid, journal), ExitStack() as stack:
        for kind, path in paths.items():
            if kind in published_kinds:
                continue
            shape = (*images.sample_extents, *extent, output_kinds.count_output_channels(kind, channels))
            sink_args = shape, output_kinds.output_dtype(kind, channels, method.dtype), axes
            options = output_kinds.sink_options(kind, channels, path)
            open_sink = partial(create_sink, path, *sink_args, like=like, overwrite=overwrite, grid=grid, **options)
            factories.append(open_sink)
            if not done_parts:
                with closing(open_sink(resume=False)) as sink:
                    if sink.lost and grid.rank == 0:
                        say(f"note: {path} does not include {', '.join(sink.lost)} of {source.path}")
            sink = stack.enter_context(closing(open_sink(resume=True)))
            if done_parts and not sink.resumed:
                raise OutputError(
                    f"{path}: the partial output of the earlier job is missing; start again with overwrite"
                )
            sinks[kind] = sink
        if grid.size > 1 and not method.is_collective:  # from now on ranks may fail separately
            factories.clear()
        yield sinks


@contextmanager
def _remove_outputs_on_failure(
    factories: Sequence[Callable[..., TileSink]], grid: ProcessGrid, journal: ProgressJournal | None
) -> Iterator[None]:
    """Remove unfinished outputs of `factories` on an error that all ranks raise, if no part is done."""
    try:
        yield
    except (ConfigError, DataError, OutputError):
        if factories:
            with suppress(ConfigError, OutputError):  # the first error is the one to report
                _remove_if_empty(factories, grid, journal)
        raise


def _remove_if_empty(
    factories: Sequence[Callable[..., TileSink]], grid: ProcessGrid, journal: ProgressJournal | None
) -> None:
    """Remove unfinished outputs and their journal if no part is done. Collective."""
    with all_or_none(grid.world):
        is_empty = journal is not None and ProgressJournal(journal.path).is_empty
        if journal is not None and is_empty:
            journal.delete_file()
    if grid.world.bcast(is_empty):
        for open_sink in factories:
            open_sink(resume=False).close()
