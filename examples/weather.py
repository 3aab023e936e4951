"""Synthetic weather for the example climate.yaml: waves that travel around the globe, in monthly NetCDF files.

python examples/weather.py [DIR] [ROWS] [TIMES]    writes DIR/months/*.nc, DIR/new.nc with initial times of a forecast,
                                                   and DIR/truth.nc with the following times
"""

import sys
from pathlib import Path

import h5py
import numpy as np

HOURS_PER_TIME, NUM_MONTHS, TIMES_AFTER_TRAINING = 6, 6, 12
VARIABLES = {
    "t2m": ("K", "air_temperature", "temperature at 2 m"),
    "u10": ("m s-1", "eastward_wind", "wind to the east at 10 m"),
    "v10": ("m s-1", "northward_wind", "wind to the north at 10 m"),
}


def simulate_weather(latitude, longitude, times, seed=0):
    """Return t2m, u10 and v10 of waves with several wavelengths and speeds."""
    rng = np.random.default_rng(seed)
    north, east = np.deg2rad(latitude)[:, None], np.deg2rad(longitude)
    hours = HOURS_PER_TIME * np.asarray(times, float)[:, None, None]
    stream = np.zeros((len(times), len(latitude), len(longitude)))
    for wave in range(1, 7):
        for _ in range(3):
            height, tilt = rng.uniform(0.4, 1.0) / wave, rng.uniform(-2, 2)
            days = rng.uniform(4, 12)  # time of a revolution, times the wave number
            centre, width = rng.uniform(-60, 60), rng.uniform(20, 40)
            envelope = np.exp(-(((latitude[:, None] - centre) / width) ** 2)) * np.cos(north)
            phase = rng.uniform(0, 2 * np.pi) + tilt * north
            stream += height * envelope * np.cos(wave * east + phase - 2 * np.pi * hours / (24 * days))
    u = -np.gradient(stream, north[:, 0], axis=1)
    v = np.gradient(stream, east, axis=2) / np.maximum(np.cos(north), 0.1)
    t = 288 - 40 * np.sin(north) ** 2 + 9 * np.roll(stream, 2, axis=2)
    noise = rng.standard_normal((3, *stream.shape))
    return {"t2m": t + 0.05 * noise[0], "u10": 5 * u + 0.05 * noise[1], "v10": 5 * v + 0.05 * noise[2]}


def write_netcdf(path, fields, latitude, longitude, times):
    """Write a NetCDF file that follows the CF conventions: coordinates are dimension scales, attributes are text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coordinates = {
        "time": (np.asarray(times) * HOURS_PER_TIME, "hours since 2020-01-01 00:00:00", "time"),
        "lat": (latitude, "degrees_north", "latitude"),
        "lon": (longitude, "degrees_east", "longitude"),
    }
    with h5py.File(path, "w", track_order=True) as file:
        for name, (values, units, standard) in coordinates.items():
            file[name] = values
            file[name].make_scale(name)
            file[name].attrs.update({"units": np.bytes_(units), "standard_name": np.bytes_(standard)})
        for name, values in fields.items():
            units, standard, long = VARIABLES[name]
            array = file.create_dataset(name, data=values.astype("f4"), chunks=(1, *values.shape[1:]))
            for axis, dimension in enumerate(coordinates):
                array.dims[axis].attach_scale(file[dimension])
            texts = {"units": units, "standard_name": standard, "long_name": long}
            array.attrs.update({key: np.bytes_(text) for key, text in texts.items()})
        file.attrs.update({"Conventions": np.bytes_("CF-1.8"), "title": np.bytes_("synthetic weather")})


def main(folder="data", rows=32, times=60):
    """Write all files."""
    folder, rows, times = Path(folder), int(rows), int(times)
    latitude = 90 - 180 * (np.arange(rows) + 0.5) / rows
    longitude = 360 * np.arange(2 * rows) / (2 * rows)
    every = np.arange(NUM_MONTHS * times + TIMES_AFTER_TRAINING)
    fields = simulate_weather(latitude, longitude, every)
    parts = {f"months/{month + 1:02}.nc": every[month * times : (month + 1) * times] for month in range(NUM_MONTHS)}
    parts |= {"new.nc": every[NUM_MONTHS * times - 4 : NUM_MONTHS * times], "truth.nc": every[NUM_MONTHS * times :]}
    for name, part in parts.items():
        write_netcdf(folder / name, {key: of[part] for key, of in fields.items()}, latitude, longitude, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
