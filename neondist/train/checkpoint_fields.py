"""Metadata of fields in checkpoints: names of channels, and the normalisation of targets."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..data import Dataset
from ..formats.fields import FieldMetadata
from ..formats.month_step import MonthStep
from ..io.checkpoint.texts import parse_json, require_json_integer, require_json_type
from ..terminal.console import counted

TEXT_NAME = "fields"
_TIME_STEP_TOLERANCE = 0.2  # months are of 28 to 31 days


@dataclass(frozen=True)
class CheckpointFields:
    """Metadata of fields in a checkpoint.

    Attributes
    ----------
    input_names, input_units : names and units of the input channels
    output_names, output_units, mean, std : of the output channels
    lead : times from the last of an image to its target
    time_step : seconds from time to time
    month_step : the time step in calendar months; None if it is not constant
    axis_orders : of the coordinates of rows and columns, as in `FieldMetadata`
    """

    input_names: list[str]
    input_units: list[str]
    output_names: list[str]
    output_units: list[str]
    mean: np.ndarray
    std: np.ndarray
    lead: int
    time_step: float
    axis_orders: tuple[str, str] = ("", "")
    month_step: MonthStep | None = None

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> CheckpointFields:
        """Parse the texts of a checkpoint; ValueError with the reason if they are invalid."""
        if TEXT_NAME not in texts:
            raise ValueError("has no variable names; specify a checkpoint of a network trained on ClimateFiles")
        values = parse_json(texts[TEXT_NAME], dict)
        inputs, input_units, outputs, units = (
            _require_names(values, name) for name in ("inputs", "input_units", "outputs", "units")
        )
        if len(inputs) != len(input_units) or len(outputs) != len(units):
            raise ValueError("does not record the units of all its variables")
        mean, std = (_require_numbers(values, name, len(outputs)) for name in ("mean", "std"))
        if (std <= 0).any():
            raise ValueError("'std' is not positive")
        (step,) = _require_numbers({"step": [values.get("step")]}, "step", 1).tolist()
        order = _require_names(values, "order") if "order" in values else ["", ""]
        if len(order) != 2:
            raise ValueError("'order' does not have two names")
        lead = require_json_integer("'lead'", values.get("lead"))
        months = require_json_type("'month_step'", values.get("month_step") or {}, dict)
        month_step = (
            MonthStep(
                require_json_integer("'months'", months.get("months")),
                require_json_type("'place'", months.get("place"), str),
            )
            if months
            else None
        )
        return cls(inputs, input_units, outputs, units, mean, std, lead, step, (order[0], order[1]), month_step)

    def to_physical_units(self, y: np.ndarray) -> np.ndarray:
        """Return outputs (..., C) of the network in the units of the files."""
        return np.asarray(y * self.std + self.mean)

    def check_compatible(
        self,
        inputs: Sequence[str],
        input_units: Sequence[str],
        lead: int,
        step: float,
        order: tuple[str, str] = ("", ""),
    ) -> None:
        """Raise ValueError, with the first difference, if channels or times do not match the network's.

        `step` may be 0, and `order` empty, if they are not known.
        """
        _require_same("inputs", self.input_names, inputs)
        for name, trained, actual in zip(inputs, self.input_units, input_units, strict=True):
            if trained != actual:
                raise ValueError(
                    f"was trained with {name} in '{trained}', but the files have it in '{actual}'; convert them"
                )
        if lead != self.lead:
            raise ValueError(f"was trained with lead: {self.lead}, but the experiment has lead: {lead}; give the same")
        if step and abs(step - self.time_step) > _TIME_STEP_TOLERANCE * self.time_step:
            raise ValueError(
                f"was trained with time steps of {self.time_step / 3600:g} hours, but the files have {step / 3600:g};"
                " select times with the same spacing"
            )
        for axis, trained, actual in zip(("latitudes", "longitudes"), self.axis_orders, order, strict=True):
            if trained and actual and trained != actual:
                raise ValueError(
                    f"was trained with {trained} {axis}, but the files have {actual} ones; reverse that axis"
                )


def field_texts(fields: FieldMetadata | None) -> dict[str, str]:
    """Return the text for a checkpoint; {} if targets are not fields."""
    if fields is None:
        return {}
    values = {
        "inputs": list(fields.input_names),
        "input_units": list(fields.input_units),
        "outputs": fields.names,
        "units": [channel.units for channel in fields.channels],
        "mean": fields.mean.tolist(),
        "std": fields.std.tolist(),
        "lead": fields.lead_steps,
        "step": fields.step_seconds,
        "month_step": None if fields.month_step is None else asdict(fields.month_step),
        "order": list(fields.axis_orders),
    }
    return {TEXT_NAME: json.dumps(values)}


def restore_fields(texts: Mapping[str, str], fields: FieldMetadata) -> FieldMetadata:
    """Return fields with the mean and std of a checkpoint.

    Raises
    ------
    ValueError
        Its channels differ, with the first name that differs, or are not recorded.
    """
    values = CheckpointFields.from_texts(texts)
    values.check_compatible(
        fields.input_names, fields.input_units, fields.lead_steps, fields.step_seconds, fields.axis_orders
    )
    _require_same("outputs", values.output_names, fields.names)
    return replace(fields, mean=values.mean, std=values.std)


def restore_dataset_fields(texts: Mapping[str, str], dataset: Dataset) -> None:
    """Set the normalisation of an open data set to a checkpoint's; ValueError as `restore_fields`."""
    for split in dataset.splits.values():
        if split.fields is not None:
            split.fields = restore_fields(texts, split.fields)
            images = parse_json(texts.get("images", "{}"), dict)
            count = len(split.factor_and_subtrahend[0])
            factor, offset = (_require_numbers(images, name, count) for name in ("factor", "offset"))
            if (factor == 0).any():
                raise ValueError("'factor' is 0")
            split.normalise(offset / factor, 1 / factor)


def _require_same(kind: str, trained: Sequence[str], actual: Sequence[str]) -> None:
    longest = max(len(trained), len(actual))
    expected, other = ([*names, *["nothing"] * (longest - len(names))] for names in (actual, trained))
    for at, (a, b) in enumerate(zip(expected, other, strict=True)):
        if a != b:
            raise ValueError(
                f"belongs to another network: channel {at} of its {kind} is '{b}', but the experiment has '{a}';"
                " give the variables, levels and steps of its training"
            )


def _require_names(recorded: dict[str, Any], name: str) -> list[str]:
    names = require_json_type(f"'{name}'", recorded.get(name), list)
    return [require_json_type(f"a name of '{name}'", item, str) for item in names]


def _require_numbers(recorded: dict[str, Any], name: str, count: int) -> np.ndarray:
    values = require_json_type(f"'{name}'", recorded.get(name), list)
    if len(values) != count or not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in values):
        raise ValueError(f"'{name}' is not a list of {counted(count, 'number')}")
    return np.array(values, np.float64)
