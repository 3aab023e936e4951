"""Coordinates of NetCDF and Zarr variables, copied to NetCDF files, or reported if Zarr cannot store them."""

import warnings

import numpy as np
import pytest

import neondist as nd

pytest.importorskip("netCDF4", reason="made by netCDF4")


@pytest.fixture
def xarray():
    """Import xarray, which takes seconds, only if a test needs it."""
    return pytest.importorskip("xarray", reason="made by xarray")


def make_field(xarray):
    time = xarray.DataArray(np.arange(2.0), dims="time", attrs={"units": "days since 2000-01-01", "calendar": "noleap"})
    time.attrs |= {"bounds": "time_bnds", "standard_name": "time"}
    lat = xarray.DataArray(np.arange(12.0).reshape(3, 4), dims=("y", "x"), attrs={"units": "degrees_north"})
    lev = xarray.DataArray(np.arange(2.0), dims="lev", attrs={"formula_terms": "a: lev_a ps: ps", "positive": "down"})
    attributes = {"grid_mapping": "crs", "cell_methods": "time: mean", "cell_measures": "area: cell_area", "units": "K"}
    attributes["coordinates"] = "lat lon gone"
    variables = {
        "v": (("time", "lev", "y", "x"), np.arange(48, dtype="f4").reshape(2, 2, 3, 4), attributes),
        "time": time,
        "time_bnds": (("time", "nv"), np.arange(4.0).reshape(2, 2)),
        "lev": lev,
        "lev_a": (("lev",), np.arange(2.0) / 2),
        "ps": (("time", "y", "x"), np.ones((2, 3, 4), "f4"), {"units": "Pa"}),
        "lat": lat,
        "lon": (("y", "x"), np.arange(12, dtype="i2").reshape(3, 4), {"units": "degrees_east", "scale_factor": 0.5}),
        "crs": (
            (),
            np.int32(0),
            {"grid_mapping_name": "rotated_latitude_longitude", "earth_radius": 6.371e6},
        ),
        "cell_area": (("y", "x"), np.full((3, 4), 2.0), {"standard_name": "cell_area"}),
    }
    return variables


@pytest.mark.parametrize("kind", ["nc", 2, 3])
def test_coordinates_are_copied_or_reported(tmp_path, kind, xarray):
    dataset = xarray.Dataset(make_field(xarray))
    if kind == "nc":
        dataset.to_netcdf(tmp_path / "a.nc", engine="netcdf4")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset.to_zarr(tmp_path / "a.zarr", zarr_format=kind, consolidated=False)
    with nd.open_source(f"{tmp_path}/a.{kind if kind == 'nc' else 'zarr'}:v") as source:
        assert source.axes == "TZYXC"
        with nd.create_sink(tmp_path / "b.nc", (2, 2, 3, 4, 1), "f4", "TZYXC", like=source, name="p") as sink:
            assert sink.lost == ["gone"]
            sink.commit()
        with nd.create_sink(tmp_path / "b.zarr", (2, 2, 3, 4, 1), "f4", "TZYXC", like=source) as sink:
            expected_lost = {"time", "time_bnds", "lev", "lev_a", "ps", "lat", "lon", "crs", "cell_area", "coordinates"}
            assert expected_lost | {"gone", "grid_mapping", "cell_measures"} == set(sink.lost) - {"cell_methods"}
            sink.commit()
    with xarray.open_dataset(tmp_path / "b.nc", decode_cf=False) as result:
        attributes_of_result = {name: value for name, value in result["p"].attrs.items() if name != "units"}
        assert attributes_of_result == {
            name: value for name, value in make_field(xarray)["v"][2].items() if name != "units"
        } | {"coordinates": "lat lon"}
        for name, variable in dataset.variables.items():
            if name != "v":
                np.testing.assert_array_equal(result[name].values, variable.values)
                assert result[name].dims == variable.dims
                attributes = {key: value for key, value in result[name].attrs.items() if key != "_FillValue"}
                assert attributes == {key: value for key, value in variable.attrs.items() if key != "coordinates"}
    with nd.open_source(tmp_path / "b.zarr") as result:
        assert result.axes == "TZYXC"
        assert result.metadata["dimensions"] == ["time", "lev", "y", "x", "c"]
