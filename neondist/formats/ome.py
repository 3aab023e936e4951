"""OME calibration metadata: sizes, positions and units of cells, in OME-XML and in Zarr attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, prod
from typing import Any
from xml.etree import ElementTree

from .conventions import VariableMetadata

_DEFAULT_AXIS_NAMES = "tczyx"  # axis names of OME-Zarr versions that do not store them
_SI_PREFIXES = {
    "Y": ("yotta", 24), "Z": ("zetta", 21), "E": ("exa", 18), "P": ("peta", 15), "T": ("tera", 12), "G": ("giga", 9),
    "M": ("mega", 6), "k": ("kilo", 3), "h": ("hecto", 2), "da": ("deca", 1), "": ("", 0), "d": ("deci", -1),
    "c": ("centi", -2), "m": ("milli", -3), "µ": ("micro", -6), "n": ("nano", -9), "p": ("pico", -12),
    "f": ("femto", -15), "a": ("atto", -18), "z": ("zepto", -21), "y": ("yocto", -24),
}  # fmt: skip
_OME_UNITS = {
    **{short + "m": (long + "meter", "m", 10.0**power) for short, (long, power) in _SI_PREFIXES.items()},
    **{short + "s": (long + "second", "s", 10.0**power) for short, (long, power) in _SI_PREFIXES.items()},
    "Å": ("angstrom", "m", 1e-10), "in": ("inch", "m", 0.0254), "ft": ("foot", "m", 0.3048),
    "yd": ("yard", "m", 0.9144), "mi": ("mile", "m", 1609.344), "min": ("minute", "s", 60.0),
    "h": ("hour", "s", 3600.0), "d": ("day", "s", 86400.0),
}  # fmt: skip
"""OME-XML symbols: OME-Zarr name, base unit, and size in metres or seconds"""
_UNIT_NAMES = {symbol: name for symbol, (name, _, _) in _OME_UNITS.items()} | {"um": "micrometer", "μm": "micrometer"}
_UNIT_SYMBOLS = {name: symbol for symbol, (name, _, _) in _OME_UNITS.items()}
_REFERENCE_FRAME_UNIT = "reference frame"  # OME-XML's unit of uncalibrated sizes; the default unit is the micrometre
_SIZE_ATTRIBUTES = {**{axis: f"PhysicalSize{axis}" for axis in "XYZ"}, "T": "TimeIncrement"}
_LAYOUT_ATTRIBUTES = {
    "Image": {"ID", "Name"},
    "Pixels": {
        *("ID", "DimensionOrder", "Type", "SignificantBits", "Interleaved", "BigEndian"),
        *(f"Size{axis}" for axis in "XYZCT"),
        *(name + unit for name in _SIZE_ATTRIBUTES.values() for unit in ("", "Unit")),
    },
    "Channel": {"ID", "SamplesPerPixel"},
    "TiffData": {"IFD", "FirstZ", "FirstC", "FirstT", "PlaneCount"},
    "UUID": {"FileName"},
    "Plane": {"TheZ", "TheC", "TheT"},
}
"""elements and attributes of OME-XML that describe the file layout"""


def unit_name(symbol: str) -> str:
    """Return OME-Zarr's name of a unit, or the text itself if there is none."""
    return _UNIT_NAMES.get(symbol.strip(), symbol.strip())


def base_unit(name: str) -> tuple[str, float] | None:
    """Return the base unit, 'm' or 's', and the conversion factor; None for other units."""
    return _OME_UNITS[_UNIT_SYMBOLS[name]][1:] if name in _UNIT_SYMBOLS else None


def is_cell_size(axis: str, size: float) -> bool:
    """Return whether a number is a valid cell size: positive, or 0 for time."""
    return size > 0 or (axis == "T" and size == 0)


def metadata_from_xml(xml: str | None, image_number: int) -> dict[str, Any]:
    """Return the metadata of one image of a file: scale, units, and other contents of its OME-XML by name."""
    try:
        root = ElementTree.fromstring(xml or "<none/>")
    except ElementTree.ParseError:
        return {"OME-XML": xml}
    images = [one for one in root if _tag_name(one) == "Image"]
    scale, units, extra = dict[str, float](), dict[str, str](), dict[str, Any]()
    if image_number < len(images):
        for one in images[image_number].iter():
            excluded = _LAYOUT_ATTRIBUTES.get(_tag_name(one), set())
            extra |= {f"{_tag_name(one)} {name}": value for name, value in one.attrib.items() if name not in excluded}
            if (one.text or "").strip() and _tag_name(one) != "UUID":
                extra[_tag_name(one)] = (one.text or "").strip()
        for pixels in (one for one in images[image_number] if _tag_name(one) == "Pixels"):
            for axis, name in _SIZE_ATTRIBUTES.items():
                if (size := _to_float(pixels.get(name))) is not None and isfinite(size):
                    scale[axis] = size
                    unit = unit_name(pixels.get(name + "Unit", "s" if axis == "T" else "µm"))
                    units |= {axis: unit} if unit != _REFERENCE_FRAME_UNIT else {}
                elif name in pixels.attrib:
                    extra[f"Pixels {name}"] = pixels.get(name)
    extra |= {_tag_name(one): None for one in root if _tag_name(one) != "Image"}
    return {"scale": scale, "units": units, **extra}


def largest_declared_plane_count(attributes: Mapping[str, str]) -> float:
    """Return the largest number of planes, or of plane indices, that an element of OME-XML specifies."""
    values = {name: _to_float(value) or 0.0 for name, value in attributes.items()}
    plane_counts = [values.get(name, 0.0) for name in ("NumPlanes", "PlaneCount", "IFD")]
    plane_counts.append(prod(values.get(f"Size{axis}", 1.0) for axis in "ZCT"))
    if {"Start", "End"} <= {*values}:
        plane_counts.append(abs(values["End"] - values["Start"]) / (abs(values.get("Step", 1.0)) or 1e-30))
    return max(inf if isnan(count) else count for count in plane_counts)


def sizes_for_xml(scale: Mapping[str, float], units: Mapping[str, str]) -> dict[str, Any]:
    """Return the valid cell sizes with OME-XML units, by OME-XML attribute."""
    xml_attributes: dict[str, Any] = {}
    for axis, name in _SIZE_ATTRIBUTES.items():
        unit = _UNIT_SYMBOLS.get(units[axis]) if axis in units else None if axis == "T" else _REFERENCE_FRAME_UNIT
        si_unit = "m" if axis != "T" else "s"
        if (
            axis in scale
            and is_cell_size(axis, scale[axis])
            and unit
            and (unit == _REFERENCE_FRAME_UNIT or _OME_UNITS[unit][1] == si_unit)
        ):
            xml_attributes |= {name: scale[axis], name + "Unit": unit}
    return xml_attributes


def axes_with_sizes(sizes: Mapping[str, Any]) -> str:
    """Return the axes with cell sizes among OME-XML attributes."""
    return "".join(axis for axis, name in _SIZE_ATTRIBUTES.items() if name in sizes)


@dataclass
class MultiscaleImage:
    """OME-Zarr image: its levels, its axes, and the cell positions of one level.

    Attributes
    ----------
    levels : list of str
        Paths of the arrays.
    names : list of str
        Names of the axes, in stored order.
    units : list of str or None
    axis_types : list of str
        Types of the axes: 'time', 'channel', 'space' or others; '' if unknown.
    scale, translation : list of float
        Cell size and centre of the first cell, by axis, after the transforms of the level and then of the image.
    other_metadata : dict
        Other metadata by name.
    """

    levels: list[str]
    names: list[str] = field(default_factory=list)
    units: list[str | None] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    translation: list[float] = field(default_factory=list)
    other_metadata: dict[str, Any] = field(default_factory=dict)
    axis_types: list[str] = field(default_factory=list)

    def to_variable_metadata(self) -> VariableMetadata:
        """Return names and types, from which the axes are inferred."""
        named_types = zip(self.names, self.axis_types, strict=False)
        coordinates = {name: VariableMetadata((name,), {"_CoordinateAxisType": kind}) for name, kind in named_types}
        return VariableMetadata(tuple(self.names), {}, coordinates)

    def array_metadata(self, axes: str) -> dict[str, Any]:
        """Return the metadata of an array with these axes."""
        units = {axis: unit for axis, unit in zip(axes, self.units, strict=False) if unit}
        if len(self.names) != len(axes):
            return {"units": units, **self.other_metadata}
        return {
            "scale": dict(zip(axes, self.scale, strict=True)),
            "translation": dict(zip(axes, self.translation, strict=True)),
            "units": units,
            **self.other_metadata,
        }


def parse_multiscale(image: Mapping[str, Any], level: int, other_attributes: Mapping[str, Any]) -> MultiscaleImage:
    """Parse an entry of 'multiscales', for one level of its image."""
    levels = [str(one["path"]) for one in image["datasets"]]
    axes = image.get("axes", list(_DEFAULT_AXIS_NAMES))
    names = [str(axis["name"] if isinstance(axis, dict) else axis) for axis in axes]
    units = [str(axis["unit"]) if isinstance(axis, dict) and axis.get("unit") else None for axis in axes]
    scale, translation, other_metadata = [1.0] * len(names), [0.0] * len(names), dict(other_attributes)
    transforms = image["datasets"][min(level, len(levels) - 1)].get("coordinateTransformations", [])
    for transform in [*transforms, *image.get("coordinateTransformations", [])]:
        kind = str(transform.get("type"))
        values = [_to_float(value) for value in transform.get(kind) or []] if kind in ("scale", "translation") else []
        numbers = [value for value in values if value is not None and isfinite(value)]
        if kind == "scale" and len(numbers) == len(names):
            scale = [a * b for a, b in zip(scale, numbers, strict=True)]
            translation = [a * b for a, b in zip(translation, numbers, strict=True)]
        elif kind == "translation" and len(numbers) == len(names):
            translation = [a + b for a, b in zip(translation, numbers, strict=True)]
        elif kind != "identity":
            other_metadata[f"transform '{kind}'"] = transform
    known_keys = {"version", "name", "type", "axes", "datasets", "coordinateTransformations"}
    other_metadata |= {name: value for name, value in image.items() if name not in known_keys}
    axis_types = [str(axis.get("type") or "") if isinstance(axis, dict) else "" for axis in axes]
    return MultiscaleImage(levels, names, units, scale, translation, other_metadata, axis_types)


def format_multiscale(
    name: str,
    axes: str,
    levels: int,
    halved_axes: set[str],
    nearest: bool,
    scale: Mapping[str, float],
    translation: Mapping[str, float],
    units: Mapping[str, str],
) -> dict[str, Any]:
    """Return the 'multiscales' entry of an image; a coarse cell is the first (`nearest`) or the mean of its cells."""
    types = {"T": "time", "C": "channel"}
    datasets = []
    for level in range(levels):
        factors = {axis: 2**level if axis in halved_axes else 1 for axis in axes}
        cell_sizes = [scale.get(axis, 1.0) * factors[axis] for axis in axes]
        offsets = [
            translation.get(axis, 0.0) + scale.get(axis, 1.0) * (0 if nearest else (factors[axis] - 1) / 2)
            for axis in axes
        ]
        transforms: list[dict[str, Any]] = [{"type": "scale", "scale": cell_sizes}]
        if any(offsets):
            transforms.append({"type": "translation", "translation": offsets})
        datasets.append({"path": str(level), "coordinateTransformations": transforms})
    return {
        "name": name,
        "axes": [
            {"name": axis.lower(), "type": types.get(axis, "space")} | ({"unit": units[axis]} if axis in units else {})
            for axis in axes
        ],
        "datasets": datasets,
    }


def _tag_name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
