"""Forecasts and roll-outs against the network's outputs put together with xarray, on any number of ranks."""

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.train.field_facts import FieldFacts
from neondist.train.inference.forecast import forecast, require_closed

pytest.importorskip("netCDF4", reason="files are made by netCDF4")
xarray = pytest.importorskip("xarray", reason="the oracle")
from climate import save, series, weather  # noqa: E402

YAML = """!FitExperiment
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
    """A function that trains with some steps and lead, each once; and the weather."""
    made, whole = {}, None

    def train(steps=2, lead=1):
        nonlocal whole
        key = steps, lead
        if key not in made:
            path = tmp_path_factory.mktemp("trained")
            whole = series(path)
            (path / "run.yaml").write_text(YAML.format(path=path, steps=steps, lead=lead))
            assert main(["run", str(path / "run.yaml"), "--output", str(path / "run")]) == 0
            made[key] = path
        return made[key], whole

    return train


def experiment(path, **changes):
    from neondist.config import load_experiment

    return load_experiment(path / "run.yaml", overrides=[f"{name}={value}" for name, value in changes.items()])


def network(path, whole):
    """A function from fields (time, H, W, C) in their units to the forecast from the last of them."""
    given = experiment(path)
    data, model = given.dataset, given.model
    data.open(nd.ProcessGrid.serial())
    model.build(data.sample_shape, 1, nd.ProcessGrid.serial())
    from neondist.io.checkpoint import open_checkpoint
    from neondist.train.weights import take_weights

    with open_checkpoint(path / "run" / "checkpoint.h5", model.grid.world) as file:
        take_weights(file, model)
    mean, std = data.fields.mean, data.fields.std

    def run(fields):
        x = np.concatenate([(one - mean) / std for one in fields], axis=-1)
        return model.fprop(x[None].astype("f4"), training=False)[0] * std + mean

    return run


def stacked(whole):
    names = [whole.t2m, whole.z.sel(level=850), whole.z.sel(level=500)]
    return np.stack([one.values for one in names], axis=-1).astype("f8")


def values_of(found):
    return np.stack([found[name].values for name in ("t2m", "z850", "z500")], axis=-1)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize(("steps", "lead"), [(2, 1), (1, 3)])
@pytest.mark.long
def test_forecasts_from_all_times_of_files(trained, tmp_path, steps, lead):
    path, whole = trained(steps, lead)
    target = tmp_path / "out.nc"
    words = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(path / "[01].nc")]
    assert main(["predict", str(path / "run.yaml"), *words, "--output", str(target)]) == 0
    fields, run = stacked(whole)[:20], network(path, whole)
    wanted = [run(fields[at : at + steps]) for at in range(20 - steps + 1)]
    with xarray.open_dataset(target) as found:
        close(values_of(found), np.stack(wanted))
        expected = whole.time.values[steps - 1 : 20] + np.timedelta64(6 * lead, "h")
        np.testing.assert_array_equal(found.time.values, expected)
        for name in ("lat", "lon"):
            np.testing.assert_array_equal(found[name], whole[name])
            assert found[name].attrs == whole[name].attrs
        assert found.t2m.dims == ("time", "lat", "lon")
        assert found.t2m.attrs == whole.t2m.attrs
        assert found.z500.attrs == {**whole.z.attrs, "level": 500}
        assert (found.attrs["title"], found.attrs["Conventions"]) == ("made up", "CF-1.8")


def rolled(path, whole, steps, count):
    fields, run = list(stacked(whole)[-steps:]), network(path, whole)
    for _ in range(count):
        fields.append(run(fields[-steps:]))
    return np.stack(fields[steps:])


RANKS = {
    "one": (1, {}),
    "two replicas of two tiles": (4, {"grid.replicas": 2}),
    "tiles that overlap": (2, {"model.scheme": "overlap_tile"}),
}


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.long
def test_roll_outs_feed_forecasts_back(trained, tmp_path, name):
    path, whole = trained()
    ranks, changes = RANKS[name]

    def body(world):
        given = experiment(path, **changes)
        grid = given.open_grid(world)
        found = forecast(given, path / "run" / "checkpoint.h5", path / "*.nc", tmp_path / "out.nc", grid, 4)
        return found, given.model.input.own == given.model.output.own

    found = loopback.run(ranks, body)
    assert found[0][0] == (4, 6, 8, 3)
    assert all(alike for _, alike in found) == (name != "tiles that overlap")
    with xarray.open_dataset(tmp_path / "out.nc") as made:
        close(values_of(made), rolled(path, whole, 2, 4))
        first = whole.time.values[-1] + np.timedelta64(6, "h")
        np.testing.assert_array_equal(made.time.values, first + np.arange(4) * np.timedelta64(6, "h"))
    assert [one.name for one in tmp_path.iterdir()] == ["out.nc"]


@pytest.mark.long
def test_from_zarr_over_mpi(trained, tmp_path, capfd):
    pytest.importorskip("zarr", reason="Zarr needs zarr")
    path, _ = trained()
    save(weather(0, 6), tmp_path / "new.zarr")
    words = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(tmp_path / "new.zarr")]
    out = ["--output", str(tmp_path / "out.nc"), "--steps", "3", "-n", "2"]
    assert main(["predict", str(path / "run.yaml"), *words, *out]) == 0
    assert "3 x 6 x 8 x 3" in capfd.readouterr().out
    with xarray.open_dataset(tmp_path / "out.nc") as found:
        close(values_of(found), rolled(path, weather(0, 6), 2, 3))
        assert found.time.values[0] == np.datetime64("2000-01-02T12")
        assert found.lat.attrs["units"] == "degrees_north"


def test_times_keep_the_calendar(trained, tmp_path):
    path, _ = trained()
    data = weather(0, 4).assign_coords(time=("time", [0.0, 0.25, 0.5, 0.75]))
    data.time.attrs = {"units": "days since 2001-02-28 18:00:00", "calendar": "noleap", "standard_name": "time"}
    data.to_netcdf(tmp_path / "a.nc")
    forecast(experiment(path), path / "run" / "checkpoint.h5", tmp_path / "a.nc", tmp_path / "out.nc", None, 2)
    with xarray.open_dataset(tmp_path / "out.nc", decode_times=False) as found:
        np.testing.assert_allclose(found.time, [1.0, 1.25])
        assert found.time.attrs["calendar"] == "noleap"


def changed(data, **more):
    data = data.copy()
    for name, units in more.items():
        data[name].attrs["units"] = units
    return data


WRONG = {
    "other units": (
        lambda d: changed(d, t2m="degC"), [],
        "was trained with t2m@t-1 in 'K', but the files have it in 'degC'",
    ),
    "other variables": (
        lambda d: d, ["--set", "dataset.variables=[u10, z]"],
        "belongs to another network: channel 0 of its inputs is 't2m@t-1', but the experiment has 'u10@t-1'",
    ),
    "turned round": (
        lambda d: d.isel(lat=slice(None, None, -1)), [], "with descending latitudes, the files have ascending ones;",
    ),
    "infinite values": (lambda d: d.assign(t2m=d.t2m / 0), [], "a.nc:t2m: has infinite values; replace"),
    "other levels": (lambda d: d.isel(level=[1]), [], "a.nc:z: has no level 850; choose from 500"),
    "a gap": (lambda d: d.isel(time=[0, 1, 2, 5]), [], "a.nc: a gap in time"),
    "too few times": (lambda d: d.isel(time=[0]), [], "has 1 times, but the network needs 2; give more files"),
    "no file of NetCDF": (lambda d: d, ["--output", "out.npy"], "forecasts are written to NetCDF"),
    "blocks": (lambda d: d, ["--block", "4"], "leave out --classes, --probabilities and --block"),
    "another lead": (lambda d: d, ["--set", "dataset.lead=2"], "with lead: 1, but the experiment has lead: 2"),
    "other steps": (lambda d: d.isel(time=[0, 2, 4]), [], "6 hours, but the files have 12; select"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_forecast_is_told_once(trained, tmp_path, name, capsys):
    change, more, message = WRONG[name]
    path, _ = trained()
    save(change(weather(0, 6)), tmp_path / "a.nc")
    words = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--input", str(tmp_path / "a.nc")]
    capsys.readouterr()
    given = ["predict", str(path / "run.yaml"), *words, "--output", str(tmp_path / "out.nc"), "--steps", "2", *more]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.nc"]


@pytest.mark.parametrize(
    ("steps", "lead", "outputs", "message"),
    [
        (2, 1, ["t2m", "u10"], "'z500' is an input but not an output of the network"),
        (2, 2, ["t2m", "z500"], "inputs of 2 times with a lead of 2 cannot be rolled out"),
        (1, 0, ["t2m", "z500"], "a lead of 0 cannot be rolled out"),
    ],
)
def test_forecasts_that_cannot_be_inputs(tmp_path, steps, lead, outputs, message):
    save(weather(0, 6), tmp_path / "a.nc")
    data = nd.ClimateFiles(str(tmp_path / "a.nc"), ["t2m", "z"], levels=[500], steps=steps, lead=lead)
    facts = FieldFacts([], [], outputs, ["", ""], np.zeros(2), np.ones(2), lead, 1.0)
    with pytest.raises(nd.ConfigError, match=message):
        require_closed(data, facts, data.open_series(str(tmp_path / "a.nc")))


def test_a_checkpoint_of_other_variables_is_not_evaluated(trained, capsys):
    path, _ = trained()
    capsys.readouterr()
    words = ["--checkpoint", str(path / "run" / "checkpoint.h5"), "--set", "dataset.levels=[850, 250]"]
    assert main(["evaluate", str(path / "run.yaml"), *words]) == 2
    assert "channel 2 of its inputs is 'z500@t-1', but the experiment has 'z250@t-1'" in capsys.readouterr().err
