"""Made-up weather over some times, in files as xarray writes them."""

import warnings

import numpy as np
import xarray

LEVELS = np.array([850, 500, 250], "int32")


def weather(first=0, times=10, extent=(6, 8), seed=0):
    """A dataset of `times` times from number `first` on: the same numbers whichever files they come from."""
    h, w = extent
    draw = [np.random.default_rng([seed, number]) for number in range(first, first + times)]
    t2m = np.stack([280 + 10 * one.normal(size=(h, w)) for one in draw])
    u10 = np.stack([3 * one.normal(size=(h, w)) for one in draw])
    z = np.stack([5e4 + 1e3 * one.normal(size=(3, h, w)) for one in draw])
    flat, deep = ("time", "lat", "lon"), ("time", "level", "lat", "lon")
    time = np.datetime64("2000-01-01T00", "ns") + np.arange(first, first + times) * np.timedelta64(6, "h")
    north = {"units": "degrees_north", "standard_name": "latitude"}
    return xarray.Dataset(
        {
            "t2m": (flat, t2m.astype("f4"), {"units": "K", "long_name": "2 m temperature"}),
            "u10": (flat, u10.astype("f4"), {"units": "m s-1"}),
            "z": (deep, z.astype("f4"), {"units": "m2 s-2", "standard_name": "geopotential"}),
        },
        {
            "time": time,
            "level": ("level", LEVELS, {"units": "hPa", "positive": "down"}),
            "lat": ("lat", np.linspace(75, -75, h), north),
            "lon": ("lon", np.arange(w) * 360.0 / w, {"units": "degrees_east", "standard_name": "longitude"}),
        },
        {"title": "made up"},
    )


def save(data, path, since="hours since 2000-01-01"):
    """Write a dataset; time in these units."""
    data = data.copy()
    data.time.encoding["units"] = since
    if path.suffix == ".zarr":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of consolidated metadata
            data.to_zarr(path, mode="w")
    else:
        data.to_netcdf(path)


def series(folder, suffix=".nc", files=3, times=10, **given):
    """Write files that are one series, each with times since another date; return the whole."""
    for number in range(files):
        since = f"hours since {2000 - number}-01-01"
        save(weather(number * times, times, **given), folder / f"{number}{suffix}", since)
    return weather(0, files * times, **given)
