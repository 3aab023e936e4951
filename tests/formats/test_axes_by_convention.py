"""Axes of generated files, told by attributes, names, coordinates of cells or order; dimensions of groups above."""

import itertools
import os

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.formats.conventions import Variable, infer_axes
from neondist.formats.coordinates import latitudes_of, times_of

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
    """Roles in the order of the file, and of each dimension its name and the attributes of its coordinate, or None.

    What nothing names beside the cells of latitudes and longitudes is samples.
    """
    roles = [*draw(st.lists(st.sampled_from("NTZC"), max_size=3, unique=True)), "Y", "X"]
    told_by = draw(st.sampled_from(["attributes", "names", "mixed", "cells", "order"]))
    by_order = told_by == "order"  # nothing tells Y and X but that they come last
    roles = [one for one in roles if one != "C"] if by_order else draw(st.permutations(roles))
    if told_by == "cells" and roles.index("X") < roles.index("Y"):
        roles = [{"X": "Y", "Y": "X"}.get(one, one) for one in roles]
    found = []
    for number, role in enumerate(roles):
        by = draw(st.sampled_from(["attributes", "names"])) if told_by == "mixed" else told_by
        if by in ("cells", "order"):
            by = "none" if role in ("YXN" if by == "cells" else "YX") else "attributes"
        name, attributes = f"dim{number}w", None
        if by == "names":
            name = draw(st.sampled_from(NAMES[role]))
        elif by == "attributes":
            attributes = draw(st.sampled_from(ATTRIBUTES[role]))
            if draw(st.booleans()):  # a name that says another thing
                name = draw(st.sampled_from(["lon", "lat", "time", "x", "z"])) + "q" * number
        found.append((role, name, attributes))
    sizes = draw(st.permutations(range(2, 2 + len(roles))))
    places = [draw(st.integers(0, 2)) for _ in roles]
    return found, sizes, told_by == "cells", places


def write_netcdf(path, dimensions, sizes, by_cells, places):
    with netcdf.Dataset(path, "w") as file:
        middle = file.createGroup("middle")
        groups = [file, middle, middle.createGroup("own")]
        names = [name for _, name, _ in dimensions]
        for (_, name, attributes), n, place in zip(dimensions, sizes, places, strict=True):
            for outer in groups[:place]:  # of the same name and another extent, which the inner one hides
                outer.createDimension(name, n + 7)
            groups[place].createDimension(name, n)
            if attributes is not None:
                made = groups[place].createVariable(name, "f8", (name,))
                made[:] = np.arange(n)
                made.setncatts(attributes)
        made = groups[2].createVariable("v", "f4", names)
        made[:] = np.arange(np.prod(sizes)).reshape(sizes)
        if by_cells:
            across = [name for role, name, _ in dimensions if role in "YX"]
            for name, units in (("cells_p", "degrees_north"), ("cells_q", "degrees_east")):
                groups[2].createVariable(name, "f4", across).units = units
            made.coordinates = "cells_q cells_p height"
    return f"{path}:middle/own/v"


def write_zarr(path, dimensions, sizes, by_cells, version):
    group = zarr.open_group(str(path), mode="w", zarr_format=version)

    def make(name, names, values, attributes):
        told = {"dimension_names": names} if version == 3 else {}
        attributes = attributes if version == 3 else {**attributes, "_ARRAY_DIMENSIONS": list(names)}
        group.create_array(name, data=values, attributes=attributes, **told)

    names = [name for _, name, _ in dimensions]
    for (_, name, attributes), n in zip(dimensions, sizes, strict=True):
        if attributes is not None:
            make(name, [name], np.arange(float(n)), attributes)
    beside = {}
    if by_cells:
        across = [(name, n) for (role, name, _), n in zip(dimensions, sizes, strict=True) if role in "YX"]
        for name, units in (("cells_p", "degrees_north"), ("cells_q", "degrees_east")):
            make(name, [one for one, _ in across], np.ones([n for _, n in across]), {"units": units})
        beside = {"coordinates": "cells_q cells_p height"}
    make("v", names, np.arange(1, 1 + np.prod(sizes), dtype="i4").reshape(sizes), beside)
    return f"{path}:v"


@given(variables())
@settings(max_examples=25, deadline=None)
@pytest.mark.long
def test_axes_are_those_that_were_written(tmp_path_factory, case):
    dimensions, sizes, by_cells, places = case
    folder = tmp_path_factory.mktemp("a")
    if len({name for _, name, _ in dimensions}) < len(dimensions):
        return
    roles = "".join(role for role, _, _ in dimensions)
    expected = "".join(sorted(roles, key="NTZYXC".index)) + "C" * ("C" not in roles)
    version = 2 + sum(sizes) % 2
    for name in (
        write_netcdf(folder / "a.nc", dimensions, sizes, by_cells, places),
        write_zarr(folder / "a.zarr", dimensions, sizes, by_cells, version),
    ):
        with nd.open_source(name) as source:
            assert (source.axes, source.stored.stored, source.named) == (expected, roles, True)
            cells = source.read(nd.Box.of(source.shape))
        stored = np.arange(np.prod(sizes)).reshape(sizes) + name.endswith(".zarr:v")
        whole = stored.transpose([roles.index(one) for one in expected if one in roles])
        np.testing.assert_array_equal(cells, whole.reshape(cells.shape))


UNCLEAR = {
    "three that nothing names": [("a", {}), ("b", {}), ("e", {})],
    "two of rows": [("lat", {}), ("lat2", {}), ("lon", {})],
    "the same twice": [("lat", {}), ("lat", {}), ("time", {})],
    "a section": [("basin", {}), ("lev", {}), ("lat", {})],
    "one that says two things": [("p", {"axis": "X", "units": "degrees_north"}), ("q", {"axis": "Y"})],
    "cells of no grid": [("time", {}), ("ncells", {})],
    "an order against the convention": [("x", {}), ("time", {}), ("unknown", {})],
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_unclear_is_refused(tmp_path, case):
    sizes = dict(zip([name for name, _ in UNCLEAR[case]], itertools.count(3), strict=False))
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, attributes in dict(UNCLEAR[case]).items():
            file.createDimension(name, sizes[name])
            if attributes:
                file.createVariable(name, "f8", (name,)).setncatts(attributes)
        file.createVariable("v", "f4", [name for name, _ in UNCLEAR[case]])
    with pytest.raises(
        nd.DataError, match=r"a\.nc:v: which of its axes .* is ambiguous: .*; give axes, one letter per axis"
    ):
        nd.open_source(f"{tmp_path}/a.nc:v")
    axes = "TYX"[-len(UNCLEAR[case]) :]
    with nd.open_source(f"{tmp_path}/a.nc:v", axes=axes) as source:
        assert source.stored.stored == axes


def test_cells_tell_rows_and_columns_among_others(tmp_path):
    dimensions = [("N", "first", None), ("Y", "second", None), ("X", "third", None)]
    with nd.open_source(write_netcdf(tmp_path / "a.nc", dimensions, (2, 3, 4), True, (2, 0, 1))) as source:
        assert source.stored.stored == "NYX"


def test_points_are_no_grid(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("place", 5)
        file.createDimension("time", 3)
        for name, units in (("p", "degrees_north"), ("q", "degrees_east")):
            file.createVariable(name, "f8", ("place",)).units = units
        file.createVariable("v", "f4", ("time", "place")).coordinates = "p q"
    with pytest.raises(nd.DataError, match="'place' has both latitudes and longitudes, so it lists points"):
        nd.open_source(f"{tmp_path}/a.nc:v")


def test_dimensions_without_names_leave_the_choice_to_the_network(tmp_path):
    from neondist.train.inference.images import open_images

    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["v"] = np.arange(6 * 7 * 3, dtype="f4").reshape(6, 7, 3)
    with pytest.raises(nd.DataError, match=r"which of its axes \(\(no name\), .* is ambiguous"):
        nd.open_source(tmp_path / "a.nc")
    assert open_images(tmp_path / "a.nc", (8, 8, 3)).source.axes == "YXC"
    assert open_images(tmp_path / "a.nc", (8, 8, 1)).source.axes == "NYXC"


def test_a_variable_that_is_called_as_a_dimension(tmp_path):
    """Coordinates of two dimensions that are called as one of theirs, or as one that they do not have."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("lat", 3), ("lon", 4), ("time", 2)):
            file.createDimension(name, n)
        file.createVariable("lat", "f4", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4)
        file.createVariable("time", "f4", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4) + 5
        file.createVariable("v", "f4", ("time", "lat", "lon"))[:] = 1
    for name, more in (("lat", 0), ("time", 5)):
        with nd.open_source(f"{tmp_path}/a.nc:{name}") as source:
            assert source.axes == "YXC"
            np.testing.assert_array_equal(
                source.read(nd.Box.of(source.shape))[..., 0], np.arange(12).reshape(3, 4) + more
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
def test_names_of_models_and_of_swaths(names):
    dimensions = tuple(names.split())
    assert infer_axes("v", Variable(dimensions), range(2, 2 + len(dimensions))) == BY_NAME[names]


def test_titles_of_coordinates():
    """A long_name tells what neither another attribute nor the name of a dimension does."""
    titles = {"a": "Longitude", "b": "y coordinate of projection", "time": "Latitude"}
    along = {name: Variable((name,), {"long_name": title}) for name, title in titles.items()}
    assert infer_axes("v", Variable(("time", "a", "b"), {}, along), (2, 3, 4)) == "TXY"


def test_no_link_of_a_group_is_followed(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("lat", 3), ("lon", 4)):
            file.createDimension(name, n)
        file.createVariable("v", "f4", ("lat", "lon"))[:] = 1
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "a.nc", "r+") as file:
        file["a"] = h5py.ExternalLink(tmp_path / "pipe", "/x")  # which libhdf5 would wait for
        file["loop"], file["nothing"] = h5py.SoftLink("/loop"), h5py.SoftLink("/gone")
    with nd.open_source(tmp_path / "a.nc") as source:
        assert source.axes == "YXC"
        assert source.metadata_names() == []


def test_what_was_written_of_an_unlimited_dimension(tmp_path):
    """Of several variables along one, netCDF4 fills up the shorter ones."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("time", None), ("lat", 3), ("lon", 4)):
            file.createDimension(name, n)
        for name, kind, n in (("v", "f4", 2), ("w", "i2", 5), ("u", "i2", 0)):
            made = file.createVariable(name, kind, ("time", "lat", "lon"), fill_value=-7)
            made[:n] = np.arange(n * 12).reshape(n, 3, 4)
        made.set_auto_maskandscale(False)
        made.scale_factor = 0.5
    for name in "vwu":
        with netcdf.Dataset(tmp_path / "a.nc") as file, nd.open_source(f"{tmp_path}/a.nc:{name}") as source:
            expected = file[name][:]
            assert source.shape == (5, 3, 4, 1)
            cells = source.read(nd.Box.of(source.shape))
            np.testing.assert_array_equal(source.read([(1, 4), (1, 2), (0, 4), (0, 1)]), cells[1:4, 1:2])
        np.testing.assert_array_equal(cells[..., 0], expected.data if name == "w" else expected.filled(np.nan))


def test_text_of_variable_length_is_missed(tmp_path):
    """Where an attribute of a coordinate cannot be read, neither axes nor times nor degrees are guessed."""
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n, units in (("gx", 4, "degrees_east"), ("lat", 3, "radians"), ("time", 2, "days since 2000-01-01")):
            file.createDimension(name, n)
            made = file.createVariable(name, "f8", (name,))
            made[:] = 0
            made.setncattr_string("units", units)
        file["time"].units = "days since 2000-01-01"
        file["time"].setncattr_string("calendar", "360_day")
        file.createVariable("v", "f4", ("time", "gx", "lat"))
    with pytest.raises(nd.DataError, match=r"coordinate 'gx' has units as variable-length text, .*-a units,gx,o,c,"):
        nd.open_source(f"{tmp_path}/a.nc:v")
    with nd.open_source(f"{tmp_path}/a.nc:v", axes="TXY") as source:
        beside, _ = source.auxiliary_variables()
        with pytest.raises(nd.DataError, match="coordinate time has calendar as variable-length text"):
            times_of("a.nc", next(one for one in beside if one.name == "time"))
        with pytest.raises(nd.DataError, match="coordinate lat has units as variable-length text"):
            latitudes_of(source, beside)
