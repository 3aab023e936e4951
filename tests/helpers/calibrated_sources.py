"""Sources with position, time and calibration, written by third-party libraries."""

import numpy as np
import pytest

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
zarr = pytest.importorskip("zarr", reason="made by zarr")
nibabel = pytest.importorskip("nibabel", reason="made by nibabel")
rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")

UNIT_SYMBOLS = {"nanometer": "nm", "micrometer": "µm", "millimeter": "mm", "centimeter": "cm", "meter": "m",
           "inch": "in", "angstrom": "Å", "second": "s", "millisecond": "ms", "minute": "min", "hour": "h"}  # fmt: skip
EXTENT_BY_AXIS = {"T": 3, "Z": 4, "Y": 6, "X": 10, "C": 2}
AFFINE_TRANSFORM = rasterio.Affine(10, 0, 5e5, 0, -20, 6e6)


def make_cells(axes, dtype="uint8"):
    shape = [EXTENT_BY_AXIS[name] for name in axes]
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def draw_scales(seed, axes, units, time):
    """Return random scales and units by axis, none of which is the default of a format."""
    rng = np.random.default_rng(seed)
    scale = {axis: float(np.round(rng.uniform(0.1, 9), 3)) for axis in axes}
    return scale, {axis: str(rng.choice(time)) if axis == "T" else units[seed % len(units)] for axis in axes}


# Sources: each function writes a file with a library of its field, and returns the path and the known metadata


def write_plain_tiff(folder, seed):
    options = {"description": "from the third floor", "datetime": "2020:01:02 03:04:05", "iccprofile": b"\0" * 200}
    tifffile.imwrite(
        folder / "a.tif", make_cells("YX"), resolution=(300, 150), resolutionunit=2, metadata=None, **options
    )
    return "a.tif", {"resolution": (300, 150, 2), "description": 1, "date": 1, "colour profile": 1}


def write_scanned_tiff(folder, seed, level=0):
    options = {"resolutionunit": 3, "metadata": None}
    with tifffile.TiffWriter(folder / "a.tif") as file:
        file.write(make_cells("YX"), resolution=(20000, 40000), subifds=level, **options)
        if level:
            file.write(make_cells("YX")[::2, ::2], subfiletype=1, **options)
    scale = {"X": 0.5 * 2**level, "Y": 0.25 * 2**level}
    return f"a.tif#{level}", {"scale": scale, "units": dict.fromkeys("XY", "micrometer")}


def write_scanned_tiff_level(folder, seed):
    return write_scanned_tiff(folder, seed, level=1)


def write_shaped_tiff(folder, seed):
    tifffile.imwrite(folder / "a.tif", make_cells("ZYX"), metadata={"axes": "ZYX", "voxel size": 3})
    return "a.tif", {"voxel size": 3}


def write_geotiff(folder, seed, dtype="float32", overviews=()):
    options = {"driver": "GTiff", "height": 6, "width": 10, "count": 2, "dtype": dtype, "crs": "EPSG:32633"}
    with rasterio.open(folder / "a.tif", "w", **options, transform=AFFINE_TRANSFORM, nodata=-99) as file:
        file.write(make_cells("CYX", dtype))
        file.scales, file.descriptions = (0.1, 0.2), ("red", "green")
        file.build_overviews(list(overviews))
    return "a.tif", {"georeference": AFFINE_TRANSFORM, "nodata": 1, "GDAL metadata": 1}


def write_geotiff_with_mask(folder, seed):
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        path, entries = write_geotiff(folder, seed, "int16")
        with rasterio.open(folder / path, "r+") as file:
            file.write_mask(np.eye(6, 10) == 0)
    return path, entries | {"mask": 1}


def write_geotiff_overview(folder, seed):
    path, entries = write_geotiff(folder, seed, overviews=[2])
    return path + "#1", entries | {"georeference": AFFINE_TRANSFORM * rasterio.Affine.scale(2, 2)}


def write_point_geotiff(folder, seed):
    write_geotiff(folder, seed)
    with rasterio.open(folder / "a.tif", "r+") as file:
        file.update_tags(AREA_OR_POINT="Point")
        file.build_overviews([2])
    return "a.tif#1", {"georeference of level 0": 1}


def write_rational_polynomials(folder, seed):
    names = ("height", "lat", "line", "long", "samp")
    numbers = {f"{name}_{kind}": n + 1.5 for name in names for n, kind in enumerate(("off", "scale"))}
    series = {
        f"{name}_{kind}_coeff": [n + 1.5] * 20 for name in ("line", "samp") for n, kind in enumerate(("den", "num"))
    }
    rpc = rasterio.rpc.RPC(**numbers, **series, err_bias=1.0, err_rand=2.0)
    options = {"driver": "GTiff", "height": 6, "width": 10, "count": 1, "dtype": "uint8", "rpcs": rpc}
    with rasterio.open(folder / "a.tif", "w", **options) as file:
        file.write(make_cells("YX")[None])
    return "a.tif", {"georeference": rpc.to_gdal()}


def write_world_file(folder, seed):
    tifffile.imwrite(folder / "a.tif", make_cells("YX"), metadata=None)
    (folder / "a.tfw").write_text("10\n0\n0\n-10\n5\n5\n")
    return "a.tif", {"side file a.tfw": 1}


def write_rotated_geotiff(folder, seed):
    path, _ = write_geotiff(folder, seed)
    with tifffile.TiffFile(folder / path) as file:
        tags = file.pages[0].tags
        value = (tags[33550].value, tags[33922].value)
    extra_tags = [(33550, "d", 3, value[0], True), (33922, "d", 6, value[1], True), (274, "H", 1, 6, True)]
    tifffile.imwrite(folder / path, make_cells("YX"), metadata=None, extratags=extra_tags)
    return path, {"georeference before rotation": 1}


def write_imagej(folder, seed):
    metadata = {"axes": "TZYX", "spacing": 2.5, "unit": "um", "finterval": 0.4, "Labels": ["a"] * 12, "Info": "seen"}
    tifffile.imwrite(folder / "a.tif", make_cells("TZYX"), imagej=True, resolution=(4.0, 5.0), metadata=metadata)
    units = dict.fromkeys("ZYX", "micrometer") | {"T": "second"}
    scale = {"T": 0.4, "Z": 2.5, "Y": 0.2, "X": 0.25}
    return "a.tif", {"scale": scale, "units": units, "ImageJ Labels": 1, "ImageJ Info": 1}


def write_ome_tiff(folder, seed, axes="TZCYX", level=0, **options):
    scale, units = draw_scales(
        seed, axes.replace("C", ""), ["nanometer", "inch", "micrometer", "angstrom"], ["hour", "millisecond"]
    )
    pixel_sizes = {"TimeIncrement" if axis == "T" else f"PhysicalSize{axis}": n for axis, n in scale.items()}
    unit_names = {name + "Unit": UNIT_SYMBOLS[units[name[-1] if name[0] == "P" else "T"]] for name in pixel_sizes}
    metadata = {"axes": axes, "AcquisitionDate": "2021-02-03T04:05:06", **pixel_sizes, **unit_names}
    count = int(np.prod([EXTENT_BY_AXIS[axis] for axis in axes if axis not in "YX"]))
    metadata |= {"Channel": {"Name": ["dapi", "gfp"], "Color": [255, 65535]}} if "C" in axes else {}
    metadata |= {"Plane": {"PositionX": [1.5] * count, "DeltaT": [2.5] * count}, "Description": "cells"}
    with tifffile.TiffWriter(folder / "a.ome.tif", ome=True) as file:
        file.write(make_cells(axes), photometric="minisblack", metadata=metadata, subifds=level)
        for n in range(level):
            file.write(make_cells(axes)[..., :: 2 ** (n + 1), :: 2 ** (n + 1)], photometric="minisblack", subfiletype=1)
    scale |= {axis: scale[axis] * 2**level for axis in "XY"}
    entries = {"AcquisitionDate": metadata["AcquisitionDate"]}
    entries |= {"Plane PositionX": 1, "Plane DeltaT": 1, "Description": 1}
    entries |= {"Channel Name": 1, "Channel Color": 1} if "C" in axes else {}
    return f"a.ome.tif#{level}", {"scale": scale, "units": units, **entries}


def write_ome_tiff_level(folder, seed):
    return write_ome_tiff(folder, seed, axes="ZYX", level=1)


def write_slide(folder, seed):
    text = (
        "Aperio Image Library v11.2.1 \n10x6 [0,0 10x6] (16x16) JPEG/RGB Q=70|AppMag = 20|MPP = 0.4990|Date = 01/02/13"
    )
    tifffile.imwrite(folder / "a.svs", np.zeros((6, 10, 3), "u1"), tile=(16, 16), description=text, metadata=None)
    scale, units = dict.fromkeys("XY", 0.499), dict.fromkeys("XY", "micrometer")
    return "a.svs", {"scale": scale, "units": units, "description": 1}


def write_nifti(folder, seed, series=True):
    shape = (10, 6, 4, 3) if series else (10, 6, 4)
    qform = np.array([[0, -2.0, 0, 9], [1.5, 0, 0, -3], [0, 0, 3.0, 4], [0, 0, 0, 1]])
    sform = qform + np.diag([0.25, 0.25, 0.25, 0])
    image = nibabel.Nifti1Image(make_cells("XYZT"[: len(shape)], "int16"), sform)
    image.set_sform(sform, 4)
    image.set_qform(qform, 1)
    image.header.set_xyzt_units("mm" if seed % 2 else "micron", "msec" if series else None)
    image.header["intent_code"], image.header["descrip"] = 1002, b"by hand"
    entries = {"affine": (image.get_qform(), sform), "intent": 1, "description": 1}
    if series:
        image.header["pixdim"][4], image.header["toffset"] = 720.0, 15.0
        image.header["slice_code"], image.header["slice_end"], image.header["slice_duration"] = 3, 3, 180.0
        entries |= {"time offset": 15.0, "slice timing": 180.0}
    nibabel.save(image, folder / "a.nii")
    unit = "millimeter" if seed % 2 else "micrometer"
    scale, units = {"X": 1.5, "Y": 2.0, "Z": 3.0}, dict.fromkeys("XYZ", unit)
    return "a.nii", entries | {"scale": scale | ({"T": 720.0} if series else {}),
                             "units": units | ({"T": "millisecond"} if series else {})}  # fmt: skip


def write_nifti_volume(folder, seed):
    return write_nifti(folder, seed, series=False)


def write_ome_zarr(folder, seed, version="0.4"):
    axes, level = "TCZYX", seed % 2
    scale, units = draw_scales(seed, "TZYX", ["nanometer", "millimeter", "centimeter", "foot?"], ["second", "minute"])
    group = zarr.open_group(str(folder / "a.ome.zarr"), mode="w", zarr_format=2 if version == "0.4" else 3)
    level_scale, image_scale = [scale.get(axis, 1.0) for axis in axes], [1, 1, 2, 3, 4]
    datasets = []
    for n in range(2):
        array = make_cells(axes)[..., :: 2**n, :: 2**n]
        group.create_array(f"s{n}", data=array, chunks=array.shape)
        scale_of_level = [a * 2 ** (n * (axis in "YX")) for a, axis in zip(level_scale, axes, strict=True)]
        translation = [0, 0, 0.5, n * 0.25, n * 0.5]
        transforms = [{"type": "scale", "scale": scale_of_level}, {"type": "translation", "translation": translation}]
        datasets.append({"path": f"s{n}", "coordinateTransformations": transforms})
    kinds = {"T": "time", "C": "channel"}
    described = [{"name": axis.lower(), "type": kinds.get(axis, "space")} for axis in axes]
    described = [
        item | ({"unit": units[axis]} if axis in units else {}) for item, axis in zip(described, axes, strict=True)
    ]
    common = [{"type": "scale", "scale": image_scale}, {"type": "translation", "translation": [0, 0, 7, 0, 0]}]
    entry = {"axes": described, "datasets": datasets, "coordinateTransformations": common}
    extra = {"omero": {"channels": [{"label": "dapi", "color": "FF0000"}]}, "acquired": "2020-02-02"}
    if version == "0.4":
        group.attrs.update({"multiscales": [entry | {"version": version}], **extra})
    else:
        group.attrs["ome"] = {"version": version, "multiscales": [entry], **extra}
    image_factors = dict(zip(axes, [1, 1, 2, 3, 4], strict=True))
    level_factors = {axis: 2**level if axis in "YX" else 1 for axis in axes}
    scale = {axis: scale[axis] * image_factors[axis] * level_factors[axis] for axis in scale}
    total_translation = {"Z": 0.5 * 2 + 7} | ({"Y": 0.75, "X": 2.0} if level else {})
    entries = {"scale": scale, "units": units, "translation": total_translation, "omero": 1, "acquired": 1}
    return f"a.ome.zarr#{level}", entries


def write_ome_zarr_5(folder, seed):
    return write_ome_zarr(folder, seed, "0.5")


def write_plain_zarr(folder, seed):
    array = zarr.create_array(str(folder / "a.zarr"), data=make_cells("ZYX"), dimension_names=["z", "y", "x"])
    array.attrs["spacing"] = [1, 2, 3]
    return "a.zarr", {"spacing": 1}


def write_hdf5(folder, seed):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file["images"] = make_cells("YXC")
        file["images"].attrs.update({"axes": np.bytes_("YXC"), "element_size_um": [1.0, 2.0]})
    return "a.h5", {"element_size_um": 1}


def write_netcdf(folder, seed):
    with netcdf.Dataset(folder / "a.nc", "w") as file:
        for name, n in (("time", 3), ("lat", 6), ("lon", 10)):
            file.createDimension(name, n)
            file.createVariable(name, "f8", (name,))[:] = np.arange(n) * 0.5
        file["time"].units, file.Conventions = "hours since 2020-01-01", "CF-1.8"
        file.createVariable("t", "f4", ("time", "lat", "lon"))[:] = make_cells("TYX", "f4")
    return "a.nc", {"time": 1, "lat": 1, "lon": 1, "Conventions": 1}


def write_picture(folder, seed, name="a.png", **options):
    PIL = pytest.importorskip("PIL.Image")
    from PIL.PngImagePlugin import PngInfo

    text, exif = PngInfo(), PIL.Exif()
    text.add_text("Creation Time", "yesterday")
    exif[306] = "2020:01:02 03:04:05"
    image = PIL.fromarray(make_cells("YX"))
    image.save(folder / name, dpi=(300, 300), icc_profile=b"\0" * 130, exif=exif, **options or {"pnginfo": text})
    return name, {"resolution": (300, 300, 2), "colour profile": 1, "EXIF": 1} | (
        {} if options else {"text 'Creation Time'": 1}
    )


def write_jpeg(folder, seed):
    return write_picture(folder, seed, "a.jpg", quality=90)


def write_npy(folder, seed):
    np.save(folder / "a.npy", make_cells("YX"))
    return "a.npy", {}


SOURCE_WRITERS = [
    write_scanned_tiff, write_scanned_tiff_level, write_plain_tiff, write_shaped_tiff, write_geotiff,
    write_geotiff_with_mask, write_geotiff_overview,
    write_point_geotiff, write_rational_polynomials, write_world_file, write_rotated_geotiff, write_imagej,
    write_ome_tiff, write_ome_tiff_level, write_slide, write_nifti, write_nifti_volume, write_ome_zarr,
    write_ome_zarr_5, write_plain_zarr, write_hdf5, write_netcdf, write_picture, write_jpeg, write_npy,
]  # fmt: skip
