"""Time series of NetCDF and Zarr files compared with xarray on several grids, and inconsistent files."""

import shutil

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.formats.cf_time import seconds_of_cf_times

pytest.importorskip("netCDF4", reason="files are made by netCDF4")
xarray = pytest.importorskip("xarray", reason="the oracle")
from climate import make_weather, write_dataset, write_series  # noqa: E402

ARGUMENTS = {"variables": ["t2m", "z"], "levels": [500, 850], "targets": ["u10", "z500"], "steps": 2, "lead": 1}
ARGUMENTS |= {"validation": 3, "test": 4}


def load_on_ranks(path, ranks, numbers, **overrides):
    """Return training samples gathered from `ranks` ranks, and the statistics."""

    def body(world):
        grid = nd.ProcessGrid(world)
        data = nd.ClimateFiles(str(path), **(ARGUMENTS | overrides))
        data.open(grid)
        split = data.train
        x, y = split.images(numbers, "float64"), split.targets(numbers)
        global_arrays = [
            nd.GlobalArray(grid, (len(numbers), *data.sample_shape[:-1], array.shape[-1])) for array in (x, y)
        ]
        climatology = nd.GlobalArray(grid, (1, *data.sample_shape[:-1], 2), dtype="float64")
        statistics = [
            split.factor_and_subtrahend,
            data.fields.mean,
            data.fields.std,
            [len(part) for part in data.splits.values()],
        ]
        arrays = [
            *(ga.gather(array) for ga, array in zip(global_arrays, (x, y), strict=True)),
            climatology.gather(data.fields.climatology[None])[0],
            *statistics,
        ]
        data.close()
        return arrays

    return loopback.run(ranks, body)[0]


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_samples_match_xarray(tmp_path, suffix):
    if suffix == ".zarr":
        pytest.importorskip("zarr", reason="Zarr needs zarr")
    weather_series = write_series(tmp_path, suffix).astype("f8")
    training = weather_series.isel(time=slice(0, 23 + 2))  # the times of its 23 samples and their targets
    numbers = np.array([7, 8, 0])  # the first two reach into the second file
    x, y, climatology, _, mean, std, counts = load_on_ranks(tmp_path / f"*{suffix}", 1, numbers, validation=2, test=3)
    assert counts == [23, 2, 3]
    inputs = [
        ("t2m", weather_series.t2m),
        ("z500", weather_series.z.sel(level=500)),
        ("z850", weather_series.z.sel(level=850)),
    ]
    training_inputs = [training.t2m, training.z.sel(level=500), training.z.sel(level=850)]
    for channel, ((_, variable), training_part) in enumerate(zip(inputs, training_inputs, strict=True)):
        normalised = ((variable - training_part.mean()) / training_part.std()).values
        for row, number in enumerate(numbers):
            np.testing.assert_allclose(x[row, ..., channel], normalised[number], atol=2e-5)
            np.testing.assert_allclose(x[row, ..., 3 + channel], normalised[number + 1], atol=2e-5)
    for channel, (variable, training_part) in enumerate(
        [(weather_series.u10, training.u10), (inputs[1][1], training_inputs[1])]
    ):
        normalised = ((variable - training_part.mean()) / training_part.std()).values
        np.testing.assert_allclose(y[:, ..., channel], normalised[numbers + 2], atol=2e-5)
        np.testing.assert_allclose(
            [mean[channel], std[channel]], [training_part.mean(), training_part.std()], rtol=1e-12, atol=1e-12
        )
        np.testing.assert_allclose(climatology[..., channel], training_part.mean("time"), rtol=1e-12)


@pytest.mark.parametrize(("steps", "lead"), [(1, 0), (1, 1), (3, 2)])
def test_splits_from_dates(tmp_path, steps, lead):
    """A target belongs to the split of the last date that is not later."""
    times = write_series(tmp_path).time.values.astype("datetime64[s]").astype(str)
    data = nd.ClimateFiles(
        str(tmp_path / "*.nc"), ["t2m"], steps=steps, lead=lead, validation=times[12], test=times[20][:16]
    )
    splits = data._sample_numbers_by_split() if data.check() is None else ()
    targets = [numbers + steps - 1 + lead for numbers in splits]
    assert [(first[0], first[-1]) for first in targets] == [(steps - 1 + lead, 11), (12, 19), (20, 29)]
    with pytest.raises(nd.DataError, match=r"validation: .* is not before the first test sample"):
        nd.ClimateFiles(str(tmp_path / "*.nc"), ["t2m"], validation=times[25], test=times[20]).check()


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": "2100-01-01"}, "test: no target is at 2100-01-01 or later; give an earlier date"),
        ({"validation": "1900-01-01"}, "validation: 30 of 30 samples for validation and 0 for test leave none"),
        ({"test": "1900-02-30"}, "test"),
    ],
)
def test_dates_of_empty_splits(tmp_path, splits, message):
    write_series(tmp_path)
    with pytest.raises(nd.DataError, match=message):
        nd.ClimateFiles(str(tmp_path / "*.nc"), ["t2m"], lead=0, **splits).check()


def test_samples_are_independent_of_the_grid(tmp_path):
    write_series(tmp_path, files=2, times=6, extent=(7, 5))
    expected, *results = (load_on_ranks(tmp_path / "*.nc", ranks, np.array([3, 0]), test=2) for ranks in (1, 4))
    for result in results:
        for a, b in zip(expected, result, strict=True):
            np.testing.assert_array_equal(a, b)


def test_ranks_read_only_their_tiles(tmp_path):
    write_series(tmp_path, extent=(8, 8))
    data = nd.ClimateFiles(str(tmp_path / "*.nc"), ["t2m"], validation=3, normalise="none")
    data.check()
    tiles = data.open_splits(nd.ProcessGrid.serial().single_tile_grid(nd.geometry.GridShape(1, 2, 2), 3))[0].tiles
    bytes_before = data._series.source_containing(0).bytes_read
    assert tiles[np.arange(5)].shape == (5, 4, 4, 1)
    assert data._series.source_containing(0).bytes_read - bytes_before == 5 * 4 * 4 * 4


def test_channel_names(tmp_path):
    write_series(tmp_path)
    data = nd.ClimateFiles(str(tmp_path / "*.nc"), ["t2m", "z"], levels={"z": [500]}, steps=3)
    data.check()
    assert data.sample_shape == (6, 8, 6)
    assert data.channel_names(data._series) == ["t2m@t-2", "z500@t-2", "t2m@t-1", "z500@t-1", "t2m", "z500"]
    assert data.fields.names == ["t2m", "z500"]
    assert [channel.units for channel in data.fields.channels] == ["K", "m2 s-2"]


@pytest.mark.parametrize("encoding", [{}, {"dtype": "int16", "_FillValue": -99}])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_missing_cells_are_filled(tmp_path, suffix, encoding):
    if suffix == ".zarr":
        pytest.importorskip("zarr", reason="Zarr needs zarr")
    data = make_weather(0, 12)
    data.t2m[3, 2, 1] = np.nan
    data.t2m.encoding = encoding
    write_dataset(data, tmp_path / f"a{suffix}")
    arguments = {"variables": ["t2m"], "validation": 2, "normalise": "none"}
    filled = nd.ClimateFiles(str(tmp_path / f"a{suffix}"), fill=250.0, **arguments)
    filled.open(nd.ProcessGrid.serial())
    assert filled.train.images([3])[0, 2, 1, 0] == 250
    with pytest.raises(nd.DataError, match=rf"a\{suffix}:t2m: has missing values \(NaN\); replace"):
        nd.ClimateFiles(str(tmp_path / f"a{suffix}"), **arguments).open(nd.ProcessGrid.serial())


def disorder_times(data):
    return data.isel(time=[0, 2, 1, *range(3, 10)])


def convert_to_celsius(data):
    data = data.copy()
    data["t2m"] = (data.t2m - 273.15).assign_attrs(units="degC")
    return data


INCONSISTENT = {
    "disorder": (disorder_times, {}, r"1\.nc: times are not increasing: time 3 of .*1\.nc is not .*; sort"),
    "gap": (lambda d: d.isel(time=[0, 1, 2, *range(5, 10)]), {}, r"1\.nc: has a gap .* is 18 hours after .* 6 hours"),
    "gap between files": (lambda d: d.isel(time=slice(3, 10)), {}, r"a gap .* time 1 of .*1\.nc is 1 day after"),
    "same times": (lambda d: make_weather(0, 10), {}, r"1\.nc: times .* increasing: time 1 .*last of .*0\.nc; sort"),
    "different units": (convert_to_celsius, {}, r"1\.nc: t2m has units 'degC', but 'K' in .*0\.nc; convert"),
    "other grid": (lambda d: d.isel(lat=slice(0, 5)), {}, r"1\.nc:t2m: has the grid lat 5 x lon 8, but .* 6 x lon 8"),
    "reversed axis": (lambda d: d.isel(lat=np.arange(6)[::-1]), {}, r"1\.nc:t2m: its coordinate lat .*; reverse that"),
    "different dimensions": (
        lambda d: d.assign(u10=d.u10.rename(lat="y")), {"variables": ["t2m", "u10"]},
        r"1\.nc:u10: has the grid y 6 x lon 8, but .*share their dimensions: regrid",
    ),
    "no spacing": (
        lambda d: d.assign_coords(lat=d.lat.where(d.lat != d.lat[2])), {}, r"1\.nc:t2m: its coordinate lat has missing",
    ),
    "shifted grid": (lambda d: d.assign_coords(lat=d.lat + 1), {}, r"coordinate lat differs .*; regrid one"),
    "different calendar": (
        lambda d: d.convert_calendar("noleap", use_cftime=True), {},
        r"1\.nc: its times have the calendar 'noleap', but .*0\.nc has 'proleptic_gregorian'; convert",
    ),
    "missing time": (
        lambda d: d.assign_coords(time=d.time.where(d.time != d.time[3])), {}, r"1\.nc:time: value 4 is missing; give",
    ),
    "no units": (lambda d: d.assign(t2m=d.t2m.drop_attrs()), {}, r"1\.nc: t2m has units '', but 'K' in .*0\.nc; conv"),
    "text": (lambda d: d.assign(t2m=d.t2m.astype(str)), {}, r"1\.nc:t2m: holds text, .*; specify a variable of"),
    "no such variable": (lambda d: d.drop_vars("t2m"), {}, r"1\.nc: has no array 't2m'; choose"),
    "no such level": (
        lambda d: d.isel(level=[0, 2]), {"variables": ["z"], "levels": [500]},
        r"1\.nc:z: has no level 500; choose from 850, 250",
    ),
    "missing levels": (lambda d: d, {"variables": ["z"]}, r"0\.nc:z: has 3 levels; choose some with levels: 850, 500"),
    "reordered levels": (
        lambda d: d.isel(level=[1, 0, 2]), {"variables": ["z"], "levels": [500]}, r"level z500 at a different position",
    ),
    "no times": (lambda d: d.isel(time=0), {}, r"1\.nc:t2m: has no time axis"),
    "numbers for times": (
        lambda d: d.assign_coords(time=("time", np.arange(10.0), {"axis": "T"})), {}, r"1\.nc: its coordinate time has",
    ),
    "too few times": (lambda d: d, {"lead": 20}, r"too few times: with steps: 1 and lead: 20, 20 times give 0"),
    "unknown target": (lambda d: d, {"targets": ["pr"]}, r"has no array 'pr'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def first_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "0.nc"
    write_dataset(make_weather(0, 10), path)
    return path


@pytest.mark.parametrize("name", INCONSISTENT)
def test_inconsistent_files(first_file, tmp_path, name):
    change, arguments, message = INCONSISTENT[name]
    shutil.copy(first_file, tmp_path)
    changed = change(make_weather(10, 10))
    if changed.time.dtype.kind == "M":
        write_dataset(changed, tmp_path / "1.nc")
    else:
        changed.to_netcdf(tmp_path / "1.nc")
    with pytest.raises(nd.DataError, match=message):
        nd.ClimateFiles(str(tmp_path / "*.nc"), **({"variables": ["t2m"]} | arguments)).check()


def test_missing_zarr_variable(tmp_path):
    pytest.importorskip("zarr", reason="Zarr needs zarr")
    write_dataset(make_weather(0, 6), tmp_path / "0.zarr")
    with pytest.raises(
        nd.DataError, match=r"0\.zarr: has no array 'pr'; choose one of lat, level, lon, t2m, time, u10, z"
    ):
        nd.ClimateFiles(str(tmp_path / "*.zarr"), ["t2m", "pr"]).check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variables": []}, "variables: .* expected distinct names"),
        ({"variables": ["t2m", "t2m"]}, "distinct names"),
        ({"levels": {"w": [500]}}, "levels: 'w' is not among the variables"),
        ({"fill": float("nan")}, "fill"),
        ({"steps": 0}, "steps"),
        ({"test": "2018"}, "test: '2018' is not a date; expected one such as '2018-01-01'"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.ClimateFiles("*.nc", **({"variables": ["t2m"]} | arguments))


def test_command_reports_file_and_line(tmp_path, capsys):
    write_dataset(make_weather(0, 10), tmp_path / "0.nc")
    write_dataset(disorder_times(make_weather(10, 10)), tmp_path / "1.nc")
    (tmp_path / "run.yaml").write_text(
        f"!FitExperiment\ndataset: !ClimateFiles {{files: '{tmp_path}/*.nc', variables: [t2m]}}\n"
        "model: !ConvnetDist\n  layers: [!ConvLayerDist {out_channels: 1, kernel_size: 1}]\n  cost: !MSE {}\n"
    )
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err
    assert "run.yaml:2: dataset: " in message
    assert "times are not increasing" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("freq", ["MS", "ME", "YS", "6h"])
@pytest.mark.parametrize("missing", [None, 1, 2])
def test_gaps_in_series(tmp_path, freq, missing):
    kept = [number for number in range(4) if number != missing]
    times = xarray.date_range("2001-01-01", periods=4, freq=freq)
    data = make_weather(0, 4).assign_coords(time=times).isel(time=kept)
    data.time.encoding["units"] = "hours since 2001-01-01"
    data.to_netcdf(tmp_path / "a.nc")
    dataset = nd.ClimateFiles(str(tmp_path / "a.nc"), ["t2m"], validation=None)
    if missing is None:
        dataset.check()
    else:
        with pytest.raises(nd.DataError, match=rf"a gap in time: time {missing + 1} of .*a.nc is .* after the one"):
            dataset.check()


CALENDARS = ["standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day"]


@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.filterwarnings("ignore:this date")  # by cftime, for years below 1
def test_calendars_match_cftime(calendar):
    cftime = pytest.importorskip("cftime")
    rng = np.random.default_rng(0)
    zero = seconds_of_cf_times("t", 0, "days since 2000-01-01", calendar)
    for case in range(80):
        year, month, day, hour = (int(rng.integers(1, limit)) for limit in (2400, 13, 29, 24))
        if case % 4 == 1:  # dates missing from some calendars
            month, day, hour = (
                int(rng.choice(choices)) for choices in ([0, 2, 4, 12, 13], [0, 28, 29, 30, 31, 32], [0, 24])
            )
        elif case % 4 == 2:
            year = int(rng.choice([-5, -4713, 4, 1900, 2000]))
        elif case % 4 == 3:
            year, month, day = 1582, 10, int(rng.integers(1, 20))
        units = f"hours since {year:04}-{month}-{day} {hour}:30:00"
        value = int(rng.integers(0, 10**6))
        try:
            date = cftime.num2date(value, units, calendar)
        except ValueError:
            with pytest.raises(
                nd.DataError,
                match=r"begin at a date that does not exist in the calendar '.*';"
                r" correct its",
            ):
                seconds_of_cf_times("t", value, units, calendar)
            continue
        expected = cftime.date2num(date, "seconds since 2000-01-01", calendar)
        assert abs(seconds_of_cf_times("t", value, units, calendar) - zero - expected) < 1e-3


@pytest.mark.parametrize(
    ("units", "calendar", "message"),
    [
        ("months since 2000-01-01", "standard", "are not supported; use days, hours"),
        ("days since yesterday", "standard", "are not supported; use days, hours"),
        ("days since 2000-01-01", "lunar", "calendar 'lunar' is unknown"),
    ],
)
def test_unsupported_time_units(units, calendar, message):
    with pytest.raises(nd.DataError, match=message):
        seconds_of_cf_times("t", [0, 1], units, calendar)
    assert seconds_of_cf_times("t", 0, "days since 2000-01-01T06:00:00+02:00") == seconds_of_cf_times(
        "t", 0, "days since 2000-01-01 04:00"
    )


@pytest.mark.parametrize(("columns", "span", "periodic"), [
    (8, 360, True), (8, 180, False), (7, 360 * 7 / 6, False), (8, -360, True), (1081, 360, True), (361, 361, False),
])  # fmt: skip
def test_init_pads_periodic_longitudes_by_wrapping(tmp_path, monkeypatch, columns, span, periodic):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "era").mkdir()
    data = make_weather(extent=(4, columns)).assign_coords(number=0)  # scalars are common, such as ERA5's number
    data["lon"] = ("lon", (np.arange(columns) * span / columns).astype("float32"), data.lon.attrs)
    write_dataset(data, tmp_path / "era" / "0.nc")
    assert main(["init", "era"]) == 0
    first = load_experiment("era.yaml").model.leaves[0]
    assert first.arguments()["padding_mode"] == (["replicate", "wrap"] if periodic else "replicate")
