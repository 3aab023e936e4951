"""Synthetic weather data in files written by xarray."""

import warnings

import numpy as np
import xarray

PRESSURE_LEVELS = np.array([850, 500, 250], "int32")


def make_weather(first=0, times=10, extent=(6, 8), seed=0):
    """Return a dataset of `times` time steps from step `first` on; a step has the same values in every dataset."""
    h, w = extent
    generators = [np.random.default_rng([seed, number]) for number in range(first, first + times)]
    t2m = np.stack([280 + 10 * rng.normal(size=(h, w)) for rng in generators])
    u10 = np.stack([3 * rng.normal(size=(h, w)) for rng in generators])
    z = np.stack([5e4 + 1e3 * rng.normal(size=(3, h, w)) for rng in generators])
    surface, levels = ("time", "lat", "lon"), ("time", "level", "lat", "lon")
    time = np.datetime64("2000-01-01T00", "ns") + np.arange(first, first + times) * np.timedelta64(6, "h")
    north = {"units": "degrees_north", "standard_name": "latitude"}
    return xarray.Dataset(
        {
            "t2m": (surface, t2m.astype("f4"), {"units": "K", "long_name": "2 m temperature"}),
            "u10": (surface, u10.astype("f4"), {"units": "m s-1"}),
            "z": (levels, z.astype("f4"), {"units": "m2 s-2", "standard_name": "geopotential"}),
        },
        {
            "time": time,
            "level": ("level", PRESSURE_LEVELS, {"units": "hPa", "positive": "down"}),
            "lat": ("lat", np.linspace(75, -75, h), north),
            "lon": ("lon", np.arange(w) * 360.0 / w, {"units": "degrees_east", "standard_name": "longitude"}),
        },
        {"title": "made up"},
    )


def write_dataset(data, path, since="hours since 2000-01-01"):
    """Write a dataset whose time has the units `since`."""
    data = data.copy()
    data.time.encoding["units"] = since
    if path.suffix == ".zarr":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about consolidated metadata
            data.to_zarr(path, mode="w")
    else:
        data.to_netcdf(path)


def write_series(folder, suffix=".nc", files=3, times=10, **options):
    """Write the files of a series, each with its own reference date; return the full dataset."""
    for number in range(files):
        since = f"hours since {2000 - number}-01-01"
        write_dataset(make_weather(number * times, times, **options), folder / f"{number}{suffix}", since)
    return make_weather(0, files * times, **options)
