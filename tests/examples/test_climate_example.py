"""Example of docs/climate.md on smaller fields, from files written by xarray to forecasts that it reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from neondist.cli import main

pytest.importorskip("netCDF4", reason="xarray reads with it")
xarray = pytest.importorskip("xarray", reason="the reference")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.long
def test_training_and_forecast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "climate.yaml", tmp_path)
    subprocess.run([sys.executable, EXAMPLES / "weather.py", "data", "8", "12"], check=True)
    months = [xarray.load_dataset(path) for path in sorted(Path("data/months").iterdir())]
    weather = xarray.concat(months, "time")
    assert dict(weather.sizes) == {"time": 72, "lat": 8, "lon": 16}
    assert weather.time.values[-1] == np.datetime64("2020-01-18T18")
    squares = ((weather.t2m[-7:] - weather.t2m.mean("time")) ** 2).weighted(np.cos(np.deg2rad(weather.lat)))
    climatology = float(np.sqrt(squares.mean()))
    settings = ["model.layers.0.out_channels=8", "model.layers.1.out_channels=8", "epochs=6", "batch_size=4"]
    assert main(["run", "climate.yaml", "--output", "run", "--set", *settings]) == 0
    epochs = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert epochs[-1]["train_loss"] < 0.2 * epochs[0]["train_loss"]
    capsys.readouterr()
    words = ["--checkpoint", "run/checkpoint.h5", "--set", *settings]
    assert main(["evaluate", "climate.yaml", *words]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["rmse_t2m"] == pytest.approx(epochs[-1]["rmse_t2m"], rel=1e-6)
    assert metrics["rmse_t2m"] < 0.8 * climatology
    words += ["--input", "data/new.nc", "--output", "forecast.nc", "--steps", "12"]
    assert main(["predict", "climate.yaml", *words]) == 0
    with xarray.open_dataset("forecast.nc") as forecast, xarray.open_dataset("data/truth.nc") as truth:
        for name in ("time", "lat", "lon"):
            np.testing.assert_array_equal(forecast[name], truth[name])
        assert forecast.t2m.attrs == truth.t2m.attrs
        assert float(((forecast.t2m - truth.t2m)[0] ** 2).mean()) < climatology**2
