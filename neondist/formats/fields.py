"""Metadata of physical fields on a grid: names and units of channels, and cell positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .month_step import MonthStep


@dataclass(frozen=True)
class FieldChannel:
    """One channel of fields: a variable, or one level of it.

    Attributes
    ----------
    name : 't2m', or 'z500' for a level
    variable : name of the variable in the file
    level : index of the level in the file and its value; None for variables without levels
    units : '' if the file has none
    attributes : attributes of the variable
    """

    name: str
    variable: str
    level: tuple[int, float] | None = None
    units: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FieldMetadata:
    """Output channels of a network, their normalisation, and their cell positions.

    Attributes
    ----------
    source : str
        A file with these fields, for messages; '' if unknown.
    channels : sequence of FieldChannel
    extent : (H, W), global; () if unknown
    latitude : array (H,) or (H, W), or None
        In degrees.
    mean, std : array (C,)
        Mean and standard deviation over the training range; the network predicts (x - mean) / std.
    climatology : array (*tile, C), or None
        Mean of each cell of this rank over the training range, in physical units.
    input_names : sequence of str
        Names of the input channels.
    input_units : sequence of str
    lead_steps : int
        Number of time steps from the last input to the target.
    time_step_seconds : float
        Length of a time step in seconds.
    month_step : MonthStep, optional
        The time step in calendar months, if it is constant.
    coordinates : mapping
        Coordinates of the rows, Y, and of the columns, X, where known.
    coordinate_directions : (str, str)
        Order of the coordinates of rows and of columns: 'ascending' or 'descending'; '' if unknown.
    """

    source: str
    channels: Sequence[FieldChannel]
    extent: tuple[int, ...]
    latitude: np.ndarray | None = None
    mean: np.ndarray = field(default_factory=lambda: np.zeros(1))
    std: np.ndarray = field(default_factory=lambda: np.ones(1))
    climatology: np.ndarray | None = None
    input_names: Sequence[str] = ()
    input_units: Sequence[str] = ()
    lead_steps: int = 0
    time_step_seconds: float = 0.0
    month_step: MonthStep | None = None
    coordinates: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    coordinate_directions: tuple[str, str] = ("", "")

    @property
    def names(self) -> list[str]:
        """The names of the channels."""
        return [channel.name for channel in self.channels]

    def to_physical_units(self, values: np.ndarray) -> np.ndarray:
        """Return outputs (..., C) of the network in the units of the files."""
        return np.asarray(values * self.std + self.mean)
