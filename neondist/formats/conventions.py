"""Inference of axes from attributes of coordinates (CF, NUG, Common Data Model), or else from names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import AmbiguousAxesError, DataError

SAMPLE_AXIS_LETTERS = "NMLKJHGFE"  # letters for axes that count as samples
_ROW_COLUMN_LETTERS = {"Y", "X"}
MAX_COORDINATE_BYTES = 1 << 28  # larger coordinates are not copied into an output
REFERENCE_ATTRIBUTES = ("coordinates", "bounds", "climatology", "grid_mapping", "cell_measures", "formula_terms")
"""attributes that name other variables"""
AXIS_ATTRIBUTES = ("axis", "units", "standard_name", "positive", "cartesian_axis", "_CoordinateAxisType", "long_name")
"""attributes of a coordinate that identify its axis"""
POSITION_ATTRIBUTES = (*REFERENCE_ATTRIBUTES, "cell_methods")
"""attributes of a variable that describe the position and meaning of its cells"""

_LETTER_BY_COORDINATE_TYPE = {
    "time": "T", "runtime": "N", "ensemble": "N", "lat": "Y", "geoy": "Y", "lon": "X", "geox": "X", "height": "Z",
    "pressure": "Z", "geoz": "Z", "channel": "C",
}  # fmt: skip
_STANDARD_NAMES = {
    "T": r"time",
    "N": r"realization|forecast_reference_time|forecast_period",
    "C": r"radiation_(wavelength|frequency|wavenumber)|sensor_band_(identifier|central_\w+)",
    "Y": r"latitude|grid_latitude|projection_y_(angular_)?coordinate",
    "X": r"longitude|grid_longitude|projection_x_(angular_)?coordinate",
    "Z": r"depth|height|altitude|geopotential_height|air_pressure|sea_water_pressure|model_level_number|"
    r"(height|depth|altitude)_(above|below)_\w+|(atmosphere|ocean)_\w*(sigma|coordinate|s_coordinate)\w*|"
    r"\w*_(height|depth|altitude)_coordinate|air_potential_temperature",
}
_UNIT_PATTERNS = {
    "T": r".+ (since|as) .+",
    "Y": r"degrees?_?n(orth)?",
    "X": r"degrees?_?e(ast)?",
    "Z": r"[hdkm]?pa|[hk]?pascals?|(deci|milli|[dm])?bars?|atm|atmospheres?|level|layer|sigma_level",
}
_NAME_PATTERNS = {
    "-": r"nv|nb2|bnds|n?bounds?|n?_?vert(ex|ices)|axis_nbounds|corners?|n?char\w*|str(ing)?_?len\w*|string\d+",
    "C": r"c|channels?|bands?|n_?bands?|number_of_bands|variables?|rgba?|wave_?(length|number)s?|spectral_bands?",
    "N": r"n|samples?|realization|ensemble\w*|members?|(n_?)?ens|number|batch",
    "T": r"t|dates?|(\w*_)?times?(_counter|_?\d+)?(_hours)?|months?|years?|days?|hours?",
    "Z": r"z|z[liwtuv_]|z_?\d+|z_\w+|z_?axis\w*|k|s[tw]_ocean|hybrid\w*|p(full|half)|layers?|lv_\w+|plev\w*|"
    r"(nav_|model_|half_|full_|sigma_|soil_|\w+_)?n?_?lev(el)?s?(_?\d+|_\w+)?|depth\w*|(\w+_)?height\w*|altitude|"
    r"isobaric\w*|pressure\w*|pres\d*|bottom_top(_stag)?|s_(rho|w)|sigma\w*|n?vert\w*lev\w*|soil_layers\w*",
    "Y": r"y|y[chqtuv_]|(grid_)?y[tu]?_?\d*|y[tu]?_\w+|[yjn]_?axis\w*|j|jc|nj|ny|eta_\w+|south_north\w*|rows?|n_?rows?|"
    r"(?!flat)(\w*_|grid|geo|num|nb|rot|[a-z])?lat(itude)?s?(_?\d+|[ctuvq]|_\w+)?|northings?|projection_y_coordinate|"
    r"geolat\w*|(n_?|number_of_)?scan_?lines?|along_?track",
    "X": r"x|x[chqtuv_]|(grid_)?x[tu]?_?\d*|x[tu]?_\w+|x_?axis\w*|i|ic|ni|nx|xi_\w+|west_east\w*|col(umn)?s?|"
    r"(?!along)(\w*_|grid|geo|num|nb|rot|[a-z])?lon(g|gitude)?s?(_?\d+|[ctuvq]|_\w+)?|eastings?|projection_x_coordinate|"
    r"geolon\w*|n_?col(umn)s?|ground_pixels?|a?cross_?track|x_?track|width",
}


@dataclass(frozen=True)
class VariableMetadata:
    """Names and attributes from which the axes of a variable are inferred.

    Attributes
    ----------
    dimensions : tuple of str
        Names of the dimensions; '' for an unnamed one.
    attributes : mapping
        Attributes by name, text as str.
    coordinates : mapping
        Coordinate variables by name: those named like dimensions, and those listed in the attribute `coordinates`.
    """

    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinates: Mapping[str, VariableMetadata] = field(default_factory=dict)


@dataclass(frozen=True)
class AuxiliaryVariable:
    """A variable that another variable refers to: coordinates of a dimension or of cells, bounds, a projection.

    Attributes
    ----------
    name : str
        '' for the variable itself, '/' for its file.
    dimensions : tuple of str
        Names of its dimensions.
    values : numpy.ndarray, or None
        None for a dimension without coordinates.
    attributes : dict
        Attributes by name: numbers unchanged, text as bytes.
    unreadable_attributes : tuple of str
        Names of attributes that cannot be read.
    """

    name: str
    dimensions: tuple[str, ...]
    values: np.ndarray | None
    attributes: dict[str, Any]
    unreadable_attributes: tuple[str, ...] = ()


def unreadable_attribute_message(attribute: str, variable: str) -> str:
    """Return the error message, including the remedy, for an attribute of variable-length text."""
    return (
        f"{attribute} as variable-length text, which is not supported; write it as characters, for instance: ncatted -a"
        f" {attribute},{variable},o,c,TEXT FILE"
    )


def list_metadata_names(variables: Sequence[AuxiliaryVariable], unreadable: Sequence[str]) -> list[str]:
    """Return the names of auxiliary variables and attributes of an array, including `unreadable` ones."""
    attribute_names = [name for one in variables if one.name in ("", "/") for name in one.attributes]
    return [*(one.name for one in variables if one.values is not None), *attribute_names, *unreadable]


def load_auxiliary_variables(
    own_attributes: Mapping[str, Any], dimensions: Sequence[AuxiliaryVariable], load: Callable[[str], AuxiliaryVariable]
) -> list[AuxiliaryVariable]:
    """Return a variable's attributes as entry '', its dimensions, and all variables that they refer to, recursively."""
    position_attributes = {name: own_attributes[name] for name in POSITION_ATTRIBUTES if name in own_attributes}
    variables = [AuxiliaryVariable("", (), None, position_attributes), *dimensions]
    while missing := sorted(
        {name for one in variables for name in referenced_variables(one.attributes)} - {one.name for one in variables}
    ):
        variables += [load(name) for name in missing]
    return variables


def referenced_variables(attributes: Mapping[str, Any]) -> list[str]:
    """Return the variables that attributes refer to: 'lat lon', 'crs: x y', 'area: areacella', 'ap: ap b: b ps: ps'."""
    names = []
    for key in REFERENCE_ATTRIBUTES:
        has_keys = key in ("cell_measures", "formula_terms")
        names += [word.strip(":") for word in split_words(attributes.get(key)) if not (has_keys and word.endswith(":"))]
    return names


def split_words(text: Any) -> list[str]:
    """Split a text attribute into words."""
    return attribute_text(text).split()


def attribute_text(value: Any) -> str:
    """Return a text attribute, given as bytes or str, as str; '' for other values."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def infer_axes(where: str, variable: VariableMetadata, shape: Sequence[int]) -> str:
    """Return a letter for each axis of a variable.

    Attributes of coordinates take precedence over names; remaining axes follow the order T Z Y X if it is unambiguous.

    Raises
    ------
    DataError
        If rows and columns are ambiguous; AmbiguousAxesError if no axis has a name.
    """
    names, ambiguity_error = variable.dimensions, partial(_ambiguity_error, where, variable.dimensions, shape)
    axes = _resolve_conflicts(names, [_infer_axis(name, variable, ambiguity_error) for name in names], ambiguity_error)
    _assign_curvilinear_axes(variable, axes)
    _assign_axes_by_order(axes)
    if "" in axes and not set(axes) >= _ROW_COLUMN_LETTERS:
        raise ambiguity_error("neither attributes nor names identify them")
    for at, letter in enumerate(axes):
        if letter in ("", "-"):
            axes[at] = next(free for free in SAMPLE_AXIS_LETTERS if free not in axes)
    return "".join(axes)


def _ambiguity_error(where: str, names: Sequence[str], shape: Sequence[int], reason: str) -> DataError:
    listed = ", ".join(name or "(no name)" for name in names)
    message = (
        f"{where}: cannot tell which of its axes ({listed}) are rows and columns ({reason}); give axes, one letter per"
        f" axis in the stored order, such as axes='{'TZYX'[-len(names) :] if len(names) < 5 else 'NTZYX'}', or give its"
        " coordinates the attribute axis (X, Y, Z or T)"
    )
    if any(names):
        return DataError(message)
    error = AmbiguousAxesError(message)
    error.shape = tuple(shape)
    return error


class _InferredAxis(NamedTuple):
    """Letter of an axis, '' if unknown, and the kind of evidence for it: 0 is the strongest."""

    letter: str
    evidence: int


def _infer_axis(name: str, variable: VariableMetadata, ambiguity_error: Callable[[str], DataError]) -> _InferredAxis:
    """Infer the axis of a dimension: by its coordinate (evidence 0), by listed coordinates (1), or by its name (2)."""
    own = variable.coordinates.get(name) if name else None
    own_attributes = own.attributes if own is not None else {}
    declared = _letters_from_attributes(own_attributes) if own is not None and own.dimensions[:1] == (name,) else set()
    if len(declared) > 1:
        raise ambiguity_error(f"the attributes of '{name}' imply {' and '.join(sorted(declared))}")
    listed_letters = _letters_from_listed_coordinates(name, variable) if name and not declared else set()
    if listed_letters >= _ROW_COLUMN_LETTERS:
        raise ambiguity_error(
            f"'{name}' has both latitudes and longitudes, so it lists points and is not an axis of a grid"
        )
    name_letters = _letters_from_name(name) or _letters_from_long_name(own_attributes)
    unreadable = [key for key in AXIS_ATTRIBUTES if own_attributes.get(key, "") is None]
    if unreadable and not (declared or listed_letters or name_letters):
        raise ambiguity_error(f"its coordinate '{name}' has {unreadable_attribute_message(unreadable[0], name)}")
    if name.lower() == "height" and "width" in map(str.lower, variable.dimensions):  # of a picture, not an altitude
        name_letters = {"Y"}
    for evidence, letters in enumerate((declared, listed_letters, name_letters)):
        if len(letters) == 1:
            return _InferredAxis(next(iter(letters)), evidence)
    return _InferredAxis("", 0)


def _resolve_conflicts(
    names: Sequence[str], inferred: Sequence[_InferredAxis], ambiguity_error: Callable[[str], DataError]
) -> list[str]:
    """Return the letter of each axis: '-' for an axis that counts as samples, '' if unknown."""
    axes = [one.letter for one in inferred]
    for letter in "TNC" + "ZYX":
        matching = [axis for axis, one in enumerate(inferred) if one.letter == letter]
        min_evidence = min((inferred[axis].evidence for axis in matching), default=0)
        best = [axis for axis in matching if inferred[axis].evidence == min_evidence]
        if len(best) > 1 and letter not in "TN":
            raise ambiguity_error(f"{' and '.join(repr(names[axis]) for axis in best)} are both {letter}")
        for axis in matching:
            axes[axis] = letter if axis == best[0] else "-"
    return axes


def _assign_curvilinear_axes(variable: VariableMetadata, axes: list[str]) -> None:
    """Fill in the axes of two-dimensional latitudes and longitudes, rows first."""
    for name in split_words(variable.attributes.get("coordinates")):
        coord = variable.coordinates.get(name)
        letters = (
            (_letters_from_attributes(coord.attributes) or _letters_from_name(name)) if coord is not None else set()
        )
        if coord is None or len(letters) != 1 or not letters <= _ROW_COLUMN_LETTERS:
            continue
        positions = [variable.dimensions.index(dim) for dim in coord.dimensions if dim and dim in variable.dimensions]
        positions = [at for at in positions if axes[at] in ("", "Y", "X")]
        if len(positions) == 2:
            _assign_row_and_column_axes(axes, positions)


def _assign_axes_by_order(axes: list[str]) -> None:
    """Fill in rows and columns by the order T Z Y X, if it is unambiguous."""
    unknown_axes = [axis for axis, letter in enumerate(axes) if not letter]
    if len(axes) == 1:
        axes[0] = axes[0] or "X"
    elif len(unknown_axes) == 2 and not _ROW_COLUMN_LETTERS & set(axes):
        _assign_row_and_column_axes(axes, unknown_axes)
    elif len(unknown_axes) == 1 and len(_ROW_COLUMN_LETTERS & set(axes)) == 1:
        (axis,) = unknown_axes
        is_adjacent = axes.index("Y") + 1 == axis if "Y" in axes else axis + 1 == axes.index("X")
        if is_adjacent or len(axes) == 2:
            axes[axis] = "X" if "Y" in axes else "Y"


def _assign_row_and_column_axes(axes: list[str], positions: list[int]) -> None:
    """Fill in missing rows and columns, rows first."""
    missing_letters = [letter for letter in "YX" if letter not in axes]
    for at in positions:
        if not axes[at] and missing_letters:
            axes[at] = missing_letters.pop(0)


def _letters_from_listed_coordinates(name: str, variable: VariableMetadata) -> set[str]:
    """Return the letters of a dimension implied by listed coordinates that vary along it alone."""
    listed_coords = [variable.coordinates.get(other) for other in split_words(variable.attributes.get("coordinates"))]
    coords_on_axis = [other for other in listed_coords if other is not None and other.dimensions == (name,)]
    return {letter for other in coords_on_axis for letter in _letters_from_attributes(other.attributes)} - {"N", "C"}


def _letters_from_attributes(attributes: Mapping[str, Any]) -> set[str]:
    """Return the letters implied by attributes of a coordinate; contradictory attributes imply more than one."""
    texts = {key: value.strip("\0 ") for key, value in attributes.items() if isinstance(value, str)}
    name_letters = {
        letter for letter, pattern in _STANDARD_NAMES.items() if re.fullmatch(pattern, texts.get("standard_name", ""))
    }
    if name_letters == {"N"}:
        return name_letters
    letters = {texts.get("axis", "").upper(), texts.get("cartesian_axis", "").upper()} & {*"TZYX"}
    letters |= {"N"} if texts.get("axis", "").upper() == "E" else set()
    type_letter = _LETTER_BY_COORDINATE_TYPE.get(texts.get("_CoordinateAxisType", "").lower())
    unit_letters = {
        letter for letter, pattern in _UNIT_PATTERNS.items() if re.fullmatch(pattern, texts.get("units", "").lower())
    }
    vertical_letters = {"Z"} if texts.get("positive", "").lower() in ("up", "down") else set()
    letters |= name_letters | unit_letters | ({type_letter} if type_letter else set()) | vertical_letters
    return letters - {"C"} if "C" in letters and len(letters) > 1 else letters


def _letters_from_name(name: str) -> set[str]:
    matches = (letter for letter, pattern in _NAME_PATTERNS.items() if re.fullmatch(pattern, name.lower()))
    return set(next(matches, ""))


def _letters_from_long_name(attributes: Mapping[str, Any]) -> set[str]:
    """Return the letter that the long_name of a coordinate implies: 'Longitude', 'x coordinate of projection'."""
    return _letters_from_name("_".join(split_words(attributes.get("long_name"))))
