"""From an experiment to a trained model and the files of a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from ..backends import get_backend
from ..comm import ProcessGrid, Transport, all_or_none
from ..io import output
from ..io.checkpoint import opened, take
from ..io.files import write_text
from ..io.output import CHECKPOINT, has_run, is_new
from ..memory import room_for
from ..plan import Plan
from .callbacks.checkpoint import Checkpoint, restore
from .callbacks.curves import Curves
from .callbacks.hook import Hook
from .callbacks.ledger_log import LedgerLog
from .callbacks.metrics_log import MetricsLog
from .callbacks.tiles_picture import TilesPicture
from .consistency import check_consistency, check_data_consistency, outline
from .loop import train_loop
from .pretrain import last_stage, pretrain_stages
from .state import Record, Stop, TrainState
from .validate import Experiment, validate


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind.

    Attributes
    ----------
    files : the files that it wrote
    history : one record per epoch
    stop : why it ended before it was complete, and with which exit code; None if it is complete
    """

    files: list[Path] = field(default_factory=list)
    history: list[Record] = field(default_factory=list)
    stop: Stop | None = None


def train(
    experiment: Experiment,
    grid: ProcessGrid,
    folder: Path | None,
    resume: bool | str,
    overwrite: bool,
    init_from: str | Path | None,
    resolved: str | None,
    hooks: Iterable[Hook],
) -> RunResult:
    """Run an experiment on a grid; collective. The arguments are those of `FitExperiment.run`.

    Whatever can be wrong is found, on every rank, before a file of an earlier run is touched.
    """
    with all_or_none(grid.world):
        plan = validate(experiment, grid.size, grid.shape)
        lines = outline(experiment, plan, resume)
    check_consistency(grid.world, lines)
    with output.held(grid.world, folder, resume, overwrite) if folder is not None else nullcontext():
        return _train(experiment, plan, grid, folder, resume, init_from, resolved, list(hooks))


def _train(
    experiment: Experiment,
    plan: Plan,
    grid: ProcessGrid,
    folder: Path | None,
    resume: bool | str,
    init_from: str | Path | None,
    resolved: str | None,
    hooks: list[Hook],
) -> RunResult:
    """Run an experiment that is right on every rank, in a folder that is its own."""
    model, dataset = experiment.model, experiment.dataset
    dataset.open(grid.reading(plan.wide_tiles), checked=True)
    check_data_consistency(grid, dataset)
    with all_or_none(grid.world), room_for("model", "fewer or smaller layers"):
        model.build(dataset.sample_shape, experiment.batch_size, grid, plan)
    model.step = model.uncounted = 0
    run = TrainState(model, dataset, experiment.epochs, experiment.batch_size)
    begun = start(run, folder, resume, init_from)
    writers: list[Hook] = []
    if folder is not None:
        _begin(experiment, grid, folder, begun.resumed, resolved)
        writers = _writers(folder, Checkpoint(folder / output.CHECKPOINT, experiment.checkpoint, resolved))
    with closing(dataset), room_for("model", "smaller batches, or fewer or smaller layers"):
        if not begun.pretrained:
            keep = (experiment.checkpoint, resolved)
            run.stop = pretrain_stages(model, dataset, experiment.batch_size, hooks, folder, begun.stage, *keep)
        if run.stop is None:
            train_loop(run, [*hooks, *writers], experiment.metrics)
    files = output.present(folder) if folder is not None and grid.rank == 0 else []
    return RunResult(grid.world.bcast(files), run.history, run.stop)


def _begin(experiment: Experiment, grid: ProcessGrid, folder: Path, resume: bool, resolved: str | None) -> None:
    """Put the folder in order and write what is known before training.

    The files of an earlier run go once these are on the disk: if there is no room, it stays.
    """
    from ..io.environment import environment, to_json  # it imports much that `import neondist` can do without

    model = experiment.model
    facts = environment(grid, backend=get_backend(model.backend).name, dtype=str(model.dtype), seed=model.seed)
    with all_or_none(grid.world):
        if grid.rank == 0:
            output.tidy(folder)
            texts = {"environment.json": to_json(facts)} | ({} if resolved is None else {"experiment.yaml": resolved})
            for name, text in texts.items():
                write_text(folder / name, text)
            if not resume:
                output.clear(folder, keep=texts)


def _writers(folder: Path, checkpoint: Checkpoint) -> list[Hook]:
    """Return the hooks that write files; the log before the checkpoint, which is what a resume believes."""
    return [
        MetricsLog(folder / "metrics.jsonl"),
        LedgerLog(folder / "ledger.jsonl"),
        checkpoint,
        Curves(folder / "curves.png"),
        TilesPicture(folder / "tiles.png"),
    ]


@dataclass(frozen=True)
class Start:
    """How an experiment begins.

    Attributes
    ----------
    resumed : whether the files of the earlier run stay
    stage : the stage of pretraining whose checkpoint is to be read, 0 for none
    pretrained : whether pretraining is over
    """

    resumed: bool = False
    stage: int = 0
    pretrained: bool = False


def start(run: TrainState, folder: Path | None, resume: bool | str, init_from: str | Path | None) -> Start:
    """Give `run` the weights, and the position, that it begins with; collective.

    Raises
    ------
    DataError
        On every rank: a file is missing, damaged or does not fit.
    """
    if resume and folder is not None:
        stage = last_stage(run.grid.world, folder) if run.model.whole.num_pretrain_epochs else 0
        if stage:
            return Start(True, stage)
        if not _nothing_yet(run.grid.world, folder, resume):
            restore(folder / CHECKPOINT, run)
            return Start(True, pretrained=True)
        run.notes.append("no earlier run has come to its first checkpoint: this one begins anew")
    if init_from is not None:
        with opened(Path(init_from), run.grid.world) as file:
            run.notes.append(f"weights from {init_from}: {take(file, run.model.kept_arrays()['model'])}")
    return Start()


def _nothing_yet(world: Transport, folder: Path, resume: bool | str) -> bool:
    """Tell whether a run that resumes begins anew; collective."""
    new = False
    with all_or_none(world):
        if world.rank == 0:
            new = not has_run(folder) if resume == "auto" else is_new(folder)
    return bool(world.bcast(new))
