"""Packed and missing values of generated NetCDF and Zarr files, compared with netCDF4 and xarray."""

import warnings

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd

netcdf = pytest.importorskip("netCDF4", reason="files are written with netCDF4")
DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]
SHAPE = (3, 4)


def values_of(dtype):
    """Return a strategy for values of a dtype, including limits of this and other dtypes."""
    if dtype[0] == "f":
        return st.sampled_from([0.0, 1.5, -2.0, 1e20, 300.0, 9.969209968386869e36, float("nan"), float("inf")])
    info = np.iinfo(dtype)
    candidates = {0, 1, -1, 7, info.min, info.max, info.min + 1, -32767, 31073, 200, 255, -127}
    return st.sampled_from(sorted(candidates & set(range(-40000, 40000)) | {info.min, info.max})).filter(
        lambda n: info.min <= n <= info.max
    )


@st.composite
def packings(draw):
    """Draw the values of a variable, its attributes, fill value and byte order, and whether it is complete."""
    dtype = draw(st.sampled_from(DTYPES))
    values, attributes = values_of(dtype), {}
    cells = np.array(draw(st.lists(values, min_size=12, max_size=12)), dtype).reshape(SHAPE)
    # attributes of the same dtype, or of one that represents the same values
    attribute_dtypes = [dtype, "f8"] if dtype[0] in "iu" and dtype[1] < "8" else [dtype]
    attribute_dtype = st.sampled_from(attribute_dtypes)
    fill = draw(values) if draw(st.booleans()) else None
    if draw(st.booleans()):
        attributes["missing_value"] = np.array(draw(st.lists(values, min_size=1, max_size=3)), draw(attribute_dtype))
    if draw(st.booleans()):
        attributes["scale_factor"] = draw(st.sampled_from([np.float64(0.01), np.float32(0.25), np.int32(2)]))
    if draw(st.booleans()):
        attributes["add_offset"] = draw(st.sampled_from([np.float64(287.8226), np.float32(-4), np.int16(3)]))
    bounds = st.sampled_from([None, "valid_min", "valid_max", "valid_range", "both"])
    finite = values.filter(np.isfinite)
    low, high = sorted([draw(finite), draw(finite)])
    match draw(bounds):
        case "valid_range":
            attributes["valid_range"] = np.array([low, high], dtype)
        case "both":
            attributes["valid_min"], attributes["valid_max"] = np.array(low, dtype), np.array(high, dtype)
        case "valid_min":
            attributes["valid_min"] = np.array(low, dtype)
        case "valid_max":
            attributes["valid_max"] = np.array(high, dtype)
    if dtype[0] == "i" and draw(st.booleans()):
        attributes["_Unsigned"] = draw(st.sampled_from(["true", "false"]))
        attributes.pop("valid_range", None)
    return cells, attributes, fill, draw(st.sampled_from(["little", "big"])), draw(st.booleans())


def read(name, convert_integers=False):
    with nd.open_source(name) as source:
        if convert_integers:
            source.convert_integers()
        values = source.read(nd.Box.of(source.shape))[..., 0]
        assert values.dtype == source.dtype
        return values


@given(packings())
@settings(max_examples=50, deadline=None)
@pytest.mark.long
def test_values_match_netcdf4(tmp_path_factory, case):
    cells, attributes, fill, order, complete = case
    order = order if cells.dtype.itemsize > 1 else "native"
    path = tmp_path_factory.mktemp("a") / "a.nc"
    with netcdf.Dataset(path, "w") as file:
        for name, n in zip(("y", "x"), SHAPE, strict=True):
            file.createDimension(name, n)
        without_fill = fill is None and cells.dtype.itemsize == 1
        # bytes have no default fill value (NUG), but netCDF4 masks it in unwritten cells
        variable = file.createVariable(
            "v", cells.dtype, ("y", "x"), fill_value=False if without_fill else fill, endian=order
        )
        variable.set_auto_maskandscale(False)
        for name, value in attributes.items():
            variable.setncattr(name, value)
        if complete or without_fill:
            variable[:] = cells
        else:
            variable[:1] = cells[:1]  # the rest is unwritten
    values = read(path)
    with netcdf.Dataset(path, "r+") as file:
        for name in {"scale_factor", "add_offset"} & set(attributes):
            if attributes[name].dtype.kind == "i":  # netCDF4 multiplies integers, which overflow
                file["v"].setncattr(name, np.float64(attributes[name]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = file["v"][:]
    if expected.dtype.kind == "f" or {"scale_factor", "add_offset"} & set(attributes):
        expected = np.ma.filled(expected.astype(np.float64) if expected.dtype.kind != "f" else expected, np.nan)
        np.testing.assert_allclose(values, expected, rtol=3e-7 if values.dtype == np.float32 else 1e-7)
    else:  # integers are unchanged
        np.testing.assert_array_equal(values, expected.data)
        converted = read(path, convert_integers=True)
        np.testing.assert_array_equal(converted, np.where(np.ma.getmaskarray(expected), np.nan, expected.data))
    assert values.dtype == expected.dtype.newbyteorder("=")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "value", [1e20, np.nan, -np.inf, -99999, 65536, 40000, 0.5, -32768.0, [-32768, 1e20], [7.0, -99999.0], 1 << 40]
)
@pytest.mark.parametrize("name", ["_FillValue", "missing_value"])
def test_missing_values_out_of_range(tmp_path, name, value, packed):
    """Compare missing values of other dtypes by value, without overflow or rounding."""
    raw = np.array([[0, 1, -2, 7], [-32768, 300, 0, 31073], [-31072, 32767, -25536, 100]], "i2" if packed else "f4")
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["v"] = raw
        file["v"].attrs[name] = value
        if packed:
            file["v"].attrs["add_offset"] = 0.25
    expected = raw + 0.25 * packed
    expected[np.isin(raw.astype("f8"), np.array(value, "f8"))] = np.nan
    np.testing.assert_array_equal(read(tmp_path / "a.nc"), expected)


XARRAY_DTYPES = "i1", "u1", "i2", "u2", "i4", "f4", "f8"


@pytest.mark.parametrize("dtype", XARRAY_DTYPES)
@pytest.mark.parametrize("scale", [{}, {"scale_factor": 0.5}, {"scale_factor": 0.01, "add_offset": 280.0}])
@pytest.mark.long
def test_values_match_xarray(tmp_path, dtype, scale):
    version = 2 + (XARRAY_DTYPES.index(dtype) + len(scale)) % 2
    pytest.importorskip("zarr", reason="Zarr needs zarr")
    xarray = pytest.importorskip("xarray", reason="made by xarray")
    cells = (np.arange(12).reshape(SHAPE) * 9).astype(dtype)
    for number, fill in enumerate([None, 9, 0]):
        path, attributes = tmp_path / f"{number}.zarr", dict(scale)
        if dtype == "i1":
            attributes["_Unsigned"], cells[0, 0] = "true", -2
        values = xarray.DataArray(cells, dims=("lat", "lon"), attrs=attributes)
        encoding = {} if fill is None else {"_FillValue": np.array(fill, dtype)[()]}
        if number == 1 and dtype != "i1":
            values.attrs["missing_value"] = np.array(27, dtype)[()]
        values.encoding = encoding
        raw = xarray.Dataset({"v": values}, coords={"lat": np.arange(3.0), "lon": np.arange(4)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw.to_zarr(path, zarr_format=version, consolidated=False)
            expected = xarray.open_zarr(path, consolidated=False)["v"].values
        result = read(path)
        if not scale and dtype[0] in "iu":
            np.testing.assert_array_equal(result, cells.view("u1") if dtype == "i1" else cells)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-6)
            assert dtype[0] == "f" or result.dtype == expected.dtype


AMBIGUOUS = {
    "scale_factor": ["0.1", [1.0, 2.0], float("nan"), float("inf")],
    "add_offset": ["3"],
    "missing_value": ["-999", "NaN"],
    "valid_range": [[1.0, 2.0], [1], "1, 2"],
    "valid_min": [0.5, [1, 2]],
    "_Unsigned": ["perhaps", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in AMBIGUOUS.items() for value in values])
def test_ambiguous_attributes_are_refused(tmp_path, name, value):
    zarr = pytest.importorskip("zarr")
    attributes = {"add_offset": 1.0, name: value}
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for dimension, n in zip(("y", "x"), SHAPE, strict=True):
            file.createDimension(dimension, n)
        file.createVariable("v", "i2", ("y", "x")).setncatts(attributes)
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    group.create_array("v", shape=SHAPE, dtype="i2", dimension_names=("y", "x"), attributes=attributes)
    for path in ("a.nc", "a.zarr"):
        with pytest.raises(nd.DataError, match=rf"its attribute {name} .*; remove or correct it"):
            nd.open_source(tmp_path / path)


def test_non_numeric_variables_are_refused(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for dimension, n in zip(("y", "x"), SHAPE, strict=True):
            file.createDimension(dimension, n)
        record = file.createCompoundType(np.dtype([("a", "i2"), ("b", "f4")]), "record_t")
        rows = file.createVLType(np.int32, "rows_t")
        for name, dtype in {"text": str, "letters": "S1", "record": record, "rows": rows}.items():
            file.createVariable(name, dtype, ("y", "x"))
        file.createVariable("classes", file.createEnumType("u1", "cloud", {"clear": 0, "low": 3}), ("y", "x"))[:] = 3
    for name in ("text", "letters", "record", "rows"):
        with pytest.raises(nd.DataError, match=f"{name}: holds text, records or lists, not numbers"):
            nd.open_source(f"{tmp_path}/a.nc:{name}")
    with pytest.raises(nd.DataError, match=r"a\.nc:y: is a dimension without coordinates; specify a variable"):
        nd.open_source(f"{tmp_path}/a.nc:y")
    np.testing.assert_array_equal(read(tmp_path / "a.nc"), np.full(SHAPE, 3))
