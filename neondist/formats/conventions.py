"""Axes by the attributes of coordinates (CF, NUG, Common Data Model), and by names where these say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import AxesError, DataError

FREE = "NMLKJHGFE"
"""letters of axes that are samples"""
_POINTS = {"Y", "X"}
LARGEST = 1 << 28
"""bytes of coordinates that are copied into an output"""
NAMING = ("coordinates", "bounds", "climatology", "grid_mapping", "cell_measures", "formula_terms")
"""attributes that name other variables"""
TELLING = ("axis", "units", "standard_name", "positive", "cartesian_axis", "_CoordinateAxisType", "long_name")
"""attributes of a coordinate that tell its axis"""
PLACE = (*NAMING, "cell_methods")
"""attributes of a variable that say of its cells where and what they are"""

_TYPES = {
    "time": "T", "runtime": "N", "ensemble": "N", "lat": "Y", "geoy": "Y", "lon": "X", "geox": "X", "height": "Z",
    "pressure": "Z", "geoz": "Z", "channel": "C",
}  # fmt: skip
_STANDARD = {
    "T": r"time",
    "N": r"realization|forecast_reference_time|forecast_period",
    "C": r"radiation_(wavelength|frequency|wavenumber)|sensor_band_(identifier|central_\w+)",
    "Y": r"latitude|grid_latitude|projection_y_(angular_)?coordinate",
    "X": r"longitude|grid_longitude|projection_x_(angular_)?coordinate",
    "Z": r"depth|height|altitude|geopotential_height|air_pressure|sea_water_pressure|model_level_number|"
    r"(height|depth|altitude)_(above|below)_\w+|(atmosphere|ocean)_\w*(sigma|coordinate|s_coordinate)\w*|"
    r"\w*_(height|depth|altitude)_coordinate|air_potential_temperature",
}
_UNITS = {
    "T": r".+ (since|as) .+",
    "Y": r"degrees?_?n(orth)?",
    "X": r"degrees?_?e(ast)?",
    "Z": r"[hdkm]?pa|[hk]?pascals?|(deci|milli|[dm])?bars?|atm|atmospheres?|level|layer|sigma_level",
}
_NAMES = {
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
class Variable:
    """Names and attributes that tell the axes of a variable of a file.

    Attributes
    ----------
    dimensions : tuple of str
        The name of each; '' where it has none.
    attributes : mapping
        Text as str.
    coordinates : mapping
        Name to Variable: those of its dimensions' names, and those that its attribute `coordinates` lists.
    """

    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinates: Mapping[str, Variable] = field(default_factory=dict)


@dataclass(frozen=True)
class AuxiliaryVariable:
    """A variable that another needs: the coordinates of a dimension or of cells, their bounds, a projection.

    Attributes
    ----------
    name : str
        '' is the variable itself, '/' its file.
    dimensions : tuple of str
        The names of its own.
    values : numpy.ndarray, or None
        None: a dimension without coordinates.
    attributes : dict
        Numbers, and text as bytes.
    unread : tuple of str
        The names of attributes that cannot be read.
    """

    name: str
    dimensions: tuple[str, ...]
    values: np.ndarray | None
    attributes: dict[str, Any]
    unread: tuple[str, ...] = ()


def unread_text(attribute: str, variable: str) -> str:
    """Return what is wrong with an attribute that is not text of fixed length, and the remedy."""
    return (
        f"{attribute} as variable-length text, which is not supported; write it as characters, for instance: ncatted -a"
        f" {attribute},{variable},o,c,TEXT FILE"
    )


def names_of(beside: Sequence[AuxiliaryVariable], lost: Sequence[str]) -> list[str]:
    """Return the names of what belongs to an array, and of what of it cannot be read."""
    of_file = [name for one in beside if one.name in ("", "/") for name in one.attributes]
    return [*(one.name for one in beside if one.values is not None), *of_file, *lost]


def collect(
    own: Mapping[str, Any], along: Sequence[AuxiliaryVariable], of: Callable[[str], AuxiliaryVariable]
) -> list[AuxiliaryVariable]:
    """Return what a variable needs: itself by its attributes, its dimensions, and what these name in turn."""
    found = [AuxiliaryVariable("", (), None, {name: own[name] for name in PLACE if name in own}), *along]
    while missing := sorted(
        {name for one in found for name in references(one.attributes)} - {one.name for one in found}
    ):
        found += [of(name) for name in missing]
    return found


def references(attributes: Mapping[str, Any]) -> list[str]:
    """Return the variables that attributes name: 'lat lon', 'crs: x y', 'area: areacella', 'ap: ap b: b ps: ps'."""
    found = []
    for key in NAMING:
        keyed = key in ("cell_measures", "formula_terms")
        found += [word.strip(":") for word in words(attributes.get(key)) if not (keyed and word.endswith(":"))]
    return found


def words(text: Any) -> list[str]:
    """Return the words of an attribute that is text."""
    return plain_text(text).split()


def plain_text(value: Any) -> str:
    """Return an attribute that is text, as bytes or str; '' for others."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def letters(where: str, variable: Variable, shape: Sequence[int]) -> str:
    """Return a letter for each axis of a variable.

    Attributes of coordinates come before names, and what neither tells follows from the order T Z Y X where that leaves
    one choice.

    Raises
    ------
    DataError
        It is unclear which axes are rows and columns; AxesError where none has a name.
    """
    names, found = variable.dimensions, [""] * len(variable.dimensions)

    def unclear(why: str) -> DataError:
        told = ", ".join(name or "(no name)" for name in names)
        message = (
            f"{where}: which of its axes ({told}) are rows and columns is ambiguous: {why}; give axes, one letter"
            f" per axis in the stored order, such as axes='{'TZYX'[-len(names) :] if len(names) < 5 else 'NTZYX'}',"
            " or its"
            " coordinates the attribute axis (X, Y, Z or T)"
        )
        if any(names):
            return DataError(message)
        error = AxesError(message)
        error.shape = tuple(shape)
        return error

    lower = [name.lower() for name in names]
    claims: list[dict[str, int]] = []  # of each dimension: letter to how weak its evidence is
    for name in names:
        own = variable.coordinates.get(name) if name else None
        told = _of_attributes(own.attributes) if own is not None and own.dimensions[:1] == (name,) else set()
        if len(told) > 1:
            raise unclear(f"the attributes of '{name}' say {' and '.join(sorted(told))}")
        beside = _beside(name, variable) if name and not told else set()
        if beside >= _POINTS:
            raise unclear(
                f"'{name}' has both latitudes and longitudes, so it lists points and is not an axis of a grid"
            )
        known = _of_name(name) or (_of_title(own.attributes) if own is not None else set())
        unread = [key for key in TELLING if own.attributes.get(key, "") is None] if own is not None else []
        if unread and not (told or beside or known):
            raise unclear(f"its coordinate '{name}' has {unread_text(unread[0], name)}")
        if name.lower() == "height" and "width" in lower:  # of pictures
            known = {"Y"}
        ranked = [*((one, 0) for one in told), *((one, 1) for one in beside if len(beside) == 1)]
        claims.append(dict([*ranked, *((one, 2) for one in known)][:1]))
    for letter in "TNC" + "ZYX":
        given = {at: claim[letter] for at, claim in enumerate(claims) if letter in claim}
        best = [at for at, rank in given.items() if rank == min(given.values())]
        if len(best) > 1 and letter not in "TN":
            raise unclear(f"{' and '.join(repr(names[at]) for at in best)} are both {letter}")
        for at in given:
            found[at] = letter if at == best[0] else "-"
    for at, claim in enumerate(claims):
        found[at] = "-" if "-" in claim else found[at]
    _from_curvilinear(variable, found)
    _from_order(found)
    if "" in found and not set(found) >= _POINTS:
        raise unclear("neither attributes nor names identify them")
    for at, letter in enumerate(found):
        if letter in ("", "-"):
            found[at] = next(free for free in FREE if free not in found)
    return "".join(found)


def _from_curvilinear(variable: Variable, found: list[str]) -> None:
    """Fill in the two axes of a latitude and longitude that have both: rows come first."""
    for name in words(variable.attributes.get("coordinates")):
        other = variable.coordinates.get(name)
        told = (_of_attributes(other.attributes) or _of_name(name)) if other is not None else set()
        if other is None or len(told) != 1 or not told <= _POINTS:
            continue
        both = [variable.dimensions.index(of) for of in other.dimensions if of and of in variable.dimensions]
        both = [at for at in both if found[at] in ("", "Y", "X")]
        if len(both) == 2:
            _fill_in(found, both)


def _from_order(found: list[str]) -> None:
    """Fill in rows and columns by the order T Z Y X, if it leaves one choice."""
    unknown = [at for at, letter in enumerate(found) if not letter]
    if len(found) == 1:
        found[0] = found[0] or "X"
    elif len(unknown) == 2 and not _POINTS & set(found):
        _fill_in(found, unknown)
    elif len(unknown) == 1 and len(_POINTS & set(found)) == 1:
        (at,) = unknown
        beside = found.index("Y") + 1 == at if "Y" in found else at + 1 == found.index("X")
        if beside or len(found) == 2:
            found[at] = "X" if "Y" in found else "Y"


def _fill_in(found: list[str], both: list[int]) -> None:
    """Fill in what is missing of rows and columns, rows first."""
    missing = [letter for letter in "YX" if letter not in found]
    for at in both:
        if not found[at] and missing:
            found[at] = missing.pop(0)


def _beside(name: str, variable: Variable) -> set[str]:
    """Return what the listed coordinates along one dimension alone say of it."""
    listed = [variable.coordinates.get(other) for other in words(variable.attributes.get("coordinates"))]
    along = [other for other in listed if other is not None and other.dimensions == (name,)]
    return {letter for other in along for letter in _of_attributes(other.attributes)} - {"N", "C"}


def _of_attributes(attributes: Mapping[str, Any]) -> set[str]:
    """Return the letters that the attributes of a coordinate say, more than one if they contradict each other."""
    text = {key: value.strip("\0 ") for key, value in attributes.items() if isinstance(value, str)}
    standard = {letter for letter, pattern in _STANDARD.items() if re.fullmatch(pattern, text.get("standard_name", ""))}
    if standard == {"N"}:
        return standard
    said = {text.get("axis", "").upper(), text.get("cartesian_axis", "").upper()} & {*"TZYX"}
    said |= {"N"} if text.get("axis", "").upper() == "E" else set()
    kind = _TYPES.get(text.get("_CoordinateAxisType", "").lower())
    units = {letter for letter, pattern in _UNITS.items() if re.fullmatch(pattern, text.get("units", "").lower())}
    upright = {"Z"} if text.get("positive", "").lower() in ("up", "down") else set()
    said |= standard | units | ({kind} if kind else set()) | upright
    return said - {"C"} if "C" in said and len(said) > 1 else said


def _of_name(name: str) -> set[str]:
    return {next((letter for letter, pattern in _NAMES.items() if re.fullmatch(pattern, name.lower())), "")} - {""}


def _of_title(attributes: Mapping[str, Any]) -> set[str]:
    """Return the letter that the long_name of a coordinate says: 'Longitude', 'x coordinate of projection'."""
    return _of_name("_".join(words(attributes.get("long_name"))))
