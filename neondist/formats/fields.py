"""Metadata of physical fields on a grid: names and units of channels, and the places of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Channel:
    """One channel of fields: a variable, or one level of it.

    Attributes
    ----------
    name : 't2m', or of a level 'z500'
    variable : of the file
    level : number of the level in the file, and its value; None where there is none
    units : '' where the file has none
    attributes : those of the variable
    """

    name: str
    variable: str
    level: tuple[int, float] | None = None
    units: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fields:
    """The channels that a network is to give, in which scale it gives them, and where their cells lie.

    Attributes
    ----------
    source : str
        A file that has them, as messages name it.
    channels : sequence of Channel
    extent : (H, W), global
    latitude : array (H,) or (H, W), or None
        In degrees.
    mean, std : array (C,)
        Of the training range: a network gives (x - mean) / std.
    climatology : array (*tile, C), or None
        The mean over the training range of each cell that this rank owns, in physical units.
    inputs : sequence of str
        The names of the channels that the network is given.
    input_units : sequence of str
    lead : int
        How many times after the last of its images a target is.
    step : float
        Seconds from time to time.
    order : (str, str)
        Whether coordinates of rows and columns are 'ascending' or 'descending'; '' where that is not known.
    """

    source: str
    channels: Sequence[Channel]
    extent: tuple[int, ...]
    latitude: np.ndarray | None = None
    mean: np.ndarray = field(default_factory=lambda: np.zeros(1))
    std: np.ndarray = field(default_factory=lambda: np.ones(1))
    climatology: np.ndarray | None = None
    inputs: Sequence[str] = ()
    input_units: Sequence[str] = ()
    lead: int = 0
    step: float = 0.0
    order: tuple[str, str] = ("", "")

    @property
    def names(self) -> list[str]:
        """The names of the channels."""
        return [channel.name for channel in self.channels]
