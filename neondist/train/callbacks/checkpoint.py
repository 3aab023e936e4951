"""checkpoint.h5: state to resume a run on any number of ranks, and the schedule of checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...arrays.precision import LossScaler
from ...comm import Transport
from ...errors import ConfigError, DataError
from ...halo import scheme_text
from ...io.checkpoint import (
    SCHEME_STATE_TEXT_NAME,
    ArrayPart,
    CheckpointContents,
    collect_scheme_state,
    open_checkpoint,
    restore_scheme_state,
    restore_sync_state,
    sync_state_parts,
    write_checkpoint,
)
from ...io.checkpoint.read import CheckpointReader
from ...io.checkpoint.texts import MAX_EXACT_INTEGER, parse_json, require_json_integer, require_json_type
from ...registry import suggest
from ...registry.arguments import check_value
from ...registry.fields import resolve_type_hints
from ...registry.ranges import Count, Positive
from ...terminal.console import counted
from ...version import __version__
from ..state import EpochRecord, EpochTotals, TrainState
from .hook import Hook

_JSON_KEY_BY_FIELD = {"samples_seen": "seen", "epoch_size": "samples"}
"""JSON keys of the fields that have other names in the file."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, independent of its grid.

    Attributes
    ----------
    epoch, step : epochs and updates that are complete
    samples_seen : samples of the current epoch that are already processed
    epoch_size : samples per epoch
    seed : seed of the order of the samples and of all random numbers
    totals : sums over the current epoch; bytes of all ranks are in `bytes_sent_before_resume` and
        `bytes_summed_before_resume`
    history : one record per complete epoch
    steps_without_optimizer : updates that the optimiser does not count
    loss_scale : state of the LossScaler; None if there is none
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    epoch_size: int = 0
    seed: int = 0
    totals: EpochTotals = field(default_factory=EpochTotals)
    history: list[EpochRecord] = field(default_factory=list)
    steps_without_optimizer: int = 0
    loss_scale: dict[str, Any] | None = None

    @classmethod
    def from_run(cls, run: TrainState) -> RunProgress:
        """Return the progress of a run. Collective."""
        totals = run.totals
        sent, summed = totals.sent_and_summed_bytes_of_all_ranks(run.grid)
        before_resume = {"bytes_sent_before_resume": sent, "bytes_summed_before_resume": summed}
        global_totals = replace(totals, bytes_sent=0, bytes_summed=0, **before_resume)
        position = run.epoch, run.step, run.samples_seen, run.epoch_size, run.model.seed or 0
        scaler = run.model.whole_model.loss_scaler
        scaler_state = None if scaler is None else scaler.state()
        return cls(*position, global_totals, list(run.history), run.model.steps_without_optimizer, scaler_state)

    def apply_to(self, run: TrainState) -> None:
        """Set the position of `run` to this progress.

        Raises
        ------
        DataError
            The seed differs, or the progress ends within an epoch and the number of samples per epoch differs.
        """
        if run.model.seed not in (None, self.seed):
            raise DataError(
                f"was written with seed {self.seed}, but the experiment has {run.model.seed} and would continue with"
                f" other random numbers; set seed: {self.seed}"
            )
        if self.samples_seen:
            run.require_epoch_size(self.epoch_size)
        run.model.seed = self.seed
        run.epoch, run.samples_seen, run.model.step = self.epoch, self.samples_seen, self.step
        run.totals, run.history = replace(self.totals), list(self.history)
        run.model.steps_without_optimizer = self.steps_without_optimizer
        scaler = run.model.whole_model.loss_scaler
        if scaler is not None and self.loss_scale is not None:
            scaler.load_state(self.loss_scale)

    def to_json(self) -> str:
        """Return the progress as JSON; floats round-trip exactly."""
        return json.dumps({_JSON_KEY_BY_FIELD.get(name, name): value for name, value in asdict(self).items()})

    @classmethod
    def from_json(cls, text: str) -> RunProgress:
        """Parse the output of `to_json`; raise ValueError with the reason if it is invalid."""
        values = parse_json(text, dict)
        field_by_key = {_JSON_KEY_BY_FIELD.get(field_.name, field_.name): field_.name for field_ in fields(cls)}
        if not field_by_key.keys() - {"loss_scale"} <= values.keys() <= field_by_key.keys():
            raise ValueError("'position' has missing or unexpected fields")
        totals = require_json_type("'totals'", values["totals"], dict)
        if set(totals) != {field_.name for field_ in fields(EpochTotals)}:
            raise ValueError("'totals' has unexpected fields")
        for name in ("epoch", "step", "seen", "samples", "seed", "steps_without_optimizer"):
            require_json_integer(f"'{name}'", values[name])
        for name, value in totals.items():
            if name not in ("loss", "seconds"):
                minimum = 1 - MAX_EXACT_INTEGER if name == "samples_of_other_workers" else 0
                require_json_integer(f"'totals.{name}'", value, minimum)
            elif type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"'totals.{name}' is not a finite number")
        for part, total in (("steps_without_optimizer", "step"), ("seen", "samples")):
            if values[part] > values[total]:
                raise ValueError(f"'{part}' ({values[part]}) exceeds '{total}' ({values[total]})")
        if values.get("loss_scale") is not None:
            LossScaler().load_state(require_json_type("'loss_scale'", values["loss_scale"], dict))
        history = [_parse_record(record) for record in require_json_type("'history'", values["history"], list)]
        values |= {"totals": EpochTotals(**totals), "history": history}
        return cls(**{field_by_key[key]: value for key, value in values.items()})


def _parse_record(record: Any) -> EpochRecord:
    """Return a validated record of an epoch; means may be NaN."""
    if not isinstance(record, dict) or "epoch" not in record:
        raise ValueError("an epoch's record must be a mapping with an 'epoch' field")
    for name, value in record.items():
        if name in ("epoch", "step", "bytes_sent", "bytes_summed"):
            require_json_integer(f"'{name}' of an epoch's record", value)
        elif name == "stage":
            require_json_type("'stage' of an epoch's record", value, str)
        else:
            _require_record_numbers(name, value)
    return EpochRecord(record)


def _require_record_numbers(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError unless a value of a record is a number, None, or up to two nested lists or mappings of these."""
    if type(value) in (list, dict) and depth < 2:
        for item in value.values() if type(value) is dict else value:
            _require_record_numbers(name, item, depth + 1)
    elif value is not None and type(value) not in (int, float):
        raise ValueError(f"'{name}' of an epoch's record is not a number")
    elif type(value) is int and abs(value) >= MAX_EXACT_INTEGER:
        raise ValueError(f"'{name}' of an epoch's record is too large")


@dataclass(frozen=True)
class CheckpointSchedule:
    """Schedule of checkpoints, in addition to the final one.

    Attributes
    ----------
    every_steps, every_epochs : int, optional
        Interval in steps or epochs; `from_fields` sets `every_epochs` to 1 if no interval is given.
    every_minutes : float, optional
        Interval in minutes since the last checkpoint, checked after each step.
    keep : int
        Number of recent checkpoints to keep; if more than one, each is also written as checkpoint-STEP.h5.
    """

    every_steps: Count | None = None
    every_epochs: Count | None = None
    every_minutes: Positive | None = None
    keep: Count = 1

    @classmethod
    def from_fields(cls, fields: Mapping[str, float | int | None] | None) -> CheckpointSchedule:
        """Parse the field `checkpoint` of an experiment; raise ConfigError if the field is invalid."""
        if not isinstance(fields, Mapping | None):
            raise ConfigError(
                f"checkpoint: {fields!r} is invalid; expected a mapping such as {{every_steps: 500, keep: 3}}"
            )
        values: dict[str, Any] = {key: value for key, value in (fields or {}).items() if value is not None}
        hints = resolve_type_hints(cls)
        for key in values:
            if key not in hints:
                raise ConfigError(f"checkpoint: unknown key '{key}'{suggest(str(key), hints)}")
            check_value(f"checkpoint: {key}", values[key], hints[key])
        if not any(key.startswith("every") for key in values):
            values["every_epochs"] = 1
        return cls(**values)

    def is_due_after_step(self, step: int, previous_step: int) -> bool:
        """Return whether a checkpoint is due after any step from `previous_step` + 1 to `step`."""
        return self.every_steps is not None and step // self.every_steps > previous_step // self.every_steps

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after `epoch` epochs."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0


class Checkpoint(Hook):
    """Write a checkpoint whenever one is due and at the end; the old one is kept until the new one is on disk.

    Parameters
    ----------
    path : path
        Path of the newest checkpoint. Rank 0 writes it and receives the parts of other ranks in blocks.
    schedule : CheckpointSchedule, optional
        Default: every epoch.
    yaml_text : str, optional
        Text of experiment.yaml, stored in the checkpoint.
    """

    def __init__(self, path: Path, schedule: CheckpointSchedule | None = None, yaml_text: str | None = None) -> None:
        self.path, self.yaml_text = path, yaml_text
        self.schedule = schedule or CheckpointSchedule.from_fields(None)
        self.last_written_position = (-1, -1, -1)
        self.last_checkpoint_time, self.last_seen_step = time.monotonic(), 0

    def before_run(self, run: TrainState) -> None:
        """Write a first checkpoint, to detect an unwritable folder before the first epoch."""
        self.last_written_position, self.last_seen_step = _run_position(run), run.step
        self.last_checkpoint_time = time.monotonic()
        if run.step == 0 or run.model.whole_model.remote_update is not None:  # servers may have a newer state
            self.save(run)

    def after_step(self, run: TrainState) -> None:
        """Write a checkpoint if one is due within the epoch."""
        is_epoch_end = run.samples_seen >= run.epoch_size
        previous_step, self.last_seen_step = self.last_seen_step, run.step
        if not (is_epoch_end and self.schedule.is_due_after_epoch(run.epoch + 1)) and (
            self.schedule.is_due_after_step(run.step, previous_step) or self._is_due_by_time(run)
        ):
            self.save(run)

    def after_epoch(self, run: TrainState) -> None:
        """Write a checkpoint if one is due."""
        if self.schedule.is_due_after_epoch(run.epoch):
            self.save(run)

    def after_run(self, run: TrainState) -> None:
        """Write the final state, unless it is already written."""
        if not self.is_current_step_written(run):
            self.save(run)

    def on_stop(self, run: TrainState) -> None:
        """Write a checkpoint of this step, unless it is already written."""
        self.after_run(run)

    def save(self, run: TrainState, from_servers: bool = True) -> None:
        """Write a checkpoint now, of the current state of the parameter servers if `from_servers`. Collective.

        Raises
        ------
        OutputError
            On every rank, if the checkpoint cannot be written; the previous one is kept.
        """
        if from_servers and (remote := run.model.whole_model.remote_update) is not None:
            remote.pull_values_and_optimizer_state()
        write_checkpoint(
            self.path, *self.collect_checkpoint_contents(run), run.grid.world, self.schedule.keep, run.step
        )
        self.last_written_position, self.last_checkpoint_time = _run_position(run), time.monotonic()

    def is_current_step_written(self, run: TrainState) -> bool:
        """Return whether the last checkpoint was written at the current step."""
        return self.last_written_position == _run_position(run)

    def collect_checkpoint_contents(self, run: TrainState) -> tuple[list[ArrayPart], dict[str, str]]:
        """Return the arrays and texts of a checkpoint of this step. Collective."""
        texts = {
            "position": RunProgress.from_run(run).to_json(),
            **run.checkpoint_texts(),
            "experiment": self.yaml_text or "",
            "written by": f"neondist {__version__}, {run.grid.shape}",
        }
        model, world = run.model.whole_model, run.grid.world
        scheme_state = collect_scheme_state(model.exchanged_arrays, _scheme_compatibility_key(run), world)
        if scheme_state.json_text:
            texts[SCHEME_STATE_TEXT_NAME] = scheme_state.json_text
        return [*_checkpoint_array_parts(run), *scheme_state.pieces, *sync_state_parts(model.sync_states, world)], texts

    def _is_due_by_time(self, run: TrainState) -> bool:
        """Return whether `every_minutes` have passed by rank 0's clock. Collective."""
        interval_minutes = self.schedule.every_minutes
        return interval_minutes is not None and bool(
            run.grid.world.bcast(time.monotonic() - self.last_checkpoint_time >= 60 * interval_minutes)
        )


def restore_checkpoint(path: Path, run: TrainState, reading_rank: int = 0, remedy: str = "run without resume") -> None:
    """Restore `run` from a file that the rank `reading_rank` reads. Collective.

    Parameters
    ----------
    remedy : str
        Remedy in the message if the file does not match.

    Raises
    ------
    DataError
        On every rank, if the file is missing, damaged, or belongs to another model or seed.
    """
    model, world = run.model.whole_model, run.grid.world
    with open_checkpoint(path, world, reading_rank) as file:
        progress = read_run_progress(file)
        for group, arrays in run.model.checkpoint_arrays(file.contents.group("optimizer")).items():
            expected_shapes = {shard.full_name: tuple(shard.parameter.shape) for shard, _ in arrays}
            _require_same_shapes(path, file.contents.group(group), expected_shapes, remedy)
        try:
            progress.apply_to(run)
            run.restore_checkpoint_texts(file.contents.texts)
        except (DataError, ValueError) as problem:
            raise DataError(f"{path}: {problem}, or {remedy}") from None
        parts = _checkpoint_array_parts(run)
        file.fill_parts(parts)
        messages = (
            _describe_conversion(file.contents, parts),
            restore_scheme_state(file, model.exchanged_arrays, _scheme_compatibility_key(run), world),
            restore_sync_state(file, model.sync_states, world),
        )
        run.start_messages += filter(None, messages)


def read_checkpoint_step(path: Path, world: Transport) -> int:
    """Return the step of a checkpoint, or -1 if the file is missing or damaged. Collective."""
    try:
        with open_checkpoint(path, world) as file:
            return read_run_progress(file).step
    except DataError:
        return -1


def read_run_progress(file: CheckpointReader) -> RunProgress:
    """Return the progress of the run that wrote a checkpoint; raise DataError if the file does not record it."""
    try:
        if "position" not in file.contents.texts:
            raise ValueError("it has no entry 'position'")
        return RunProgress.from_json(file.contents.texts["position"])
    except ValueError as problem:
        path = file.contents.path
        raise DataError(f"{path}: does not record the progress of its run ({problem}); specify another file") from None


def _describe_conversion(contents: CheckpointContents, parts: Iterable[ArrayPart]) -> str:
    """Return a message to the user if values in a checkpoint were converted to another dtype; '' if none were."""
    dtype_pairs = {(str(contents.dtypes[part.name]), str(part.dtype)) for part in parts}
    changes = [f"{old} to {new}" for old, new in sorted(dtype_pairs) if old != new]
    note = "results differ from those of an uninterrupted run"
    return f"the values of the checkpoint were converted from {' and '.join(changes)}: {note}" if changes else ""


def _checkpoint_array_parts(run: TrainState) -> list[ArrayPart]:
    return [ArrayPart.of(*pair, group) for group, arrays in run.model.checkpoint_arrays().items() for pair in arrays]


def _scheme_compatibility_key(run: TrainState) -> str:
    """Return a text that must be equal in both runs for border schemes to resume from their stored arrays."""
    schemes = {name: scheme_text(scheme) for name, scheme in run.model.whole_model.schemes.items()}
    distinct = sorted(set(schemes.values()))
    schemes_text = distinct[0] if len(distinct) == 1 else ", ".join(f"{n}: {scheme}" for n, scheme in schemes.items())
    shape = run.grid.shape
    tiles = f"{shape.planes} x {shape.rows} x {shape.cols}" if shape.planes > 1 else f"{shape.rows} x {shape.cols}"
    return f"{tiles} tiles, {counted(shape.replicas, 'replica')}, batches of {run.batch_size}, scheme {schemes_text}"


def _run_position(run: TrainState) -> tuple[int, int, int]:
    return run.step, run.epoch, run.samples_seen


def _require_same_shapes(
    path: Path, stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], remedy: str
) -> None:
    """Raise DataError if the file and the model differ in names or shapes."""
    for name in sorted({*stored, *expected}):
        actual, shape = (list(shapes[name]) if name in shapes else "nothing" for shapes in (stored, expected))
        if actual != shape:
            raise DataError(
                f"{path}: belongs to another model or optimiser: the file has {actual} for '{name}', but this run has"
                f" {shape}; resume with the experiment that wrote it, or {remedy}"
            )
