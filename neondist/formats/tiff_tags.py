"""Tags of TIFF files: position, time, calibration, missing values and colours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..io.regular_file import open_regular
from .base import AXIS_METADATA_DEFAULTS
from .ome import base_unit, is_cell_size, metadata_from_xml, unit_name

GEOREFERENCE_TAGS = {33550: "d", 33922: "d", 34264: "d", 34735: "H", 34736: "d", 34737: "s", 50844: "d"}
"""georeference tags and their types"""
RESOLUTION_TAGS = (282, 283, 296)
_PIXEL_SCALE_TAG, _TIE_POINTS_TAG, _MATRIX_TAG, _GEO_KEYS_TAG = 33550, 33922, 34264, 34735
_RASTER_TYPE_KEY, _RASTER_OF_POINTS = 1025, 2
_ORIENTATION_TAG, _NODATA_TAG = 274, 42113
_OTHER_TAG_NAMES = {
    270: "description", 306: "date", 320: "colour map", 700: "XMP", 34665: "EXIF", 34853: "GPS",
    34675: "colour profile", 42112: "GDAL metadata", _NODATA_TAG: "nodata",
}  # fmt: skip
_SIDE_FILE_SUFFIXES = (".aux.xml", ".tfw", ".tifw", ".wld", ".prj", ".msk", ".ovr")
_ORIENTATION_DEPENDENT_METADATA = ("georeference", "resolution")
_MAX_SEARCHED_BYTES = 1 << 24  # bytes of a side file that are searched
_IMAGEJ_STRUCTURAL_KEYS = {
    *("ImageJ", "images", "channels", "slices", "frames", "hyperstack", "mode", "loop", "unit", "spacing", "finterval"),
    *("axes", "shape", "order"),
}
_SUPPORTED_PAGE_KINDS = {"ome", "imagej", "shaped", "gdal", "geotiff", "uniform", "bigtiff", "mask"}
_MICRONS_PER_PIXEL = re.compile(r"\bMPP\s*=\s*([0-9.]+)")
_NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
CENTIMETER_UNIT_CODE = 3  # TIFF's code for the unit of resolution
_YCBCR, _CIELAB, _SEPARATED, _INK_SET = 6, 8, 5, 332
_RGB_CONVERTING_CODECS = {6, 7, 22610, 33003, 33004, 33005, 33007, 34712, 34892, 34927, 34934, 50001, 50002, 52546}


def image_metadata(file: Any, path: Path, image_number: int, level: int) -> dict[str, Any]:
    """Return the metadata of an image of an open file, at one resolution level."""
    levels = file.series[image_number].levels
    base_page, keyframe = levels[0].keyframe, levels[level].keyframe
    ratio = {"X": base_page.imagewidth / keyframe.imagewidth, "Y": base_page.imagelength / keyframe.imagelength}
    tags = {tag.code: tag.value for tag in base_page.tags}
    metadata: dict[str, Any] = {}
    if georeference := {code: tags[code] for code in GEOREFERENCE_TAGS if code in tags}:
        scaled_geo = _scaled_georeference(georeference, ratio) if level else georeference
        metadata["georeference" if scaled_geo else "georeference of level 0"] = scaled_geo or georeference
    if {*RESOLUTION_TAGS[:2]} <= {*tags} and ((tags[282], tags[283]) != ((1, 1), (1, 1)) or tags.get(296, 1) != 1):
        x, y = (_to_float(tags[code]) / ratio[axis] for code, axis in ((282, "X"), (283, "Y")))
        metadata["resolution"] = (x, y, tags.get(296)) if level else (tags[282], tags[283], tags.get(296))
    has_own_format = {"imagej": file.is_imagej, "ome": file.is_ome, "shaped": base_page.is_shaped}
    for code, name in _OTHER_TAG_NAMES.items():
        if code in tags and not (code == 270 and any(has_own_format.values())):
            metadata[name] = tags[code]
    if file.is_ome:
        metadata |= metadata_from_xml(file.ome_metadata, image_number)
    elif file.is_imagej:
        metadata |= _imagej_metadata(file.imagej_metadata or {}, tags)
    elif base_page.is_shaped:
        shaped: dict[str, Any] = (file.shaped_metadata or ({},))[0]
        metadata |= {str(name): value for name, value in shaped.items() if name not in ("shape", "axes", "truncate")}
    elif match := _MICRONS_PER_PIXEL.search(str(tags.get(270, ""))):
        metadata |= {"scale": dict.fromkeys("XY", float(match[1])), "units": dict.fromkeys("XY", "micrometer")}
    if "scale" in metadata:
        metadata["scale"] = {axis: size * ratio.get(axis, 1.0) for axis, size in metadata["scale"].items()}
    elif not georeference and (sizes := pixel_sizes_from_resolution(metadata.get("resolution"))):
        metadata |= {"scale": sizes, "units": dict.fromkeys(sizes, "micrometer")}
    if {"X", "Y"} <= metadata.get("scale", {}).keys() and _is_resolution_redundant(metadata, file.is_imagej):
        del metadata["resolution"]  # sinks that write the scale lose nothing
    metadata |= {f"{name} metadata": None for name in sorted({*file.flags} - _SUPPORTED_PAGE_KINDS)}
    for suffix in _SIDE_FILE_SUFFIXES:
        for side in {path.with_name(path.name + suffix), path.with_suffix(suffix)}:
            if side.is_file():
                metadata[f"side file {side.name}"] = None
    return metadata


def pixel_sizes_from_resolution(resolution_tags: tuple[Any, Any, int | None] | None) -> dict[str, float]:
    """Return the pixel sizes in micrometres for a resolution per centimetre (slide scanners); {} for other units."""
    if resolution_tags is None or resolution_tags[2] != CENTIMETER_UNIT_CODE:
        return {}
    resolutions = [_to_float(one) if isinstance(one, tuple) else one for one in resolution_tags[:2]]
    return {axis: 1e4 / one for axis, one in zip("XY", resolutions, strict=True)} if all(resolutions) else {}


def resolution_from_sizes(metadata: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the cells per centimetre along X and Y; None unless the image's cell sizes are lengths."""
    scale, units = metadata.get("scale", {}), metadata.get("units", {})
    resolutions = []
    for axis in "XY":
        unit, factor = base_unit(units.get(axis) or "") or ("", 1.0)
        if unit != "m" or not is_cell_size(axis, scale.get(axis, 0.0)):
            return None
        resolutions.append(0.01 / (scale[axis] * factor))
    return resolutions[0], resolutions[1]


def _is_resolution_redundant(metadata: Mapping[str, Any], is_imagej: bool) -> bool:
    """Return whether the resolution tags only repeat the scale of an image."""
    if (resolution := metadata.get("resolution")) is None:
        return False
    if is_imagej:  # ImageJ's scale is taken from the tags, in its own unit
        return True
    tag_sizes, counts = pixel_sizes_from_resolution(resolution), resolution_from_sizes(metadata)
    return (
        bool(tag_sizes)
        and counts is not None
        and all(isclose(1e4 / tag_sizes[axis], count, rel_tol=1e-6) for axis, count in zip("XY", counts, strict=True))
    )


def nodata_value(path: Path, keyframe: Any) -> float | None:
    """Return the nodata value of GDAL's tag, or None if there is none; DataError if it is not a number."""
    text = (
        str(keyframe.tags[_NODATA_TAG].value).partition("\0")[0].strip().replace(",", ".")
        if _NODATA_TAG in keyframe.tags
        else ""
    )
    if not text:
        return None
    if text.lower() in ("nan", "1.#qnan"):
        return float("nan")
    if text.lower() in ("inf", "+inf", "-inf") or _NUMBER_PATTERN.fullmatch(text):
        return float(text)
    text = "".join(letter if letter.isprintable() else "?" for letter in text[:40])
    raise DataError(
        f"{path}: its no-data value is '{text}' (GDAL_NODATA), which is not a number; correct it:"
        f" gdal_edit.py -a_nodata NUMBER {path.name}"
    )


def rename_metadata_axes(metadata: dict[str, Any], old_axes: str, axes: str, orientation: int) -> dict[str, Any]:
    """Return the metadata for renamed axes, and for an image rotated by its orientation tag."""
    if orientation == 1 and old_axes == axes:
        return metadata
    is_moved = orientation != 1 or [old_axes.find(axis) for axis in "YX"] != [axes.find(axis) for axis in "YX"]
    result = dict[str, Any]()
    for name, value in metadata.items():
        if name in AXIS_METADATA_DEFAULTS:
            result[name] = {
                to: value[stored_axis] for stored_axis, to in zip(old_axes, axes, strict=False) if stored_axis in value
            }
        else:
            result[f"{name} before rotation" if is_moved and name in _ORIENTATION_DEPENDENT_METADATA else name] = value
    return result


def check_side_file_nodata(path: Path) -> None:
    """Raise DataError for an image whose nodata value is declared in a side file."""
    side_file = path.with_name(path.name + ".aux.xml")
    if side_file.is_file():
        with open_regular(side_file) as file:
            if b"<NoDataValue" in file.read(_MAX_SEARCHED_BYTES):
                raise DataError(
                    f"{path}: {side_file.name} marks cells without data; write the mask into the image:"
                    f" gdal_translate {path.name} NEW.tif"
                )


def check_colour_space(path: Path, keyframe: Any) -> None:
    """Raise DataError for colour spaces that different readers convert differently."""
    num_samples, ink_set = keyframe.samplesperpixel, keyframe.tags[_INK_SET].value if _INK_SET in keyframe.tags else 1
    is_converted = keyframe.compression in _RGB_CONVERTING_CODECS
    if keyframe.photometric == _CIELAB or (keyframe.photometric == _YCBCR and not is_converted) or (
        keyframe.photometric == _SEPARATED and num_samples == 4 and ink_set == 1
    ):  # fmt: skip
        raise DataError(
            f"{path}: stores colours as {keyframe.photometric.name}, which different readers convert differently;"
            " convert the image to RGB"
        )


def check_same_page_tags(path: Path, keyframe: Any, pages: Sequence[Any]) -> None:
    """Raise DataError for an image whose pages differ in orientation or nodata value."""

    def tags_of(page: Any) -> tuple[Any, ...]:
        return tuple(page.tags[code].value if code in page.tags else None for code in (_ORIENTATION_TAG, _NODATA_TAG))

    first_tags = tags_of(keyframe)
    for number, page in enumerate(pages):
        if hasattr(page, "tags") and tags_of(page) != first_tags:
            raise DataError(
                f"{path}: page {number} has a different orientation or no-data value from the first page; write"
                " each page to a separate file"
            )


def _scaled_georeference(georeference: Mapping[int, Any], ratio: Mapping[str, float]) -> dict[int, Any] | None:
    """Return the georeference of a lower resolution; None if it cannot be derived from level 0."""
    keys = list(georeference.get(_GEO_KEYS_TAG, ()))
    if any(keys[at] == _RASTER_TYPE_KEY and keys[at + 3] == _RASTER_OF_POINTS for at in range(4, len(keys) - 3, 4)):
        return None
    if len(matrix := _to_floats(georeference.get(_MATRIX_TAG))) == 16:
        column_scales = (ratio["X"], ratio["Y"], 1.0, 1.0)
        return {**georeference, _MATRIX_TAG: tuple(n * column_scales[at % 4] for at, n in enumerate(matrix))}
    scales, tie_points = _to_floats(georeference.get(_PIXEL_SCALE_TAG)), _to_floats(georeference.get(_TIE_POINTS_TAG))
    if len(scales) == 3 and len(tie_points) == 6 and not any(tie_points[:2]):
        return {**georeference, _PIXEL_SCALE_TAG: (scales[0] * ratio["X"], scales[1] * ratio["Y"], scales[2])}
    return None


def affine_of_georeference(georeference: Mapping[int, Any]) -> np.ndarray | None:
    """Return the 4 x 4 affine from the indices (x, y, z) of a cell to its position; None if it cannot be derived."""
    if len(matrix := _to_floats(georeference.get(_MATRIX_TAG))) == 16:
        return np.reshape(matrix, (4, 4))
    scales, tie_points = _to_floats(georeference.get(_PIXEL_SCALE_TAG)), _to_floats(georeference.get(_TIE_POINTS_TAG))
    if len(scales) != 3 or len(tie_points) != 6:
        return None
    affine = np.diag([scales[0], -scales[1], scales[2], 1.0])
    affine[:3, 3] = tie_points[3:] - affine[:3, :3] @ tie_points[:3]
    return affine


def _imagej_metadata(metadata: Mapping[str, Any], tags: Mapping[int, Any]) -> dict[str, Any]:
    scale, units = dict[str, float](), dict[str, str]()
    unit = unit_name(str(metadata.get("unit") or "").replace("\\u00B5", "µ"))
    for axis, code in (("X", 282), ("Y", 283)):
        if code in tags and _to_float(tags[code]):
            scale[axis] = 1 / _to_float(tags[code])
    if "spacing" in metadata:
        scale["Z"] = float(metadata["spacing"])
    if unit and unit != "pixel":
        units = dict.fromkeys(scale, unit)
    if metadata.get("finterval"):
        scale["T"], units["T"] = float(metadata["finterval"]), "second"
    return {"scale": scale, "units": units} | {
        f"ImageJ {name}": value for name, value in metadata.items() if name not in _IMAGEJ_STRUCTURAL_KEYS
    }


def _to_floats(value: Any) -> Sequence[float]:
    return [float(n) for n in value] if isinstance(value, tuple) else []


def _to_float(value: Any) -> float:
    return value[0] / value[1] if value[1] else 0.0
