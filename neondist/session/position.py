"""How far a run is: what a checkpoint needs beside arrays to go on at the very step."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..checkpoint.texts import LARGEST, of_kind, plain_json, whole
from ..errors import DataError
from .run import Record, Run, Totals


@dataclass(frozen=True)
class Position:
    """Progress of a run, independent of its grid.

    Attributes
    ----------
    epoch, step : epochs and updates that are complete
    seen : samples of the present epoch that are trained
    samples : samples of an epoch
    seed : of the order of the samples and of all random numbers
    totals : sums over the present epoch; `sent_before` and `summed_before` count all ranks' bytes
    history : one record per complete epoch
    uncounted : updates that the optimiser does not count; None in the files of version 0.1
    """

    epoch: int = 0
    step: int = 0
    seen: int = 0
    samples: int = 0
    seed: int = 0
    totals: Totals = field(default_factory=Totals)
    history: list[Record] = field(default_factory=list)
    uncounted: int | None = None

    @classmethod
    def of(cls, run: Run) -> Position:
        """Return where a run is; collective."""
        totals = run.totals
        sent, summed = totals.moved(run.grid)
        sums = Totals(totals.loss, totals.seconds, sent, skipped=totals.skipped, summed_before=summed)
        samples, model = len(run.dataset.train), run.model
        return cls(run.epoch, run.step, run.seen, samples, model.seed, sums, list(run.history), model.uncounted)

    def put(self, run: Run) -> None:
        """Let `run` go on from here.

        Raises
        ------
        DataError
            Its seed, or in the middle of an epoch its number of samples, is another.
        """
        if run.model.seed != self.seed:
            raise DataError(
                f"was written with seed {self.seed}, the experiment has {run.model.seed}, so it would go on with other"
                f" random numbers; set seed: {self.seed}"
            )
        if self.seen and len(run.dataset.train) != self.samples:
            raise DataError(
                f"was written in the middle of an epoch of {self.samples} samples, the data set has"
                f" {len(run.dataset.train)}; resume with the same data"
            )
        run.epoch, run.seen, run.model.step = self.epoch, self.seen, self.step
        run.totals, run.history = replace(self.totals), list(self.history)
        known = run.model.uncounted_by(self.history) if self.uncounted is None else self.uncounted
        run.model.uncounted = min(known, self.step)

    def to_json(self) -> str:
        """Return this as text; floats keep every bit."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Return what `to_json` wrote; ValueError, which says what is wrong, if it is something else."""
        values = plain_json(text, dict)
        known = {one.name for one in fields(cls)}
        if not known - {"uncounted"} <= set(values) <= known:
            raise ValueError("its fields are others")
        totals = of_kind("'totals'", values["totals"], dict)
        if set(totals) != {one.name for one in fields(Totals)}:
            raise ValueError("'totals' has other fields")
        for name in ("epoch", "step", "seen", "samples", "seed", "uncounted"):
            if name != "uncounted" or values.get(name) is not None:
                whole(f"'{name}'", values[name])
        for name, value in totals.items():
            if name in ("loss", "seconds"):
                _number(f"totals.{name}", value)
            else:
                whole(f"'totals.{name}'", value)
        if (values.get("uncounted") or 0) > values["step"]:
            raise ValueError("'uncounted' is more than 'step'")
        if values["seen"] > values["samples"]:
            raise ValueError("'seen' is more than an epoch has")
        history = [_record(record) for record in of_kind("'history'", values["history"], list)]
        return cls(**values | {"totals": Totals(**totals), "history": history})


def _number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"'{name}' is no finite number")


def _record(record: Any) -> Record:
    """Return an epoch's record, after checking what the loop and its hooks read of it; a mean of nothing is NaN."""
    if not isinstance(record, dict) or "epoch" not in record:
        raise ValueError("an epoch's record has other fields")
    for name, value in record.items():
        if name in ("epoch", "step", "bytes_sent", "bytes_summed"):
            whole(f"'{name}' of an epoch's record", value)
        elif value is not None and type(value) not in ((str,) if name == "stage" else (int, float)):
            raise ValueError(f"'{name}' of an epoch's record is no number")
        elif type(value) is int and abs(value) >= LARGEST:
            raise ValueError(f"'{name}' of an epoch's record is too large")
    return Record.of(record)
