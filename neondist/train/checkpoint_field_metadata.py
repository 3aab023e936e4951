"""Metadata of physical fields in checkpoints: names and units of channels, and normalisation of targets."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..data import Dataset
from ..formats.fields import FieldChannel, FieldMetadata
from ..formats.month_step import MonthStep
from ..io.checkpoint.texts import parse_json, require_json_integer, require_json_type, suggest_another_checkpoint
from ..terminal.console import counted

FIELDS_TEXT_NAME = "fields"
_RELATIVE_TIME_STEP_TOLERANCE = 0.2  # months have 28 to 31 days


def field_metadata_from_texts(texts: Mapping[str, str]) -> FieldMetadata:
    """Return the metadata in the texts of a checkpoint; raise ValueError if missing or invalid."""
    if FIELDS_TEXT_NAME not in texts:
        raise ValueError("has no variable names; specify a checkpoint of a network trained on ClimateFiles")
    with suggest_another_checkpoint():
        return _parse_field_metadata(parse_json(texts[FIELDS_TEXT_NAME], dict))


def _parse_field_metadata(values: dict[str, Any]) -> FieldMetadata:
    input_names, input_units, output_names, output_units = (
        _parse_names(values, name) for name in ("inputs", "input_units", "outputs", "units")
    )
    if len(input_names) != len(input_units) or len(output_names) != len(output_units):
        raise ValueError("does not record the units of all its variables")
    mean, std = (_parse_numbers(values, name, len(output_names)) for name in ("mean", "std"))
    if (std <= 0).any():
        raise ValueError("'std' is not positive")
    (step_seconds,) = _parse_numbers({"step": [values.get("step")]}, "step", 1).tolist()
    directions = _parse_names(values, "order") if "order" in values else ["", ""]
    if len(directions) != 2:
        raise ValueError("'order' does not have two names")
    lead_steps = require_json_integer("'lead'", values.get("lead"))
    month_values = require_json_type("'month_step'", values.get("month_step") or {}, dict)
    month_step = None
    if month_values:
        num_months = require_json_integer("'months'", month_values.get("months"))
        stamps = _parse_stamps(require_json_type("'stamps'", month_values.get("stamps"), list))
        period = require_json_integer("'period'", month_values.get("period"))
        month_step = MonthStep(num_months, require_json_type("'place'", month_values.get("place"), str), stamps, period)
    channels = [FieldChannel(name, name, units=unit) for name, unit in zip(output_names, output_units, strict=True)]
    return FieldMetadata(
        "", channels, (), mean=mean, std=std, input_names=input_names, input_units=input_units, lead_steps=lead_steps,
        time_step_seconds=step_seconds, month_step=month_step, coordinate_directions=(directions[0], directions[1]),
    )  # fmt: skip


def check_channels_and_times(
    recorded: FieldMetadata,
    input_names: Sequence[str],
    input_units: Sequence[str],
    lead_steps: int,
    time_step_seconds: float,
    coordinate_directions: tuple[str, str],
) -> None:
    """Raise ValueError, with the first difference, if channels, times or axes do not match those of a checkpoint.

    `time_step_seconds` is 0, and `coordinate_directions` are empty, if unknown.
    """
    _require_same_channels("inputs", recorded.input_names, input_names)
    for name, trained, actual in zip(input_names, recorded.input_units, input_units, strict=True):
        if trained != actual:
            raise ValueError(
                f"was trained with {name} in '{trained}', but the files have it in '{actual}'; convert the files"
            )
    if lead_steps != recorded.lead_steps:
        raise ValueError(
            f"was trained with lead: {recorded.lead_steps}, but the experiment has lead: {lead_steps};"
            f" set lead: {recorded.lead_steps}"
        )
    trained_seconds = recorded.time_step_seconds
    tolerance_seconds = _RELATIVE_TIME_STEP_TOLERANCE * trained_seconds
    if time_step_seconds and abs(time_step_seconds - trained_seconds) > tolerance_seconds:
        raise ValueError(
            f"was trained with time steps of {trained_seconds / 3600:g} hours, but the files have"
            f" {time_step_seconds / 3600:g}; select times with the same spacing"
        )
    for axis, trained, actual in zip(
        ("latitudes", "longitudes"), recorded.coordinate_directions, coordinate_directions, strict=True
    ):
        if trained and actual and trained != actual:
            raise ValueError(f"was trained with {trained} {axis}, but the files have {actual} ones; reverse that axis")


def field_metadata_texts(fields: FieldMetadata | None) -> dict[str, str]:
    """Return the metadata as {name of the text in a checkpoint: JSON}; {} if targets are not fields."""
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
        "step": fields.time_step_seconds,
        "month_step": None if fields.month_step is None else asdict(fields.month_step),
        "order": list(fields.coordinate_directions),
    }
    return {FIELDS_TEXT_NAME: json.dumps(values)}


def restore_field_normalisation(texts: Mapping[str, str], fields: FieldMetadata) -> FieldMetadata:
    """Return the metadata of fields with the output mean and standard deviation of a checkpoint.

    Raises
    ------
    ValueError
        The checkpoint's channels, units, times or axis directions differ (the message names the first difference), or
        are not recorded.
    """
    recorded = field_metadata_from_texts(texts)
    check_channels_and_times(
        recorded,
        fields.input_names,
        fields.input_units,
        fields.lead_steps,
        fields.time_step_seconds,
        fields.coordinate_directions,
    )
    _require_same_channels("outputs", recorded.names, fields.names)
    return replace(fields, mean=recorded.mean, std=recorded.std)


def restore_dataset_normalisation(texts: Mapping[str, str], dataset: Dataset) -> None:
    """Set the normalisation of an open data set of physical fields to that of a checkpoint; leave other data unchanged.

    Raises the errors of `restore_field_normalisation`, and ValueError if the factors are invalid.
    """
    for split in dataset.splits.values():
        if split.fields is not None:
            split.fields = restore_field_normalisation(texts, split.fields)
            num_channels = len(split.factor_and_subtrahend[0])
            with suggest_another_checkpoint():
                image_values = parse_json(texts.get("images", "{}"), dict)
                factor, offset = (_parse_numbers(image_values, name, num_channels) for name in ("factor", "offset"))
                if (factor == 0).any():
                    raise ValueError("'factor', the normalisation factor of images, is 0")
            split.normalise(offset / factor, 1 / factor)


def _require_same_channels(kind: str, trained: Sequence[str], actual: Sequence[str]) -> None:
    max_length = max(len(trained), len(actual))
    actual_names, trained_names = ([*names, *["nothing"] * (max_length - len(names))] for names in (actual, trained))
    for at, (a, b) in enumerate(zip(actual_names, trained_names, strict=True)):
        if a != b:
            raise ValueError(
                f"belongs to another network: channel {at} of its {kind} is '{b}', but the experiment has '{a}';"
                " set the variables, levels and steps with which the network was trained"
            )


def _parse_names(json_object: dict[str, Any], key: str) -> list[str]:
    names = require_json_type(f"'{key}'", json_object.get(key), list)
    return [require_json_type(f"a name of '{key}'", item, str) for item in names]


def _parse_stamps(rows: list[Any]) -> tuple[tuple[int, int, float], ...]:
    stamps = []
    for row in rows:
        month, days, seconds = _parse_numbers({"stamps": row}, "stamps", 3).tolist()
        stamps.append((int(month), int(days), seconds))
    return tuple(stamps)


def _parse_numbers(json_object: dict[str, Any], key: str, count: int) -> np.ndarray:
    values = require_json_type(f"'{key}'", json_object.get(key), list)
    if len(values) != count or not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in values):
        raise ValueError(f"'{key}' is not a list of {counted(count, 'number')}")
    return np.array(values, np.float64)
