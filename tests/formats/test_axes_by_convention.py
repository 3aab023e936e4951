"""Axes of generated files, inferred from attributes, names, coordinates or order, and dimensions of groups."""

import itertools
import os

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.formats.conventions import VariableMetadata, infer_axes
from neondist.formats.coordinates import latitudes_of, times_in_seconds

netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")
zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")

ATTRIBUTES = {
    "N": [{"standard_name": "realization"}, {"_CoordinateAxisType": "Ensemble"}],
    "T": [
        {"axis": "T"},
        {"standard_name": "time", "units": "days since 1850-01-01", "calendar": "noleap"},
        {"units": "seconds since 1970-01-01 00:00:00"},
        {"cartesian_axis": "T"},
    ],
    "Z": [
        {"axis": "Z", "units": "m"},
        {"units": "hPa"},
        {"positive": "down", "units": "m"},
        {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"},
        {"standard_name": "air_pressure", "units": "Pa", "axis": "Z"},
    ],
    "Y": [
        {"axis": "Y"},
        {"units": "degrees_north"},
        {"units": "degreeN", "axis": "Y"},
        {"standard_name": "grid_latitude", "units": "degrees"},
        {"standard_name": "projection_y_coordinate", "units": "m"},
        {"_CoordinateAxisType": "GeoY", "units": "km"},
    ],
    "X": [
        {"axis": "X", "standard_name": "longitude", "units": "degrees_east"},
        {"units": "degrees_E"},
        {"standard_name": "projection_x_coordinate"},
        {"cartesian_axis": "X"},
    ],
    "C": [{"standard_name": "radiation_wavelength", "units": "nm"}],
}
NAMES = {
    "N": ["realization", "member", "number"],
    "T": ["time", "Time", "ocean_time", "time_counter", "valid_time"],
    "Z": [
        "lev",
        "plev19",
        "zl",
        "bottom_top",
        "s_rho",
        "deptht",
        "depth",
        "z_w",
        "isobaricInhPa",
        "nVertLevels",
        "level",
    ],
    "Y": ["lat", "yh", "yq", "south_north", "south_north_stag", "eta_rho", "nj", "y", "j", "rlat", "gridlat_0", "nlat"],
    "X": ["lon", "xh", "xq", "west_east", "west_east_stag", "xi_rho", "ni", "x", "i", "rlon", "gridlon_0", "nlon"],
    "C": ["band", "channel", "wavelength"],
}


@st.composite
def variables(draw):
    """Draw the dimensions of a variable as (role, name, attributes of the coordinate or None), and their sizes.

    Unidentified dimensions beside two-dimensional latitudes and longitudes are samples.
    """
    roles = [*draw(st.lists(st.sampled_from("NTZC"), max_size=3, unique=True)), "Y", "X"]
    convention = draw(st.sampled_from(["attributes", "names", "mixed", "cells", "order"]))
    only_by_order = convention == "order"  # Y and X are identified by being last
    roles = [axis for axis in roles if axis != "C"] if only_by_order else draw(st.permutations(roles))
    if convention == "cells" and roles.index("X") < roles.index("Y"):
        roles = [{"X": "Y", "Y": "X"}.get(axis, axis) for axis in roles]
    dimensions = []
    for number, role in enumerate(roles):
        method = draw(st.sampled_from(["attributes", "names"])) if convention == "mixed" else convention
        if method in ("cells", "order"):
            method = "none" if role in ("YXN" if method == "cells" else "YX") else "attributes"
        name, attributes = f"dim{number}w", None
        if method == "names":
            name = draw(st.sampled_from(NAMES[role]))
        elif method == "attributes":
            attributes = draw(st.sampled_from(ATTRIBUTES[role]))
            if draw(st.booleans()):  # a misleading name
                name = draw(st.sampled_from(["lon", "lat", "time", "x", "z"])) + "q" * number
        dimensions.append((role, name, attributes))
    sizes = draw(st.permutations(range(2, 2 + len(roles))))
    depths = [draw(st.integers(0, 2)) for _ in roles]
    return dimensions, sizes, convention == "cells", depths


def write_netcdf(path, dimensions, sizes, with_coordinates, depths):
    with netcdf.Dataset(path, "w") as file:
        middle = file.createGroup("middle")
        groups = [file, middle, middle.createGroup("own")]
        names = [name for _, name, _ in dimensions]
        for (_, name, attributes), n, depth in zip(dimensions, sizes, depths, strict=True):
            for outer in groups[:depth]:  # hidden by the inner dimension of the same name
                outer.createDimension(name, n + 7)
            groups[depth].createDimension(name, n)
            if attributes is not None:
                variable = groups[depth].createVariable(name, "f8", (name,))
                variable[:] = np.arange(n)
                variable.setncatts(attributes)
        variable = groups[2].createVariable("v", "f4", names)
        variable[:] = np.arange(np.prod(sizes)).reshape(sizes)
        if with_coordinates:
            grid_dimensions = [name for role, name, _ in dimensions if role in "YX"]
            for name, units in (("cells_p", "degrees_north"), ("cells_q", "degrees_east")):
                groups[2].createVariable(name, "f4", grid_dimensions).units = units
            variable.coordinates = "cells_q cells_p height"
    return f"{path}:middle/own/v"


def write_zarr(path, dimensions, sizes, with_coordinates, version):
    group = zarr.open_group(str(path), mode="w", zarr_format=version)

    def create_array(name, names, values, attributes):
        options = {"dimension_names": names} if version == 3 else {}
        attributes = attributes if version == 3 else {**attributes, "_ARRAY_DIMENSIONS": list(names)}
        group.create_array(name, data=values, attributes=attributes, **options)

    names = [name for _, name, _ in dimensions]
    for (_, name, attributes), n in zip(dimensions, sizes, strict=True):
        if attributes is not None:
            create_array(name, [name], np.arange(float(n)), attributes)
    variable_attributes = {}
    if with_coordinates:
        grid_dimensions = [(name, n) for (role, name, _), n in zip(dimensions, sizes, strict=True) if role in "YX"]
        for name, units in (("cells_p", "degrees_north"), ("cells_q", "degrees_east")):
            create_array(
                name,
                [dimension for dimension, _ in grid_dimensions],
                np.ones([n for _, n in grid_dimensions]),
                {"units": units},
            )
        variable_attributes = {"coordinates": "cells_q cells_p height"}
    create_array("v", names, np.arange(1, 1 + np.prod(sizes), dtype="i4").reshape(sizes), variable_attributes)
    return f"{path}:v"


@given(variables())
@settings(max_examples=25, deadline=None)
@pytest.mark.long
def test_axes_round_trip(tmp_path_factory, case):
    dimensions, sizes, with_coordinates, depths = case
    folder = tmp_path_factory.mktemp("a")
    if len({name for _, name, _ in dimensions}) < len(dimensions):
        return
    roles = "".join(role for role, _, _ in dimensions)
    expected = "".join(sorted(roles, key="NTZYXC".index)) + "C" * ("C" not in roles)
    version = 2 + sum(sizes) % 2
    for name in (
        write_netcdf(folder / "a.nc", dimensions, sizes, with_coordinates, depths),
        write_zarr(folder / "a.zarr", dimensions, sizes, with_coordinates, version),
    ):
        with nd.open_source(name) as source:
            assert (source.axes, source.stored_axes.letters, source.axes_given) == (expected, roles, True)
            cells = source.read(nd.Box.of(source.shape))
        stored = np.arange(np.prod(sizes)).reshape(sizes) + name.endswith(".zarr:v")
        expected_cells = stored.transpose([roles.index(axis) for axis in expected if axis in roles])
        np.testing.assert_array_equal(cells, expected_cells.reshape(cells.shape))


AMBIGUOUS = {
    "three unidentified": [("a", {}), ("b", {}), ("e", {})],
    "two row axes": [("lat", {}), ("lat2", {}), ("lon", {})],
    "repeated dimension": [("lat", {}), ("lat", {}), ("time", {})],
    "section": [("basin", {}), ("lev", {}), ("lat", {})],
    "contradicting attributes": [("p", {"axis": "X", "units": "degrees_north"}), ("q", {"axis": "Y"})],
    "unstructured grid": [("time", {}), ("ncells", {})],
    "unconventional order": [("x", {}), ("time", {}), ("unknown", {})],
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_ambiguous_axes_are_refused(tmp_path, case):
    sizes = dict(zip([name for name, _ in AMBIGUOUS[case]], itertools.count(3), strict=False))
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, attributes in dict(AMBIGUOUS[case]).items():
            file.createDimension(name, sizes[name])
            if attributes:
                file.createVariable(name, "f8", (name,)).setncatts(attributes)
        file.createVariable("v", "f4", [name for name, _ in AMBIGUOUS[case]])
    with pytest.raises(
        nd.DataError, match=r"a\.nc:v: cannot tell which of its axes .*; give axes, one letter per axis"
    ):
        nd.open_source(f"{tmp_path}/a.nc:v")
    axes = "TYX"[-len(AMBIGUOUS[case]) :]
    with nd.open_source(f"{tmp_path}/a.nc:v", axes=axes) as source:
        assert source.stored_axes.letters == axes


def test_coordinate_arrays_identify_rows_and_columns(tmp_path):
    dimensions = [("N", "first", None), ("Y", "second", None), ("X", "third", None)]
    with nd.open_source(write_netcdf(tmp_path / "a.nc", dimensions, (2, 3, 4), True, (2, 0, 1))) as source:
        assert source.stored_axes.letters == "NYX"


def test_point_lists_are_refused(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("place", 5)
        file.createDimension("time", 3)
        for name, units in (("p", "degrees_north"), ("q", "degrees_east")):
            file.createVariable(name, "f8", ("place",)).units = units
        file.createVariable("v", "f4", ("time", "place")).coordinates = "p q"
    with pytest.raises(nd.DataError, match="'place' has both latitudes and longitudes, so it lists points"):
        nd.open_source(f"{tmp_path}/a.nc:v")


def test_unnamed_dimensions_follow_the_network_input(tmp_path):
    from neondist.train.inference.images import open_images

    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["v"] = np.arange(6 * 7 * 3, dtype="f4").reshape(6, 7, 3)
    with pytest.raises(nd.DataError, match=r"cannot tell which of its axes \(\(no name\), "):
        nd.open_source(tmp_path / "a.nc")
    assert open_images(tmp_path / "a.nc", (8, 8, 3)).source.axes == "YXC"
    with pytest.raises(nd.DataError, match=r"may be 3 channels, but the model takes one channel; .* --axes NYX if"):
        open_images(tmp_path / "a.nc", (8, 8, 1))
    assert open_images(tmp_path / "a.nc", (8, 8, 1), axes="NYX").source.axes == "NYXC"


def test_variable_named_like_a_dimension(tmp_path):
    """Two-dimensional coordinates named like one of their dimensions, or like a dimension of another variable."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("lat", 3), ("lon", 4), ("time", 2)):
            file.createDimension(name, n)
        file.createVariable("lat", "f4", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4)
        file.createVariable("time", "f4", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4) + 5
        file.createVariable("v", "f4", ("time", "lat", "lon"))[:] = 1
    for name, offset in (("lat", 0), ("time", 5)):
        with nd.open_source(f"{tmp_path}/a.nc:{name}") as source:
            assert source.axes == "YXC"
            np.testing.assert_array_equal(
                source.read(nd.Box.of(source.shape))[..., 0], np.arange(12).reshape(3, 4) + offset
            )
    with nd.open_source(f"{tmp_path}/a.nc:v") as source:
        assert source.axes == "TYXC"


BY_NAME = {
    "along_track across_track channel": "YXC", "across_track along_track": "XY", "scanline ground_pixel": "YX",
    "time grid_yt grid_xt": "TYX", "grid_xt pfull grid_yt": "XZY", "Time zaxis_1 yaxis_1 xaxis_1": "TZYX",
    "xt_ocean yt_ocean st_ocean": "XYZ", "i j k": "XYZ", "MT Layer Y X": "NZYX", "lonc latc": "XY", "clat clon": "YX",
    "initial_time0_hours forecast_time1 lv_ISBL0 g0_lat_3 g0_lon_4": "TNZYX", "hybrid lat lon": "ZYX",
    "width height": "XY", "nblon numlat": "XY", "Xlong slat": "XY",
    "time height width": "TYX", "time height y x": "TZYX", "flat y x": "NYX",
}  # fmt: skip


@pytest.mark.parametrize("names", BY_NAME)
def test_dimension_names_of_models_and_swaths(names):
    dimensions = tuple(names.split())
    assert infer_axes("v", VariableMetadata(dimensions), range(2, 2 + len(dimensions))) == BY_NAME[names]


def test_long_names_identify_axes():
    """Identify axes by long_name where no other attribute and no dimension name does."""
    titles = {"a": "Longitude", "b": "y coordinate of projection", "time": "Latitude"}
    coordinates = {name: VariableMetadata((name,), {"long_name": title}) for name, title in titles.items()}
    assert infer_axes("v", VariableMetadata(("time", "a", "b"), {}, coordinates), (2, 3, 4)) == "TXY"


def test_group_links_are_not_followed(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("lat", 3), ("lon", 4)):
            file.createDimension(name, n)
        file.createVariable("v", "f4", ("lat", "lon"))[:] = 1
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "a.nc", "r+") as file:
        file["a"] = h5py.ExternalLink(tmp_path / "pipe", "/x")  # libhdf5 would wait for a writer
        file["loop"], file["nothing"] = h5py.SoftLink("/loop"), h5py.SoftLink("/gone")
    with nd.open_source(tmp_path / "a.nc") as source:
        assert source.axes == "YXC"
        assert source.metadata_names() == []


def test_unwritten_cells_of_unlimited_dimensions(tmp_path):
    """Compare shorter variables along an unlimited dimension, which netCDF4 fills up."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("time", None), ("lat", 3), ("lon", 4)):
            file.createDimension(name, n)
        for name, dtype, n in (("v", "f4", 2), ("w", "i2", 5), ("u", "i2", 0)):
            variable = file.createVariable(name, dtype, ("time", "lat", "lon"), fill_value=-7)
            variable[:n] = np.arange(n * 12).reshape(n, 3, 4)
        variable.set_auto_maskandscale(False)
        variable.scale_factor = 0.5
    for name in "vwu":
        with netcdf.Dataset(tmp_path / "a.nc") as file, nd.open_source(f"{tmp_path}/a.nc:{name}") as source:
            expected = file[name][:]
            assert source.shape == (5, 3, 4, 1)
            cells = source.read(nd.Box.of(source.shape))
            np.testing.assert_array_equal(source.read([(1, 4), (1, 2), (0, 4), (0, 1)]), cells[1:4, 1:2])
        np.testing.assert_array_equal(cells[..., 0], expected.data if name == "w" else expected.filled(np.nan))


def test_variable_length_text_is_reported(tmp_path):
    """Refuse to guess axes, times and latitudes if an attribute of a coordinate cannot be read."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n, units in (("gx", 4, "degrees_east"), ("lat", 3, "radians"), ("time", 2, "days since 2000-01-01")):
            file.createDimension(name, n)
            coordinate = file.createVariable(name, "f8", (name,))
            coordinate[:] = 0
            coordinate.setncattr_string("units", units)
        file["time"].units = "days since 2000-01-01"
        file["time"].setncattr_string("calendar", "360_day")
        file.createVariable("v", "f4", ("time", "gx", "lat"))
    with pytest.raises(nd.DataError, match=r"coordinate 'gx' has units as variable-length text, .*-a units,gx,o,c,"):
        nd.open_source(f"{tmp_path}/a.nc:v")
    with nd.open_source(f"{tmp_path}/a.nc:v", axes="TXY") as source:
        auxiliary, _ = source.auxiliary_variables()
        with pytest.raises(nd.DataError, match="coordinate time has calendar as variable-length text"):
            times_in_seconds("a.nc", next(variable for variable in auxiliary if variable.name == "time"))
        with pytest.raises(nd.DataError, match="coordinate lat has units as variable-length text"):
            latitudes_of(source, auxiliary)
