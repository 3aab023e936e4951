"""The outputs of a trained network for images of any size, written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...data import ClimateFiles
from ...errors import ConfigError, DataError, OutputError
from ...formats import TileSink, create_sink
from ...formats.draft import is_named
from ...geometry import split
from ...io.files import make_folder
from ...io.files import partial as unfinished
from ...io.journal import Journal
from ...io.lock import Lock
from ...terminal.console import say
from ..experiment import FitExperiment
from .forecast import forecast
from .images import Images
from .network import network
from .of_weights import TrainedModule
from .progress import Progress, first_rank_progress
from .results import channels_of, check_kinds, dtype_of, kinds_of, options_of, paths_of, result
from .routes import Route


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
) -> tuple[int, ...]:
    """Write the outputs of a checkpoint's network for images of any size; return their whole shape; collective.

    Raw values are treated as the training images were: the checkpoint knows how they were normalised, so the data set
    need not be there. Where the network fits into memory with whole images, each rank has its tile of them; else it
    goes in blocks of the output, each computed from all cells that it depends on, and each rank has its own blocks.
    The numbers are the same, but for rounding. What needs the whole image, such as a fully connected layer, cannot go
    in blocks.

    Whenever it is ended, the same call goes on with what is missing.

    Parameters
    ----------
    experiment : FitExperiment
        The one that wrote the checkpoint; its model's `memory` is what all ranks of a machine may use.
    checkpoint : path
        Written by any number of ranks.
    source : path
        What `nd.open_source` reads; axes beside those of an image are samples.
    target : path
        What `nd.create_sink` writes. Of several kinds of output each has a file of its own: 'out-classes.npy'.
    grid : ProcessGrid, optional
        Default `experiment.open_grid()`.
    classes, probabilities, raw : bool
        Write the number of the largest output of each cell, the softmax, or the outputs as they are (default).
    block : int, optional
        Cells along each axis that a block of the output has, fewer where memory is not enough. Default: whole images,
        or 2048 cells where these do not fit.
    overwrite : bool
        Replace an existing file, and start over where another output was begun.
    steps : int, optional
        Of a network that was trained on ClimateFiles: so many forecasts one after the other; see `forecast`.

    Raises
    ------
    UserError
        On every rank: DataError for a file that cannot be read or does not fit, OutputError if nothing can be written,
        ConfigError for a network that fits into no memory.
    """
    grid = experiment.open_grid() if grid is None else grid
    if steps is not None or isinstance(experiment.dataset, ClimateFiles):
        if classes or probabilities or block is not None:
            raise ConfigError(
                "predict: forecasts are written as whole fields; leave out --classes, --probabilities and --block"
            )
        return forecast(experiment, checkpoint, source, target, grid, steps, overwrite)
    kinds, read = kinds_of(raw, probabilities, classes), {"the checkpoint": checkpoint, "the source": source}
    grid.check("predict", read | _facts(target, kinds, block, overwrite))
    opened = partial(network, experiment, checkpoint, source, grid, block)
    return _written(opened, Path(target), grid, kinds, overwrite)


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
    """Write the outputs of a module with trained weights, as `predict` does those of a checkpoint; collective.

    Parameters
    ----------
    trained : TrainedModule
    source, target, grid, classes, probabilities, raw, block, overwrite : as in `predict`
        With windows, a block is so many windows along each axis.

    Raises
    ------
    UserError
        As `predict`.
    """
    grid = ProcessGrid() if grid is None else grid
    kinds = kinds_of(raw, probabilities, classes)
    grid.check("predict", {"the source": source} | _facts(target, kinds, block, overwrite))
    opened = partial(trained.opened, source, grid, block)
    return _written(opened, Path(target), grid, kinds, overwrite)


def _facts(target: str | Path, kinds: Sequence[str], block: int | None, overwrite: bool) -> dict[str, Any]:
    """Return the facts of the output to compare over the ranks."""
    return {"the target": target, "the outputs": kinds, "block": block, "overwrite": overwrite}


def _written(
    opened: Callable[[list[Any] | None], AbstractContextManager[tuple[Route, Images, dict[str, str]]]],
    target: Path,
    grid: ProcessGrid,
    kinds: Sequence[str],
    overwrite: bool,
) -> tuple[int, ...]:
    """Write the outputs on the route that `opened` yields; the shape, collective."""
    with (
        first_rank_progress(grid.rank) as progress,
        _journal(target, grid) as (journal, before),
        opened(before) as (route, images, said),
    ):
        done: set[int] = set()
        with all_or_none(grid.world):
            check_kinds(kinds, route.output_shape[-1], target)
            job = {"outputs": kinds, "route": route.about, "input": images.identity(), **said}
            if journal is not None:
                done = journal.done(job, overwrite)
        done = grid.world.bcast(done)
        with _sinks(paths_of(kinds, target), route, images, grid, overwrite, done, journal) as sinks:
            with all_or_none(grid.world):
                if journal is not None and not done:
                    journal.begin(job)
            left = [part for part in range(route.parts) if part not in done]
            if progress is not None:
                progress.expect(route.parts, len(done))
            through(route, left, grid, Writer(route, images, sinks, grid.world.bcast(journal)), progress)
            for sink in sinks.values():
                sink.commit()
        with all_or_none(grid.world):
            if journal is not None:
                journal.remove()
    channels = channels_of(kinds[0], route.output_shape[-1])
    return *images.lead, *route.output_shape[:-1], *((channels,) if kinds[0] != "classes" else ())


def through(route: Route, parts: Sequence[int], grid: ProcessGrid, take: Any, progress: Progress | None = None) -> None:
    """Compute parts, and hand the outputs to `take`; the next part is read, and the last one taken, meanwhile."""
    parts = route.ordered(parts)
    mine = parts if route.collective else parts[slice(*split(len(parts), grid.size, grid.rank))]
    others = 1 if route.collective else grid.size
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        ahead = reader.submit(route.read, mine[0]) if mine else None
        behind: tuple[int, Future[None]] | None = None
        for at, part in enumerate(mine):
            assert ahead is not None
            x = _agreed(route, grid, ahead.result)
            ahead = reader.submit(route.read, mine[at + 1]) if at + 1 < len(mine) else None
            with grid.observers.during("layer", f"part {part}", "forward"):
                y = route.outputs(part, x)
            _finish(route, grid, behind, take)
            behind = part, writer.submit(take.write, part, y)
            if progress is not None:
                progress.add(others, others * route.cells(part))
        _finish(route, grid, behind, take)


def _agreed(route: Route, grid: ProcessGrid, action: Callable[[], Any]) -> Any:
    """Return what an action returns; where ranks work together all fail or none."""
    if not route.collective:
        return action()
    found = None
    with all_or_none(grid.world):
        found = action()
    return found


def _finish(route: Route, grid: ProcessGrid, behind: tuple[int, Future[None]] | None, take: Any) -> None:
    """Wait for a part that is being taken, and note that it is done."""
    if behind is not None:
        _agreed(route, grid, behind[1].result)
        if not route.collective or grid.rank == 0:
            take.done(behind[0])


class Writer:
    """Takes outputs to files, and notes in a journal what is on the disk."""

    def __init__(self, route: Route, images: Images, sinks: dict[str, TileSink], journal: Journal) -> None:
        self.route, self.images, self.sinks, self.journal = route, images, sinks, journal

    def write(self, part: int, y: np.ndarray | None) -> None:
        """Write a part to all files."""
        if y is None:
            return
        samples, box = self.route.place(part)
        for kind, sink in self.sinks.items():
            values = result(kind, y)
            if self.images.stacked:
                sink.write((*self.images.places(samples), *box.slices, slice(0, values.shape[-1])), values)
            for at, sample in enumerate(samples if not self.images.stacked else ()):
                place = self.images.places(range(sample, sample + 1))
                cells = (*place, *box.slices, slice(0, values.shape[-1]))
                sink.write(cells, values[at].reshape([cut.stop - cut.start for cut in cells]))
            sink.flush()

    def done(self, part: int) -> None:
        """Note that a part is done."""
        self.journal.add(part)


@contextmanager
def _journal(target: Path, grid: ProcessGrid) -> Iterator[tuple[Journal | None, list[Any] | None]]:
    """Yield the journal of an output, on rank 0 alone, and the route that it tells of; others wait, or are told."""
    part = unfinished(target)
    with ExitStack() as stack:
        found = None
        with all_or_none(grid.world):
            if grid.rank == 0:
                make_folder(target.parent)
                lock = Lock(part.with_name(part.name + ".journal.lock"), target, "file with --output")
                stack.callback(lock.release)
                found = Journal(part.with_name(part.name + ".journal"))
        yield found, grid.world.bcast((found.job or {}).get("route") if found is not None else None)


@contextmanager
def _sinks(
    paths: dict[str, Path],
    route: Route,
    images: Images,
    grid: ProcessGrid,
    overwrite: bool,
    done: set[int],
    journal: Journal | None,
) -> Iterator[dict[str, TileSink]]:
    """Yield the files on their route, those of an earlier process if something is done; but for complete ones.

    Where the input fails before any part is done, nothing of them is left.
    """
    *extent, channels = route.output_shape
    source, like, found = images.source, route.like(), {}
    axes = source.axes[: len(images.lead)] + source.axes[len(images.lead) : -1][: len(extent)] + "C"
    makes: list[Callable[..., TileSink]] = []
    complete: list[str] = []  # where a process was ended between a file's name and the next, or the journal's end
    if len(done) == route.parts:
        with all_or_none(grid.world):
            if grid.rank == 0:
                complete = [kind for kind, path in paths.items() if is_named(path)]
        complete = grid.world.bcast(complete)
    with _removed_on_failure(makes, route, grid, journal), ExitStack() as stack:
        for kind, path in paths.items():
            if kind in complete:
                continue
            shape = (*images.lead, *extent, channels_of(kind, channels))
            given = shape, dtype_of(kind, channels, route.dtype), axes
            options = options_of(kind, channels, path)
            make = partial(create_sink, path, *given, like=like, overwrite=overwrite, grid=grid, **options)
            makes.append(make)
            if not done:
                with closing(make(resume=False)) as sink:
                    if sink.lost and grid.rank == 0:
                        say(f"note: {path} does not include {', '.join(sink.lost)} of {source.path}")
            sink = stack.enter_context(closing(make(resume=True)))
            if done and not sink.resumed:
                raise OutputError(
                    f"{path}: the partial output of the earlier job is missing; give --overwrite to start again"
                )
            found[kind] = sink
        yield found


@contextmanager
def _removed_on_failure(
    makes: Sequence[Callable[..., TileSink]], route: Route, grid: ProcessGrid, journal: Journal | None
) -> Iterator[None]:
    """Remove unfinished outputs if the input is at fault, all ranks know, and no part of them is done."""
    try:
        yield
    except DataError:
        if grid.size == 1 or route.collective:
            with all_or_none(grid.world):
                empty = journal is not None and Journal(journal.path).empty
            if grid.world.bcast(empty):
                for make in makes:
                    make(resume=False).close()
                with all_or_none(grid.world):
                    if journal is not None and journal.path.exists():
                        journal.remove()
        raise
