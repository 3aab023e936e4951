"""NIfTI compared with nibabel, and NetCDF compared with netCDF4."""

import numpy as np
import pytest
from image_sources import check_source

import neondist as nd

AFFINE = np.array([[0, -2.0, 0, 9], [1.5, 0, 0, -3], [0, 0, 3.0, 4], [0, 0, 0, 1]])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize(("shape", "axes"), [((7, 9, 5), "ZYXC"), ((7, 9, 5, 3), "TZYXC"), ((7, 9, 5, 1, 3), "ZYXC")])
def test_nibabel_round_trip(tmp_path, suffix, shape, axes):
    nibabel = pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    array = (np.random.default_rng(0).random(shape) * 900).astype("int16")
    path = tmp_path / f"a{suffix}"
    nibabel.save(nibabel.Nifti1Image(array, AFFINE), path)
    expected = array[:, :, :, 0].transpose(2, 1, 0, 3) if len(shape) == 5 else array.T[..., None]
    with nd.open_source(path) as source:
        assert (source.axes, source.dtype) == (axes, np.int16)
        check_source(source, expected)
        with nd.create_sink(tmp_path / f"out{suffix}", source.shape, "float32", axes, like=source) as sink:
            for z in range(5):
                box = [slice(z, z + 1) if name == "Z" else slice(None) for name in axes]
                sink.write(box, source.read(box).astype("float32"))
            sink.commit()
    written = nibabel.load(tmp_path / f"out{suffix}")
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"out{suffix}"]
    np.testing.assert_array_equal(written.affine, AFFINE)
    np.testing.assert_array_equal(np.asarray(written.dataobj), array)
    with pytest.raises(nd.ConfigError, match="cannot store float16"):
        nd.create_sink(tmp_path / "o.nii", (2, 2, 2, 1), "float16", "ZYXC")


def test_scaled_and_truncated_volumes(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    image = nibabel.Nifti1Image(np.arange(60, dtype="int16").reshape(3, 4, 5), np.eye(4))
    image.header.set_slope_inter(0.5, 7)
    nibabel.save(image, tmp_path / "a.nii")
    with nd.open_source(tmp_path / "a.nii") as source:
        check_source(source, nibabel.load(tmp_path / "a.nii").get_fdata().T[..., None])
    for suffix in (".nii", ".nii.gz"):
        nibabel.save(image, tmp_path / f"b{suffix}")
    import gzip

    raw = bytearray((tmp_path / "b.nii").read_bytes())
    raw[42:48] = np.array([30000] * 3, "int16").tobytes()
    (tmp_path / "b.nii").write_bytes(raw)
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(bytes(raw)))
    for suffix in (".nii", ".nii.gz"):
        with pytest.raises(nd.DataError, match="is truncated"):
            nd.open_source(tmp_path / f"b{suffix}")


def test_metadata_of_netcdf_variables(tmp_path):
    """Copy HDF5 dimension scales as h5py writes them, two-dimensional coordinates, bounds and a projection."""
    h5py, netcdf = pytest.importorskip("h5py"), pytest.importorskip("netCDF4", reason="made by netCDF4")
    values, extents = np.random.default_rng(0).random((6, 6)).astype("f4"), {"row_km": 6, "lon": 6, "nv": 2}
    with h5py.File(tmp_path / "plain.nc", "w") as file:
        file["t"] = values
        for axis, name in enumerate(("row_km", "lon")):  # equal lengths, and one name without a known axis
            file[name] = np.arange(6.0) + axis
            file[name].make_scale(name)
            file["t"].dims[axis].attach_scale(file[name])
        file["lon"].attrs["units"] = "degrees_east"  # variable-length text, which can make libhdf5 hang if damaged
    with netcdf.Dataset(tmp_path / "cf.nc", "w") as file:
        for name, n in extents.items():
            file.createDimension(name, n)
        for name, count in {"lon": 1, "lon_bnds": 2, "lat": 2, "wide": 2}.items():
            dimensions = ("lon", "nv")[:count] if name.startswith("lon") else ("row_km", "lon")
            shape = [extents[dimension] for dimension in dimensions]
            file.createVariable(name, "i2", dimensions)[:] = np.arange(np.prod(shape)).reshape(shape)
        file.createVariable("crs", "i4", ()).grid_mapping_name = "polar_stereographic"
        file["lon"].setncatts({"bounds": "lon_bnds", "scale_factor": 0.5})
        field = file.createVariable("t", "f4", ("row_km", "lon"))
        field.setncatts({"coordinates": "lat", "grid_mapping": "crs: lon", "units": "K"})
        field[:], file.Conventions = values, "CF-1.8"
    for name, lost in (("plain", ["lon:units"]), ("cf", [])):
        with nd.open_source(f"{tmp_path}/{name}.nc:t") as source:
            check_source(source, values[..., None])
            with nd.create_sink(tmp_path / f"{name}2.nc", (6, 6, 3), "f4", source.axes, like=source) as sink:
                assert sink.lost == lost
                sink.commit()
        with netcdf.Dataset(tmp_path / f"{name}2.nc") as file:
            assert file["predictions"].dimensions == ("row_km", "lon", "channel")
            if name == "plain":
                np.testing.assert_array_equal(file["lon"][:], np.arange(6.0) + 1)
            else:
                assert file["predictions"].ncattrs() == ["coordinates", "grid_mapping"]
                assert (file["crs"].grid_mapping_name, file.Conventions) == ("polar_stereographic", "CF-1.8")
                np.testing.assert_array_equal(file["lon"][:], np.arange(6) / 2)
                assert (file["lon_bnds"].dimensions, file["lat"][:].sum()) == (("lon", "nv"), 630)
                assert set(file.variables) == {"predictions", "lon", "lon_bnds", "lat", "crs"}


def test_netcdf_variables(tmp_path):
    netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")
    values = np.random.default_rng(0).random((4, 30, 50)).astype("float32") * 20 + 270
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("time", None), ("lat", 30), ("lon", 50)):
            file.createDimension(name, n)
        lat = file.createVariable("lat", "f8", ("lat",))
        lat[:], lat.units = np.linspace(90, -90, 30), "degrees_north"
        time = file.createVariable("time", "i4", ("time",))
        time[:], time.units = np.arange(4) * 6, "hours since 2020-01-01"
        unpacked = file.createVariable("t2m", "f4", ("time", "lat", "lon"), fill_value=-999.0, chunksizes=(1, 10, 25))
        masked = np.ma.array(values, mask=values > 289)
        unpacked[:] = masked
        packed = file.createVariable("packed", "i2", ("lat", "lon"), fill_value=-32768, zlib=True)
        packed.scale_factor, packed.add_offset = 0.01, 280.0
        packed[:] = masked[0]
        file.createVariable("classes", "i1", ("lat", "lon"), fill_value=-1)[:] = values[0] > 280
    with netcdf.Dataset(tmp_path / "a.nc") as file:
        expected = file["packed"][:].filled(np.nan)
    with nd.open_source(tmp_path / "a.nc") as source:
        assert (source.axes, source.shape, source.chunks) == ("TYXC", (4, 30, 50, 1), (1, 10, 25, 1))
        check_source(source, masked.filled(np.nan)[..., None])
        with nd.create_sink(tmp_path / "out.nc", (4, 30, 50, 1), "float32", "TYXC", like=source, name="rain") as sink:
            sink.write(nd.Box.of(sink.shape), source.read(nd.Box.of(sink.shape)))
            sink.commit()
    with nd.open_source(f"{tmp_path}/a.nc:packed") as source:
        assert (source.axes, source.dtype) == ("YXC", expected.dtype)
        np.testing.assert_allclose(source.read(nd.Box.of(source.shape))[..., 0], expected, rtol=1e-6)
    with nd.open_source(f"{tmp_path}/a.nc:classes") as source:
        assert source.dtype == np.int8
    with netcdf.Dataset(tmp_path / "out.nc") as file:
        rain = file["rain"]
        assert rain.dimensions == ("time", "lat", "lon", "channel")
        np.testing.assert_array_equal(rain[..., 0], masked.filled(np.nan))
        np.testing.assert_array_equal(file["lat"][:], np.linspace(90, -90, 30))
        assert (file["lat"].units, file["time"].units) == ("degrees_north", "hours since 2020-01-01")
        assert set(file.variables) == {"rain", "lat", "time"}  # the other dimensions have no coordinates
    with nd.open_source(tmp_path / "out.nc") as source:
        assert source.axes == "TYXC"
    with pytest.raises(nd.DataError, match=r"no array 'rain'; choose .*packed"):
        nd.open_source(f"{tmp_path}/a.nc:rain")
    with netcdf.Dataset(tmp_path / "old.nc", "w", format="NETCDF3_CLASSIC"):
        pass
    with pytest.raises(nd.DataError, match="NetCDF-3; convert it"):
        nd.open_source(tmp_path / "old.nc")


def test_invalid_nifti_headers(tmp_path, capfd):
    nibabel = pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    header = nibabel.Nifti1Header()
    header["magic"], header["vox_offset"] = b"n+1", 352
    for dim, code, match in (
        ([3, 5, 5, -5, 1, 1, 1, 1], 4, r"is empty, with shape \[-5, 5, 5, 1\]"),
        ([3, 5, 5, 5, 1, 1, 1, 1], 31, "data code 31 not recognized"),
    ):
        header["dim"], header.structarr["datatype"] = dim, code
        (tmp_path / "a.nii").write_bytes(header.binaryblock + bytes(2000))
        with pytest.raises(nd.DataError, match=match):
            nd.open_source(tmp_path / "a.nii")
    assert capfd.readouterr() == ("", "")  # nibabel would print warnings


@pytest.mark.parametrize("size", [-0.5, 0.0, "NaN", float("inf")])
def test_invalid_scales(tmp_path, size):
    """Report scales that a format cannot store as lost, and write no other value."""
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    image = {
        "axes": [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"],
        "datasets": [
            {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [2.0, size, 0.5]}]},
        ],
    }
    group = zarr.open_group(str(tmp_path / "a.ome.zarr"), mode="w", zarr_format=2)
    group.create_array("0", data=np.ones((4, 5, 6), "u1"))
    group.attrs["multiscales"] = [image]
    with nd.open_source(tmp_path / "a.ome.zarr") as source:
        for name in ("o.ome.zarr", "o.ome.tif", "o.nii"):
            with nd.create_sink(tmp_path / name, source.shape, "u1", source.axes, like=source) as sink:
                sink.commit()
            with nd.open_source(tmp_path / name) as written:
                scale = written.metadata["scale"].get("Y", 1.0)
            if isinstance(size, float) and size <= 0:
                assert scale == (size if name == "o.ome.zarr" else 1.0)
                assert sink.lost == ([] if name == "o.ome.zarr" else ["scale of Y", "units of Y"])
            else:
                assert sink.lost == ["transform 'scale'"]
                assert scale == 1.0
    nibabel = pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    series = nibabel.Nifti1Image(np.ones((4, 5, 6, 2), "i2"), np.eye(4))
    series.header["pixdim"][4] = 0  # unknown
    nibabel.save(series, tmp_path / "a.nii")
    with nd.open_source(tmp_path / "a.nii") as source:
        with nd.create_sink(tmp_path / "b.nii", source.shape, "i2", source.axes, like=source) as sink:
            sink.commit()
        assert sink.lost == []
    assert nibabel.load(tmp_path / "b.nii").header["pixdim"][4] == 0


@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_uncompressed_volumes_named_gz_are_named_as_such(tmp_path, kind, order):
    nibabel = pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    kind = getattr(nibabel, kind)
    header = kind.header_class(endianness=order)
    nibabel.save(kind(np.zeros((4, 5, 6), "u1"), np.eye(4), header), tmp_path / "a.nii")
    (tmp_path / "a.nii").rename(tmp_path / "b.nii.gz")
    with pytest.raises(nd.DataError, match=r"b\.nii\.gz: is not compressed, despite its name; rename it to b\.nii"):
        nd.open_source(tmp_path / "b.nii.gz")
