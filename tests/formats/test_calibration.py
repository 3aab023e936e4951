"""Place, time and calibration of a source are in the file of a sink, or named in `lost`: for every pair of formats."""

import numpy as np
import pytest

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
zarr = pytest.importorskip("zarr", reason="made by zarr")
nibabel = pytest.importorskip("nibabel", reason="made by nibabel")
rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")

METRES = {
    "nanometer": 1e-9, "micrometer": 1e-6, "millimeter": 1e-3, "centimeter": 1e-2, "meter": 1.0, "angstrom": 1e-10,
    "inch": 0.0254, "second": 1.0, "millisecond": 1e-3, "minute": 60.0, "hour": 3600.0,
}  # fmt: skip
SYMBOLS = {"nanometer": "nm", "micrometer": "µm", "millimeter": "mm", "centimeter": "cm", "meter": "m", "inch": "in",
           "angstrom": "Å", "second": "s", "millisecond": "ms", "minute": "min", "hour": "h"}  # fmt: skip
NAMES = {symbol: name for name, symbol in SYMBOLS.items()}
OF_NIFTI = {"mm": "millimeter", "micron": "micrometer", "meter": "meter", "sec": "second", "msec": "millisecond"}
EXTENTS = {"T": 3, "Z": 4, "Y": 6, "X": 10, "C": 2}
PLACE = rasterio.Affine(10, 0, 5e5, 0, -20, 6e6)


def cells(axes, dtype="uint8"):
    shape = [EXTENTS[name] for name in axes]
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def drawn(seed, axes, units, time):
    """Return a scale and units by axis that no format has by itself."""
    rng = np.random.default_rng(seed)
    scale = {axis: float(np.round(rng.uniform(0.1, 9), 3)) for axis in axes}
    return scale, {axis: str(rng.choice(time)) if axis == "T" else units[seed % len(units)] for axis in axes}


# Sources: each writes a file with a library of its field, and returns its path and what is known of it


def plain_tiff(folder, seed):
    more = {"description": "from the third floor", "datetime": "2020:01:02 03:04:05", "iccprofile": b"\0" * 200}
    tifffile.imwrite(folder / "a.tif", cells("YX"), resolution=(300, 150), resolutionunit=2, metadata=None, **more)
    return "a.tif", {"resolution": (300, 150, 2), "description": 1, "date": 1, "colour profile": 1}


def shaped_tiff(folder, seed):
    tifffile.imwrite(folder / "a.tif", cells("ZYX"), metadata={"axes": "ZYX", "voxel size": 3})
    return "a.tif", {"voxel size": 3}


def geotiff(folder, seed, dtype="float32", overviews=()):
    facts = {"driver": "GTiff", "height": 6, "width": 10, "count": 2, "dtype": dtype, "crs": "EPSG:32633"}
    with rasterio.open(folder / "a.tif", "w", **facts, transform=PLACE, nodata=-99) as file:
        file.write(cells("CYX", dtype))
        file.scales, file.descriptions = (0.1, 0.2), ("red", "green")
        file.build_overviews(list(overviews))
    return "a.tif", {"georeference": PLACE, "nodata": 1, "GDAL metadata": 1}


def geotiff_with_mask(folder, seed):
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        path, known = geotiff(folder, seed, "int16")
        with rasterio.open(folder / path, "r+") as file:
            file.write_mask(np.eye(6, 10) == 0)
    return path, known | {"mask": 1}


def geotiff_overview(folder, seed):
    path, known = geotiff(folder, seed, overviews=[2])
    return path + "#1", known | {"georeference": PLACE * rasterio.Affine.scale(2, 2)}


def geotiff_of_points(folder, seed):
    geotiff(folder, seed)
    with rasterio.open(folder / "a.tif", "r+") as file:
        file.update_tags(AREA_OR_POINT="Point")
        file.build_overviews([2])
    return "a.tif#1", {"georeference of level 0": 1}


def rational_polynomials(folder, seed):
    names = ("height", "lat", "line", "long", "samp")
    numbers = {f"{name}_{what}": n + 1.5 for name in names for n, what in enumerate(("off", "scale"))}
    series = {
        f"{name}_{what}_coeff": [n + 1.5] * 20 for name in ("line", "samp") for n, what in enumerate(("den", "num"))
    }
    rpc = rasterio.rpc.RPC(**numbers, **series, err_bias=1.0, err_rand=2.0)
    facts = {"driver": "GTiff", "height": 6, "width": 10, "count": 1, "dtype": "uint8", "rpcs": rpc}
    with rasterio.open(folder / "a.tif", "w", **facts) as file:
        file.write(cells("YX")[None])
    return "a.tif", {"georeference": rpc.to_gdal()}


def world_file(folder, seed):
    tifffile.imwrite(folder / "a.tif", cells("YX"), metadata=None)
    (folder / "a.tfw").write_text("10\n0\n0\n-10\n5\n5\n")
    return "a.tif", {"side file a.tfw": 1}


def turned_geotiff(folder, seed):
    path, _ = geotiff(folder, seed)
    with tifffile.TiffFile(folder / path) as file:
        tags = file.pages[0].tags
        value = (tags[33550].value, tags[33922].value)
    place = [(33550, "d", 3, value[0], True), (33922, "d", 6, value[1], True), (274, "H", 1, 6, True)]
    tifffile.imwrite(folder / path, cells("YX"), metadata=None, extratags=place)
    return path, {"georeference before it is turned": 1}


def imagej(folder, seed):
    more = {"axes": "TZYX", "spacing": 2.5, "unit": "um", "finterval": 0.4, "Labels": ["a"] * 12, "Info": "seen"}
    tifffile.imwrite(folder / "a.tif", cells("TZYX"), imagej=True, resolution=(4.0, 5.0), metadata=more)
    units = dict.fromkeys("ZYX", "micrometer") | {"T": "second"}
    scale = {"T": 0.4, "Z": 2.5, "Y": 0.2, "X": 0.25}
    return "a.tif", {"scale": scale, "units": units, "ImageJ Labels": 1, "ImageJ Info": 1}


def ome_tiff(folder, seed, axes="TZCYX", level=0, **options):
    scale, units = drawn(
        seed, axes.replace("C", ""), ["nanometer", "inch", "micrometer", "angstrom"], ["hour", "millisecond"]
    )
    sizes = {"TimeIncrement" if axis == "T" else f"PhysicalSize{axis}": n for axis, n in scale.items()}
    named = {name + "Unit": SYMBOLS[units[name[-1] if name[0] == "P" else "T"]] for name in sizes}
    more = {"axes": axes, "AcquisitionDate": "2021-02-03T04:05:06", **sizes, **named}
    count = int(np.prod([EXTENTS[axis] for axis in axes if axis not in "YX"]))
    more |= {"Channel": {"Name": ["dapi", "gfp"], "Color": [255, 65535]}} if "C" in axes else {}
    more |= {"Plane": {"PositionX": [1.5] * count, "DeltaT": [2.5] * count}, "Description": "cells"}
    with tifffile.TiffWriter(folder / "a.ome.tif", ome=True) as file:
        file.write(cells(axes), photometric="minisblack", metadata=more, subifds=level)
        for n in range(level):
            file.write(cells(axes)[..., :: 2 ** (n + 1), :: 2 ** (n + 1)], photometric="minisblack", subfiletype=1)
    scale |= {axis: scale[axis] * 2**level for axis in "XY"}
    known = {"AcquisitionDate": more["AcquisitionDate"], "Plane PositionX": 1, "Plane DeltaT": 1, "Description": 1}
    known |= {"Channel Name": 1, "Channel Color": 1} if "C" in axes else {}
    return f"a.ome.tif#{level}", {"scale": scale, "units": units, **known}


def ome_tiff_level(folder, seed):
    return ome_tiff(folder, seed, axes="ZYX", level=1)


def slide(folder, seed):
    text = (
        "Aperio Image Library v11.2.1 \n10x6 [0,0 10x6] (16x16) JPEG/RGB Q=70|AppMag = 20|MPP = 0.4990|Date = 01/02/13"
    )
    tifffile.imwrite(folder / "a.svs", np.zeros((6, 10, 3), "u1"), tile=(16, 16), description=text, metadata=None)
    return "a.svs", {
        "scale": {"X": 0.499, "Y": 0.499},
        "units": {"X": "micrometer", "Y": "micrometer"},
        "description": 1,
    }


def nifti(folder, seed, series=True):
    shape = (10, 6, 4, 3) if series else (10, 6, 4)
    turn = np.array([[0, -2.0, 0, 9], [1.5, 0, 0, -3], [0, 0, 3.0, 4], [0, 0, 0, 1]])
    other = turn + np.diag([0.25, 0.25, 0.25, 0])
    image = nibabel.Nifti1Image(cells("XYZT"[: len(shape)], "int16"), other)
    image.set_sform(other, 4)
    image.set_qform(turn, 1)
    image.header.set_xyzt_units("mm" if seed % 2 else "micron", "msec" if series else None)
    image.header["intent_code"], image.header["descrip"] = 1002, b"by hand"
    known = {"affine": (image.get_qform(), other), "intent": 1, "description": 1}
    if series:
        image.header["pixdim"][4], image.header["toffset"] = 720.0, 15.0
        image.header["slice_code"], image.header["slice_end"], image.header["slice_duration"] = 3, 3, 180.0
        known |= {"time offset": 15.0, "slice timing": 180.0}
    nibabel.save(image, folder / "a.nii")
    unit = "millimeter" if seed % 2 else "micrometer"
    scale, units = {"X": 1.5, "Y": 2.0, "Z": 3.0}, dict.fromkeys("XYZ", unit)
    return "a.nii", known | {"scale": scale | ({"T": 720.0} if series else {}),
                             "units": units | ({"T": "millisecond"} if series else {})}  # fmt: skip


def nifti_volume(folder, seed):
    return nifti(folder, seed, series=False)


def ome_zarr(folder, seed, version="0.4"):
    axes, level = "TCZYX", seed % 2
    scale, units = drawn(seed, "TZYX", ["nanometer", "millimeter", "centimeter", "foot?"], ["second", "minute"])
    group = zarr.open_group(str(folder / "a.ome.zarr"), mode="w", zarr_format=2 if version == "0.4" else 3)
    own, image = [scale.get(axis, 1.0) for axis in axes], [1, 1, 2, 3, 4]
    datasets = []
    for n in range(2):
        array = cells(axes)[..., :: 2**n, :: 2**n]
        group.create_array(f"s{n}", data=array, chunks=array.shape)
        step = [a * 2 ** (n * (axis in "YX")) for a, axis in zip(own, axes, strict=True)]
        move = [0, 0, 0.5, n * 0.25, n * 0.5]
        steps = [{"type": "scale", "scale": step}, {"type": "translation", "translation": move}]
        datasets.append({"path": f"s{n}", "coordinateTransformations": steps})
    kinds = {"T": "time", "C": "channel"}
    described = [{"name": axis.lower(), "type": kinds.get(axis, "space")} for axis in axes]
    described = [
        one | ({"unit": units[axis]} if axis in units else {}) for one, axis in zip(described, axes, strict=True)
    ]
    whole = [{"type": "scale", "scale": image}, {"type": "translation", "translation": [0, 0, 7, 0, 0]}]
    entry = {"axes": described, "datasets": datasets, "coordinateTransformations": whole}
    extra = {"omero": {"channels": [{"label": "dapi", "color": "FF0000"}]}, "acquired": "2020-02-02"}
    if version == "0.4":
        group.attrs.update({"multiscales": [entry | {"version": version}], **extra})
    else:
        group.attrs["ome"] = {"version": version, "multiscales": [entry], **extra}
    end = dict(zip(axes, [1, 1, 2, 3, 4], strict=True))
    half = {axis: 2**level if axis in "YX" else 1 for axis in axes}
    scale = {axis: scale[axis] * end[axis] * half[axis] for axis in scale}
    moved = {"Z": 0.5 * 2 + 7} | ({"Y": 0.75, "X": 2.0} if level else {})
    known = {"scale": scale, "units": units, "translation": moved, "omero": 1, "acquired": 1}
    return f"a.ome.zarr#{level}", known


def ome_zarr_5(folder, seed):
    return ome_zarr(folder, seed, "0.5")


def plain_zarr(folder, seed):
    made = zarr.create_array(str(folder / "a.zarr"), data=cells("ZYX"), dimension_names=["z", "y", "x"])
    made.attrs["spacing"] = [1, 2, 3]
    return "a.zarr", {"spacing": 1}


def hdf5(folder, seed):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file["images"] = cells("YXC")
        file["images"].attrs.update({"axes": np.bytes_("YXC"), "element_size_um": [1.0, 2.0]})
    return "a.h5", {"element_size_um": 1}


def field(folder, seed):
    with netcdf.Dataset(folder / "a.nc", "w") as file:
        for name, n in (("time", 3), ("lat", 6), ("lon", 10)):
            file.createDimension(name, n)
            file.createVariable(name, "f8", (name,))[:] = np.arange(n) * 0.5
        file["time"].units, file.Conventions = "hours since 2020-01-01", "CF-1.8"
        file.createVariable("t", "f4", ("time", "lat", "lon"))[:] = cells("TYX", "f4")
    return "a.nc", {"time": 1, "lat": 1, "lon": 1, "Conventions": 1}


def picture(folder, seed, name="a.png", **options):
    PIL = pytest.importorskip("PIL.Image")
    from PIL.PngImagePlugin import PngInfo

    text, exif = PngInfo(), PIL.Exif()
    text.add_text("Creation Time", "yesterday")
    exif[306] = "2020:01:02 03:04:05"
    image = PIL.fromarray(cells("YX"))
    image.save(folder / name, dpi=(300, 300), icc_profile=b"\0" * 130, exif=exif, **options or {"pnginfo": text})
    return name, {"resolution": (300, 300, 2), "colour profile": 1, "EXIF": 1} | (
        {} if options else {"text 'Creation Time'": 1}
    )


def jpeg(folder, seed):
    return picture(folder, seed, "a.jpg", quality=90)


def npy(folder, seed):
    np.save(folder / "a.npy", cells("YX"))
    return "a.npy", {}


SOURCES = [
    plain_tiff, shaped_tiff, geotiff, geotiff_with_mask, geotiff_overview, geotiff_of_points, rational_polynomials,
    world_file, turned_geotiff, imagej, ome_tiff, ome_tiff_level, slide, nifti, nifti_volume, ome_zarr, ome_zarr_5,
    plain_zarr, hdf5, field, picture, jpeg, npy,
]  # fmt: skip


# What the library of a sink's field finds in its file: scale and units by axis, and others by the names of `lost`


def of_tiff(path, _):
    with rasterio.open(path) as file:
        known = {"georeference": file.rpcs.to_gdal() if file.rpcs else file.transform if file.crs else None}
    with tifffile.TiffFile(path) as file:
        tags = {tag.code: tag.value for tag in file.pages[0].tags}
        resolution = (*(tags[code][0] / tags[code][1] for code in (282, 283)), tags[296]) if 296 in tags else None
    return known | {"resolution": resolution}


def of_ome_tiff(path, _):
    from xml.etree import ElementTree

    with tifffile.TiffFile(path) as file:
        root, known = ElementTree.fromstring(file.ome_metadata), {"scale": {}, "units": {}}
    for one in root.iter():
        if one.tag.endswith("AcquisitionDate"):
            known["AcquisitionDate"] = one.text
        for axis in "XYZT" if one.tag.endswith("Pixels") else ():
            name = "TimeIncrement" if axis == "T" else f"PhysicalSize{axis}"
            if name in one.attrib:
                known["scale"][axis] = float(one.attrib[name])
                unit = one.attrib.get(name + "Unit", "s" if axis == "T" else "µm")
                known["units"] |= {axis: NAMES[unit]} if unit != "reference frame" else {}
    return of_tiff(path, _) | known


def of_nifti(path, axes):
    image = nibabel.load(path)
    of = [axis for axis in "XYZTC"[: image.ndim] if axis in axes]
    space, time = image.header.get_xyzt_units()
    units = {axis: OF_NIFTI.get(time if axis == "T" else space) for axis in of}
    forms = [image.header.get_qform(coded=True), image.header.get_sform(coded=True)]
    return {
        "scale": dict(zip(of, image.header.get_zooms(), strict=False)),
        "units": {axis: unit for axis, unit in units.items() if unit},
        "affine": tuple(form for form, _ in forms) if [code for _, code in forms] == [1, 4] else None,
        "time offset": float(image.header["toffset"]),
        "slice timing": float(image.header["slice_duration"]),
    }


def of_ome_zarr(path, _):
    attributes = dict(zarr.open_group(str(path), mode="r").attrs)
    image = attributes.get("ome", attributes)["multiscales"][0]
    names, known = [axis["name"].upper() for axis in image["axes"]], {}
    for step in image["datasets"][0]["coordinateTransformations"]:
        known[step["type"]] = dict(zip(names, step[step["type"]], strict=True))
    units = {axis["name"].upper(): axis["unit"] for axis in image["axes"] if "unit" in axis}
    return known | {"units": units}


def of_netcdf(path, _):
    with netcdf.Dataset(path) as file:
        return {name: 1 for name in [*file.variables, *file.ncattrs()] if name != "predictions"}


def nothing(path, _):
    return {}


SINKS = {
    "b.tif": of_tiff, "b.ome.tif": of_ome_tiff, "b.nii": of_nifti, "b.ome.zarr": of_ome_zarr,
    "c.ome.zarr": of_ome_zarr, "b.zarr": nothing, "b.nc": of_netcdf, "b.h5": nothing, "b.npy": nothing,
    "b.png": nothing, "b.jpg": nothing,
}  # fmt: skip


def missing(known, found, lost, axes):
    """Return what a source tells, and neither the file of the sink nor its `lost` has."""
    gone = set()
    for entry in lost:
        name, _, of = entry.partition(" of ")
        gone |= {entry} | ({(name, axis) for axis in of.split()} if of and name in known else set())
    lacking = []
    for name, value in known.items():
        if name in gone:
            continue
        if name in ("scale", "translation", "units"):
            for axis, one in value.items():
                there = found.get(name, {}).get(axis)
                if name == "scale" and there is not None:  # in another unit it is another number
                    factor, to = (METRES.get(of.get("units", {}).get(axis), 0) for of in (known, found))
                    there = there * to / factor if factor and to else there
                same = METRES.get(one) and METRES.get(there) if name == "units" and there else None
                ok = same or (there is not None and (there == one or (name != "units" and np.isclose(there, one))))
                lacking += [] if ok or (name, axis) in gone else [(name, axis, one, there)]
        elif isinstance(value, int) and name in found and found[name] is not None:
            pass
        elif name in found and found[name] is not None and not isinstance(value, (str, dict)):
            lacking += [] if np.allclose(found[name], value) else [(name, value, found[name])]
        elif found.get(name) != value:
            lacking.append((name, value, found.get(name)))
    return lacking


DRAWN = (ome_tiff, ome_tiff_level, nifti, ome_zarr, ome_zarr_5)
CASES = [(source, seed) for source in SOURCES for seed in ((0, 1, 3) if source in DRAWN else (0,))]


@pytest.mark.parametrize(("source", "seed"), CASES, ids=[f"{source.__name__}-{seed}" for source, seed in CASES])
@pytest.mark.long
def test_place_time_and_calibration(tmp_path, source, seed):
    path, known = source(tmp_path, seed)
    with nd.open_source(tmp_path / path) as given:
        for name, read in SINKS.items():
            axes, options = given.axes, {"ome": "0.4"} if name == "c.ome.zarr" else {}
            if name[2:] in ("png", "jpg"):
                axes = "YXC"
            if "Z" in given.axes and "Z" not in axes:
                continue
            shape = [1 if axis == "C" else given.shape[given.axes.index(axis)] for axis in axes]
            with nd.create_sink(tmp_path / name, shape, "uint8", axes, like=given, **options) as sink:
                lost = list(sink.lost)
                sink.commit()
            assert not missing(known, read(tmp_path / name, axes), lost, axes), (name, lost)
            assert known or not lost, (name, lost)
