"""The example of docs/climate.md on smaller fields: from files that xarray can read to forecasts that it can read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from neondist.cli import main

pytest.importorskip("netCDF4", reason="xarray reads with it")
xarray = pytest.importorskip("xarray", reason="the oracle")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.long
def test_weather_is_learnt_and_forecast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "climate.yaml", tmp_path)
    subprocess.run([sys.executable, EXAMPLES / "weather.py", "data", "8", "12"], check=True)
    months = [xarray.load_dataset(path) for path in sorted(Path("data/months").iterdir())]
    whole = xarray.concat(months, "time")
    assert dict(whole.sizes) == {"time": 72, "lat": 8, "lon": 16}
    assert whole.time.values[-1] == np.datetime64("2020-01-18T18")
    squares = ((whole.t2m[-7:] - whole.t2m.mean("time")) ** 2).weighted(np.cos(np.deg2rad(whole.lat)))
    climatology = float(np.sqrt(squares.mean()))
    small = ["model.layers.0.out_channels=8", "model.layers.1.out_channels=8", "epochs=6", "batch_size=4"]
    assert main(["run", "climate.yaml", "--output", "run", "--set", *small]) == 0
    epochs = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert epochs[-1]["train_loss"] < 0.2 * epochs[0]["train_loss"]
    capsys.readouterr()
    words = ["--checkpoint", "run/checkpoint.h5", "--set", *small]
    assert main(["evaluate", "climate.yaml", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rmse_t2m"] == pytest.approx(epochs[-1]["rmse_t2m"], rel=1e-6)
    assert found["rmse_t2m"] < 0.8 * climatology
    words += ["--input", "data/new.nc", "--output", "forecast.nc", "--steps", "12"]
    assert main(["predict", "climate.yaml", *words]) == 0
    with xarray.open_dataset("forecast.nc") as forecast, xarray.open_dataset("data/truth.nc") as truth:
        for name in ("time", "lat", "lon"):
            np.testing.assert_array_equal(forecast[name], truth[name])
        assert forecast.t2m.attrs == truth.t2m.attrs
        assert float(((forecast.t2m - truth.t2m)[0] ** 2).mean()) < climatology**2
