"""Forecasts and roll-outs against outputs of the network combined with xarray, on any number of ranks."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.formats.fields import FieldChannel, FieldMetadata
from neondist.formats.month_step import MonthStep
from neondist.session import follow_checkpoints
from neondist.train import evaluate_checkpoint
from neondist.train.checkpoint_field_metadata import field_metadata_from_texts, field_metadata_texts
from neondist.train.inference.forecast import forecast, require_outputs_cover_inputs

pytest.importorskip("netCDF4", reason="files are made by netCDF4")
xarray = pytest.importorskip("xarray", reason="the oracle")
from climate import make_weather, write_dataset, write_series  # noqa: E402

EXPERIMENT_YAML = """!FitExperiment
dataset: !ClimateFiles
  {{files: '{path}/*.nc', variables: [t2m, z], levels: [850, 500], steps: {steps}, lead: {lead}, test: 4}}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {{out_channels: 4, kernel_size: 3, padding: 1}}
    - !ActivationLayer {{activation: !Tanh {{}}}}
    - !ConvLayerDist
      {{out_channels: 3, kernel_size: 3, padding: 1, padding_mode: [zeros, wrap], scheme: halo}}
  cost: !MSE {{weights: cos(lat)}}
batch_size: 4
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Function that trains for some steps and lead, once each; it returns the folder and the weather."""
    folders, weather = {}, None

    def train(steps=2, lead=1):
        nonlocal weather
        key = steps, lead
        if key not in folders:
            path = tmp_path_factory.mktemp("trained")
            weather = write_series(path)
            (path / "run.yaml").write_text(EXPERIMENT_YAML.format(path=path, steps=steps, lead=lead))
            assert main(["run", str(path / "run.yaml"), "--output", str(path / "run")]) == 0
            folders[key] = path
        return folders[key], weather

    return train


def load_run(path, **changes):
    from neondist.config import load_experiment

    return load_experiment(path / "run.yaml", overrides=[f"{name}={value}" for name, value in changes.items()])


def load_network(path):
    """Return a function from fields (time, H, W, C) in their units to the forecast from the last field."""
    experiment = load_run(path)
    data, model = experiment.dataset, experiment.model
    data.open(nd.ProcessGrid.serial())
    model.build(data.sample_shape, 1, nd.ProcessGrid.serial())
    from neondist.io.checkpoint import open_checkpoint
    from neondist.train.inference_weights import load_inference_weights

    with open_checkpoint(path / "run" / "checkpoint.h5", model.grid.world) as file:
        load_inference_weights(file, model)
    mean, std = data.fields.mean, data.fields.std

    def run(fields):
        x = np.concatenate([(field - mean) / std for field in fields], axis=-1)
        return model.fprop(x[None].astype("f4"), training=False)[0] * std + mean

    return run


def stack_fields(weather):
    fields = [weather.t2m, weather.z.sel(level=850), weather.z.sel(level=500)]
    return np.stack([field.values for field in fields], axis=-1).astype("f8")


def stack_predictions(predictions):
    return np.stack([predictions[name].values for name in ("t2m", "z850", "z500")], axis=-1)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize(("steps", "lead"), [(2, 1), (1, 3)])
@pytest.mark.long
def test_forecasts_from_all_times_of_files(trained, tmp_path, steps, lead):
    path, weather = trained(steps, lead)
    target = tmp_path / "out.nc"
    options = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(path / "[01].nc")]
    assert main(["predict", str(path / "run.yaml"), *options, "--output", str(target)]) == 0
    fields, run = stack_fields(weather)[:20], load_network(path)
    expected = [run(fields[at : at + steps]) for at in range(20 - steps + 1)]
    with xarray.open_dataset(target) as predictions:
        assert_close(stack_predictions(predictions), np.stack(expected))
        expected_times = weather.time.values[steps - 1 : 20] + np.timedelta64(6 * lead, "h")
        np.testing.assert_array_equal(predictions.time.values, expected_times)
        for name in ("lat", "lon"):
            np.testing.assert_array_equal(predictions[name], weather[name])
            assert predictions[name].attrs == weather[name].attrs
        assert predictions.t2m.dims == ("time", "lat", "lon")
        assert predictions.t2m.attrs == weather.t2m.attrs
        assert predictions.z500.attrs == {**weather.z.attrs, "level": 500}
        assert (predictions.attrs["title"], predictions.attrs["Conventions"]) == ("made up", "CF-1.8")


def roll_out(path, weather, steps, count):
    fields, run = list(stack_fields(weather)[-steps:]), load_network(path)
    for _ in range(count):
        fields.append(run(fields[-steps:]))
    return np.stack(fields[steps:])


RANKS_AND_GRIDS = {
    "one": (1, {}),
    "two replicas of two tiles": (4, {"grid.replicas": 2}),
    "tiles that overlap": (2, {"model.scheme": "overlap_tile"}),
}


@pytest.mark.parametrize("name", RANKS_AND_GRIDS)
@pytest.mark.long
def test_roll_outs_feed_forecasts_back(trained, tmp_path, name):
    path, weather = trained()
    ranks, changes = RANKS_AND_GRIDS[name]

    def body(world):
        experiment = load_run(path, **changes)
        grid = experiment.open_grid(world)
        shape = forecast(experiment, path / "run" / "checkpoint.h5", path / "*.nc", tmp_path / "out.nc", grid, 4)
        return shape, experiment.model.input.own == experiment.model.output.own

    results = loopback.run(ranks, body)
    assert results[0][0] == (4, 6, 8, 3)
    assert all(same_tiles for _, same_tiles in results) == (name != "tiles that overlap")
    with xarray.open_dataset(tmp_path / "out.nc") as predictions:
        assert_close(stack_predictions(predictions), roll_out(path, weather, 2, 4))
        first = weather.time.values[-1] + np.timedelta64(6, "h")
        np.testing.assert_array_equal(predictions.time.values, first + np.arange(4) * np.timedelta64(6, "h"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.nc"]


@pytest.mark.long
def test_forecast_from_zarr_over_mpi(trained, tmp_path, capfd):
    pytest.importorskip("zarr", reason="Zarr needs zarr")
    path, _ = trained()
    write_dataset(make_weather(0, 6), tmp_path / "new.zarr")
    options = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(tmp_path / "new.zarr")]
    out = ["--output", str(tmp_path / "out.nc"), "--steps", "3", "-n", "2"]
    assert main(["predict", str(path / "run.yaml"), *options, *out]) == 0
    assert "3 x 6 x 8 x 3" in capfd.readouterr().out
    with xarray.open_dataset(tmp_path / "out.nc") as predictions:
        assert_close(stack_predictions(predictions), roll_out(path, make_weather(0, 6), 2, 3))
        assert predictions.time.values[0] == np.datetime64("2000-01-02T12")
        assert predictions.lat.attrs["units"] == "degrees_north"


def test_times_keep_the_calendar(trained, tmp_path):
    path, _ = trained()
    data = make_weather(0, 4).assign_coords(time=("time", [0.0, 0.25, 0.5, 0.75]))
    data.time.attrs = {"units": "days since 2001-02-28 18:00:00", "calendar": "noleap", "standard_name": "time"}
    data.to_netcdf(tmp_path / "a.nc")
    forecast(load_run(path), path / "run" / "checkpoint.h5", tmp_path / "a.nc", tmp_path / "out.nc", None, 2)
    with xarray.open_dataset(tmp_path / "out.nc", decode_times=False) as predictions:
        np.testing.assert_allclose(predictions.time, [1.0, 1.25])
        assert predictions.time.attrs["calendar"] == "noleap"


def test_times_of_another_name_than_their_dimension(trained, tmp_path):
    """WRF's times are XTIME along Time; the start of the forecast is not the time."""
    path, weather = trained()
    start = ("Time", np.full(6, weather.time.values[0]), {"standard_name": "forecast_reference_time"})
    data = make_weather(0, 6).rename(time="XTIME").swap_dims(XTIME="Time").assign_coords(reftime=start)
    data.to_netcdf(tmp_path / "a.nc")
    forecast(load_run(path), path / "run" / "checkpoint.h5", tmp_path / "a.nc", tmp_path / "out.nc", None, 2)
    with xarray.open_dataset(tmp_path / "out.nc") as predictions:
        assert_close(stack_predictions(predictions), roll_out(path, make_weather(0, 6), 2, 2))
        assert predictions.t2m.dims == ("Time", "lat", "lon")
        np.testing.assert_array_equal(predictions.t2m.XTIME, weather.time.values[6:8])
        assert "reftime" not in predictions.variables


@pytest.mark.long
@pytest.mark.parametrize("stamp", ["start", "middle", "end", "near middle"])
def test_monthly_series_step_by_calendar_months(tmp_path, stamp):
    starts = xarray.date_range("2001-01-01", periods=39, freq="MS", calendar="noleap", use_cftime=True)
    days = np.array([(start - starts[0]).days for start in starts], "f8")
    values = {"start": days[:-1], "middle": (days[1:] + days[:-1]) / 2, "end": days[1:] - 1}
    values["near middle"] = days[:-1] + [14 - (start.month == 2) for start in starts[:-1]]
    values = values[stamp]
    attributes = {"units": "days since 2001-01-01", "calendar": "noleap", "standard_name": "time"}
    data = make_weather(0, 30).assign_coords(time=("time", values[:30], attributes))
    data.to_netcdf(tmp_path / "all.nc")
    data.isel(time=[29]).to_netcdf(tmp_path / "last.nc_")  # its step is known from the training only
    (tmp_path / "run.yaml").write_text(EXPERIMENT_YAML.format(path=tmp_path, steps=1, lead=1))
    assert main(["run", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run")]) == 0
    (tmp_path / "last.nc_").rename(tmp_path / "last.nc")
    for name, steps, expected in (("all", 8, values[30:38]), ("last", 8, values[30:38]), ("all", None, values[1:31])):
        checkpoint, out = tmp_path / "run" / "checkpoint.h5", tmp_path / "out.nc"
        forecast(load_run(tmp_path), checkpoint, tmp_path / f"{name}.nc", out, None, steps, overwrite=True)
        with xarray.open_dataset(out, decode_times=False) as predictions:
            np.testing.assert_allclose(predictions.time, expected)


def set_units(data, **units_by_name):
    data = data.copy()
    for name, units in units_by_name.items():
        data[name].attrs["units"] = units
    return data


INVALID_FORECASTS = {
    "other units": (
        lambda d: set_units(d, t2m="degC"), [],
        "was trained with t2m@t-1 in 'K', but the files have it in 'degC'",
    ),
    "other variables": (
        lambda d: d, ["--set", "dataset.variables=[u10, z]"],
        "belongs to another network: channel 0 of its inputs is 't2m@t-1', but the experiment has 'u10@t-1'",
    ),
    "reversed latitudes": (
        lambda d: d.isel(lat=slice(None, None, -1)), [], "with descending latitudes, but the files have ascending ones",
    ),
    "infinite values": (lambda d: d.assign(t2m=d.t2m / 0), [], "a.nc:t2m: has infinite values; replace"),
    "other levels": (lambda d: d.isel(level=[1]), [], "a.nc:z: has no level 850; choose from 500"),
    "a gap": (lambda d: d.isel(time=[0, 1, 2, 5]), [], "a.nc: has a gap in time"),
    "too few times": (
        lambda d: d.isel(time=[0]), [], "a.nc: has 1 time step, but an input of the network needs 2; give more files",
    ),
    "not a NetCDF file": (lambda d: d, ["--output", "out.npy"], "forecasts are written to NetCDF"),
    "blocks": (lambda d: d, ["--block", "4"], "leave out classes, probabilities, block and axes"),
    "another lead": (lambda d: d, ["--set", "dataset.lead=2"], "with lead: 1, but the experiment has lead: 2"),
    "other steps": (lambda d: d.isel(time=[0, 2, 4]), [], "6 hours, but the files have 12; select"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID_FORECASTS)
def test_invalid_forecasts_raise_one_error(trained, tmp_path, name, capsys):
    change, extra, message = INVALID_FORECASTS[name]
    path, _ = trained()
    write_dataset(change(make_weather(0, 6)), tmp_path / "a.nc")
    options = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(tmp_path / "a.nc")]
    capsys.readouterr()
    command = [
        "predict",
        str(path / "run.yaml"),
        *options,
        "--output",
        str(tmp_path / "out.nc"),
        "--steps",
        "2",
        *extra,
    ]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.nc"]


@pytest.mark.parametrize(
    ("steps", "lead", "outputs", "message"),
    [
        (2, 1, ["t2m", "u10"], "'z500' is an input but not an output of the network"),
        (2, 2, ["t2m", "z500"], "inputs of 2 times with a lead of 2 cannot be rolled out"),
        (1, 0, ["t2m", "z500"], "a lead of 0 cannot be rolled out"),
    ],
)
def test_forecasts_unusable_as_inputs(tmp_path, steps, lead, outputs, message):
    write_dataset(make_weather(0, 6), tmp_path / "a.nc")
    data = nd.ClimateFiles(str(tmp_path / "a.nc"), ["t2m", "z"], levels=[500], steps=steps, lead=lead)
    trained = FieldMetadata("", [FieldChannel(name, name) for name in outputs], (4, 4), lead_steps=lead)
    with pytest.raises(nd.ConfigError, match=message):
        require_outputs_cover_inputs(data, trained, data.open_series(str(tmp_path / "a.nc")))


def test_checkpoint_of_other_variables_is_rejected(trained, capsys):
    path, _ = trained()
    capsys.readouterr()
    options = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--set", "dataset.levels=[850, 250]"]
    assert main(["evaluate", str(path / "run.yaml"), *options]) == 2
    assert "channel 2 of its inputs is 'z500@t-1', but the experiment has 'z250@t-1'" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluations_of_other_years_use_the_normalisation_of_the_training(trained, tmp_path, ranks):
    path, _ = trained()
    write_dataset(make_weather(40, 12) * 2 + 30, tmp_path / "later.nc")
    files = {"dataset.files": f"'{tmp_path / 'later.nc'}'"}

    def body(world):
        experiment = load_run(path, **files)
        single = evaluate_checkpoint(experiment, path / "run" / "checkpoint.h5", experiment.open_grid(world))
        experiment = load_run(path, **files)
        followed = follow_checkpoints(experiment, path / "run", experiment.open_grid(world), tmp_path / "out")
        return single["loss"], followed[-1]["test_loss"]

    for single, followed in loopback.run(ranks, body):
        assert followed == pytest.approx(single, rel=1e-6)


def test_irregular_stamps_in_checkpoints():
    step = MonthStep(3, "near middle", ((12, 90, 3888000.0), (12, 91, 3931200.0)), period=3)
    channel = FieldChannel("t2m", "t2m", units="K")
    fields = FieldMetadata("a.nc:t2m", [channel], (4, 4), input_names=["t2m"], input_units=["K"], month_step=step)
    texts = field_metadata_texts(fields)
    assert field_metadata_from_texts(texts).month_step == step
    values = json.loads(texts["fields"])
    for stamps in ([[1, 91]], [[0, 91, 0]], [1], {}, [["1", 91, 0]]):
        values["month_step"]["stamps"] = stamps
        with pytest.raises(ValueError, match=r"stamps|expected a calendar month"):
            field_metadata_from_texts({"fields": json.dumps(values)})
