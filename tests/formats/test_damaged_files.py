"""100 damaged files of each format, which are read correctly or refused with one message that names the file."""

import h5py
import numpy as np
import pytest
from fuzz import check_outcomes, classify_call, damage_copies, run_isolated

import neondist as nd

CASES = 100


def write_image(path, **options):
    array = (np.random.default_rng(1).random((40, 50, 3)) * 200).astype("uint8")
    with nd.create_sink(path, array.shape, array.dtype, "YXC", (32, 32, 3), **options) as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()
    return path


def write_compressed_hdf5(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.arange(6000).reshape(10, 20, 30), chunks=(1, 8, 8), compression="gzip")


def write_tiff(path, **options):
    array = np.random.default_rng(1).integers(0, 50, (60, 70, 3), "uint8")
    pytest.importorskip("tifffile").imwrite(path, array, photometric="rgb", **options)


def write_netcdf(path):
    netCDF4 = pytest.importorskip("netCDF4")
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", 3), ("lat", 20), ("lon", 30)):
            file.createDimension(name, n)
            file.createVariable(name, "f4", (name,))[:] = np.arange(n)
        values = file.createVariable("t", "i2", ("time", "lat", "lon"), fill_value=-1, zlib=True, fletcher32=True)
        values.scale_factor, values.add_offset, values.units = 0.1, 3.0, "K"
        values[:] = np.random.default_rng(0).random((3, 20, 30)) * 100


def write_nifti(path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.arange(6000, dtype="int16").reshape(10, 20, 30), np.eye(4)), path)


def write_minimal_netcdf(path):
    """Write HDF5 dimension scales, with attributes of variable length."""
    import h5py

    with h5py.File(path, "w") as file:
        file["t"] = np.random.default_rng(0).random((20, 30))
        for axis, name in enumerate(("lat", "lon")):
            file[name] = np.arange(20.0 + 10 * axis)
            file[name].make_scale(name)
            file[name].attrs["units"] = "degrees"
            file["t"].dims[axis].attach_scale(file[name])


def write_geotiff(path):
    rasterio = pytest.importorskip("rasterio")
    options = {"driver": "GTiff", "dtype": "float32", "crs": "EPSG:32632", "nodata": -9999, "compress": "deflate"}
    transform = rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)
    with rasterio.open(path, "w", width=70, height=60, count=1, transform=transform, **options) as file:
        file.write(np.random.default_rng(0).random((1, 60, 70)).astype("f4"))


FILES = {
    "a.nc": write_netcdf,
    "bare.nc": write_minimal_netcdf,
    "geo.tif": write_geotiff,
    "a.png": write_image,
    "a.jpg": write_image,
    "a.nii": write_nifti,
    "a.nii.gz": write_nifti,
    "a.npy": write_image,
    "a.h5": write_compressed_hdf5,
    "plain.h5": write_image,
    "plain.tif": lambda path: write_tiff(path),
    "a.tif": lambda path: write_tiff(path, tile=(32, 32), compression="zlib", predictor=True),
    "jpeg.tif": lambda path: write_tiff(path, tile=(32, 32), compression="jpeg"),
    "a.ome.tif": lambda path: write_tiff(path, rowsperstrip=16, compression="lzw"),
}


def read_source(path):
    with nd.open_source(path) as source:
        if np.prod(source.shape, dtype=object) < 1 << 24:
            assert source.read(nd.Box.of(source.shape)).shape == source.shape
        getattr(source, "auxiliary_variables", list)()  # copied by a NetCDF sink
        box = [(n // 2, min(n, n // 2 + 5)) for n in source.shape]
        assert source.read(box).shape == tuple(hi - lo for lo, hi in box)


def check_refusals(outcomes, path):
    check_outcomes(outcomes, least_refused=CASES // 10)
    refusals = [text for text in outcomes if text.startswith("refused")]
    assert [text for text in refusals if str(path) not in text or len(text) > 600] == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.long
def test_damaged_files(tmp_path, name):
    FILES[name](tmp_path / name)
    raw, path = (tmp_path / name).read_bytes(), tmp_path / "damaged" / name
    path.parent.mkdir()

    def read(case):
        path.write_bytes(case)

        return classify_call(lambda: read_source(path))

    check_refusals(run_isolated(damage_copies(raw, CASES, head=512), read), path)


@pytest.mark.parametrize("ome", ["0.4", "0.5"])
@pytest.mark.long
def test_damaged_zarr_folders(tmp_path, ome):
    pytest.importorskip("zarr")
    path = write_image(tmp_path / "a.ome.zarr", ome=ome)
    files, outcomes = sorted(file for file in path.rglob("*") if file.is_file()), []
    for file in files:
        raw = file.read_bytes()
        for case in damage_copies(raw, CASES // len(files) + 1, head=512):
            file.write_bytes(case)
            # in this process, as the thread of zarr does not survive a fork
            outcomes.append(classify_call(lambda: read_source(path)))
        file.write_bytes(raw)
    check_refusals(outcomes, path)


def test_files_without_an_array(tmp_path):
    pytest.importorskip("tifffile")
    (tmp_path / "a.tif").write_bytes(b"II*\0hello")
    with pytest.raises(nd.DataError, match=r"a\.tif: contains no image; restore it from a good copy"):
        nd.open_source(tmp_path / "a.tif")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["null"] = h5py.Empty("f4")
    with pytest.raises(nd.ShapeError, match=r"cannot interpret an array of shape \[\] as images"):
        nd.open_source(f"{tmp_path}/a.h5:null")
