"""Position, time and calibration of sources, copied to sinks or listed in `lost`, for each pair of formats."""

import numpy as np
import pytest

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
zarr = pytest.importorskip("zarr", reason="made by zarr")
nibabel = pytest.importorskip("nibabel", reason="made by nibabel")
rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")

from calibrated_sources import (  # noqa: E402
    SOURCE_WRITERS,
    UNIT_SYMBOLS,
    write_nifti,
    write_ome_tiff,
    write_ome_tiff_level,
    write_ome_zarr,
    write_ome_zarr_5,
)  # fmt: skip

FACTORS = {
    "nanometer": 1e-9, "micrometer": 1e-6, "millimeter": 1e-3, "centimeter": 1e-2, "meter": 1.0, "angstrom": 1e-10,
    "inch": 0.0254, "second": 1.0, "millisecond": 1e-3, "minute": 60.0, "hour": 3600.0,
}  # fmt: skip
NAMES = {symbol: name for name, symbol in UNIT_SYMBOLS.items()}
NIFTI_UNITS = {"mm": "millimeter", "micron": "micrometer", "meter": "meter", "sec": "second", "msec": "millisecond"}


# Sinks: each function reads metadata with a library of the field, keyed as in `lost`


def read_tiff(path, _):
    with rasterio.open(path) as file:
        entries = {"georeference": file.rpcs.to_gdal() if file.rpcs else file.transform if file.crs else None}
    with tifffile.TiffFile(path) as file:
        tags = {tag.code: tag.value for tag in file.pages[0].tags}
        resolution = (*(tags[code][0] / tags[code][1] for code in (282, 283)), tags[296]) if 296 in tags else None
    if resolution is not None and resolution[2] == 3:
        entries |= {"scale": {"X": 1e4 / resolution[0], "Y": 1e4 / resolution[1]}}
        entries |= {"units": dict.fromkeys("XY", "micrometer")}
    return entries | {"resolution": resolution}


def read_ome_tiff(path, _):
    from xml.etree import ElementTree

    with tifffile.TiffFile(path) as file:
        root, entries = ElementTree.fromstring(file.ome_metadata), {"scale": {}, "units": {}}
    for element in root.iter():
        if element.tag.endswith("AcquisitionDate"):
            entries["AcquisitionDate"] = element.text
        for axis in "XYZT" if element.tag.endswith("Pixels") else ():
            name = "TimeIncrement" if axis == "T" else f"PhysicalSize{axis}"
            if name in element.attrib:
                entries["scale"][axis] = float(element.attrib[name])
                unit = element.attrib.get(name + "Unit", "s" if axis == "T" else "µm")
                entries["units"] |= {axis: NAMES[unit]} if unit != "reference frame" else {}
    return read_tiff(path, _) | entries


def read_nifti(path, axes):
    image = nibabel.load(path)
    image_axes = [axis for axis in "XYZTC"[: image.ndim] if axis in axes]
    space, time = image.header.get_xyzt_units()
    units = {axis: NIFTI_UNITS.get(time if axis == "T" else space) for axis in image_axes}
    transforms = [image.header.get_qform(coded=True), image.header.get_sform(coded=True)]
    return {
        "scale": dict(zip(image_axes, image.header.get_zooms(), strict=False)),
        "units": {axis: unit for axis, unit in units.items() if unit},
        "affine": tuple(transform for transform, _ in transforms)
        if [code for _, code in transforms] == [1, 4]
        else None,
        "time offset": float(image.header["toffset"]),
        "slice timing": float(image.header["slice_duration"]),
    }


def read_ome_zarr(path, _):
    attributes = dict(zarr.open_group(str(path), mode="r").attrs)
    image = attributes.get("ome", attributes)["multiscales"][0]
    names, entries = [axis["name"].upper() for axis in image["axes"]], {}
    for step in image["datasets"][0]["coordinateTransformations"]:
        entries[step["type"]] = dict(zip(names, step[step["type"]], strict=True))
    units = {axis["name"].upper(): axis["unit"] for axis in image["axes"] if "unit" in axis}
    return entries | {"units": units}


def read_netcdf(path, _):
    with netcdf.Dataset(path) as file:
        return {name: 1 for name in [*file.variables, *file.ncattrs()] if name != "predictions"}


def read_nothing(path, _):
    return {}


SINKS = {
    "b.tif": read_tiff, "b.ome.tif": read_ome_tiff, "b.nii": read_nifti, "b.ome.zarr": read_ome_zarr,
    "c.ome.zarr": read_ome_zarr, "b.zarr": read_nothing, "b.nc": read_netcdf, "b.h5": read_nothing,
    "b.npy": read_nothing, "b.png": read_nothing, "b.jpg": read_nothing,
}  # fmt: skip


def find_missing(entries, copied, lost, axes):
    """Return the metadata of a source that are neither in the file of the sink nor reported in `lost`."""
    reported = set()
    for entry in lost:
        name, _, suffix = entry.partition(" of ")
        reported |= {entry} | ({(name, axis) for axis in suffix.split()} if suffix and name in entries else set())
    missing = []
    for name, value in entries.items():
        if name in reported:
            continue
        if name in ("scale", "translation", "units"):
            for axis, expected in value.items():
                actual = copied.get(name, {}).get(axis)
                if name == "scale" and actual is not None:  # convert to the unit of the source
                    factor, target = (FACTORS.get(table.get("units", {}).get(axis), 0) for table in (entries, copied))
                    actual = actual * target / factor if factor and target else actual
                same_unit = FACTORS.get(expected) and FACTORS.get(actual) if name == "units" and actual else None
                equal = same_unit or (
                    actual is not None and (actual == expected or (name != "units" and np.isclose(actual, expected)))
                )
                missing += [] if equal or (name, axis) in reported else [(name, axis, expected, actual)]
        elif isinstance(value, int) and name in copied and copied[name] is not None:
            pass
        elif name in copied and copied[name] is not None and not isinstance(value, (str, dict)):
            missing += [] if np.allclose(copied[name], value) else [(name, value, copied[name])]
        elif copied.get(name) != value:
            missing.append((name, value, copied.get(name)))
    return missing


def is_kept(entry, entries, copied):
    """Return whether a sink reports metadata that is in its file, or that the source does not have."""
    if entry == "resolution":
        return entry not in entries
    name, _, axes = entry.partition(" of ")
    if name not in ("scale", "units", "translation") or name not in entries:
        return False
    reported = {axis: value for axis, value in entries[name].items() if axis in (axes.split() or entries[name])}
    return bool(reported) and reported.items() <= copied.get(name, {}).items()


RANDOM_SOURCES = (write_ome_tiff, write_ome_tiff_level, write_nifti, write_ome_zarr, write_ome_zarr_5)
CASES = [(source, seed) for source in SOURCE_WRITERS for seed in ((0, 1, 3) if source in RANDOM_SOURCES else (0,))]
IDS = [f"{source.__name__.removeprefix('write_')}-{seed}" for source, seed in CASES]


@pytest.mark.parametrize(("source", "seed"), CASES, ids=IDS)
@pytest.mark.long
def test_metadata_is_copied_or_reported(tmp_path, source, seed):
    path, entries = source(tmp_path, seed)
    with nd.open_source(tmp_path / path) as image_source:
        for name, read in SINKS.items():
            axes, options = image_source.axes, {"ome": "0.4"} if name == "c.ome.zarr" else {}
            if name[2:] in ("png", "jpg"):
                axes = "YXC"
            if "Z" in image_source.axes and "Z" not in axes:
                continue
            shape = [1 if axis == "C" else image_source.shape[image_source.axes.index(axis)] for axis in axes]
            with nd.create_sink(tmp_path / name, shape, "uint8", axes, like=image_source, **options) as sink:
                lost = list(sink.lost)
                sink.commit()
            copied = read(tmp_path / name, axes)
            assert not find_missing(entries, copied, lost, axes), (name, lost)
            assert entries or not lost, (name, lost)
            assert not [entry for entry in lost if is_kept(entry, entries, copied)], (name, lost)
