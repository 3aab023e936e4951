"""Forecasts of a trained network, written to NetCDF: single steps, or autoregressive rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.namespace import to_host
from ...comm import ProcessGrid, all_or_none
from ...data import ClimateFiles
from ...data.datasets.climate_files import FieldTiles
from ...data.datasets.field_series import FieldSeries
from ...data.raw_values import normalise
from ...errors import ConfigError, DataError
from ...formats import TileSource, create_sink
from ...formats.axes import Cells
from ...formats.conventions import POSITION_ATTRIBUTES, AuxiliaryVariable
from ...formats.coordinates import coordinate_along_axis, dimension_name, times_in_seconds, unpacked_values
from ...formats.fields import FieldMetadata
from ...formats.packing import PACKING_ATTRIBUTES
from ...geometry import Box
from ...halo import GlobalArray
from ...io.checkpoint import open_checkpoint
from ...terminal.console import counted
from ..checkpoint_field_metadata import check_channels_and_times, field_metadata_from_texts
from ..experiment import FitExperiment
from ..inference_weights import load_inference_weights
from ..validate import experiment_grid_shape
from .checkpoint_prediction import parse_shape_and_normalisation
from .prediction_methods import WholeImagePrediction, choose_method

ForecastIterator = Iterator[tuple[slice, np.ndarray | None]]  # time range, and this rank's values
_NETCDF_SUFFIXES = (".nc", ".nc4")


def forecast(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    target: str | Path,
    grid: ProcessGrid | None = None,
    steps: int | None = None,
    overwrite: bool = False,
) -> tuple[int, ...]:
    """Write the forecasts of a checkpoint's network to NetCDF; return their shape (time, *extent, C). Collective.

    The variables have the units and the grid of the input files, and are given at the valid times of the forecasts.

    Parameters
    ----------
    experiment : FitExperiment
        The experiment that wrote the checkpoint, with ClimateFiles as data set; its files are not needed.
    checkpoint : path
        Checkpoint, written on any number of ranks.
    source : path
        Pattern of the files that contain the input variables.
    target : path
        A NetCDF file.
    grid : ProcessGrid, optional
        Default: `experiment.open_grid()`.
    steps : int, optional
        Length of a rollout from the last times of the files: each forecast is an input of the next. Default: one
        forecast from each time of the files with enough preceding times.
    overwrite : bool
        Replace an existing file.

    Raises
    ------
    UserError
        On every rank: DataError for files that cannot be read, or do not match the network; ConfigError if the network
        cannot compute the forecasts, such as a rollout without all inputs among its outputs.
    """
    grid = experiment.open_grid() if grid is None else grid
    settings = {"the checkpoint": checkpoint, "the source": source, "the target": target, "steps": steps}
    grid.check("predict", settings | {"overwrite": overwrite})
    dataset, model, path, world = experiment.dataset, experiment.model, Path(checkpoint), grid.world
    with all_or_none(world):
        if not isinstance(dataset, ClimateFiles):
            raise ConfigError(
                f"steps: applies to forecasts with ClimateFiles, not with {type(dataset).__name__}; leave steps out"
            )
        if Path(target).suffix.lower() not in _NETCDF_SUFFIXES:
            raise ConfigError(f"{target}: forecasts are written to NetCDF; give a name ending in .nc")
        experiment_grid_shape(experiment, grid.size)
        series = dataset.open_series(str(source), "input", include_targets=False)
    with closing(series), open_checkpoint(path, world) as file:
        _, factor, offset, fill = parse_shape_and_normalisation(path, file.contents.texts)
        with all_or_none(world):
            try:
                fields = field_metadata_from_texts(file.contents.texts)
            except ValueError as problem:
                raise DataError(f"{path}: {problem}") from None
            try:
                names, units = dataset.channel_names(series), dataset.input_units(series)
                check_channels_and_times(
                    fields, names, units, dataset.lead, series.time_step_seconds, series.coordinate_directions
                )
            except ValueError as problem:
                raise DataError(f"{source}: {path} {problem}") from None
            series.fill = dataset.fill if fill is None else fill
            images = FieldImages(series, dataset.steps, dataset.input_channels(series), factor, offset)
            if steps is not None:
                require_outputs_cover_inputs(dataset, fields, series)
                images.repeat_last_image(grid.replicas)
            method = choose_method(model, images, grid, experiment.batch_size, None, None)  # type: ignore[arg-type]
            if not isinstance(method, WholeImagePrediction):
                raise ConfigError(
                    "memory: the network does not fit in memory with whole fields; use more ranks, or more memory"
                )
            if len(method.output_shape) < 3 or tuple(method.output_shape[:-1]) != series.extent:
                raise ConfigError(
                    f"model: has outputs of {list(method.output_shape)} for fields of {list(series.extent)}; make"
                    " the network preserve the extent (padding: same)"
                )
        load_inference_weights(file, model)
        num_times = images.shape[0] if steps is None else steps
        times = _forecast_times_in_seconds(series, fields, dataset, steps)
        with _open_forecast_sink(series, fields, times, Path(target), grid, model.dtype, overwrite) as sink:
            forecasts = (
                _run_single_steps(method, fields) if steps is None else _roll_out(method, dataset.steps, fields, steps)
            )
            for time_slice, values in forecasts:
                if values is not None:
                    box = grid.partition(series.extent).box(grid.tile)
                    sink.write((time_slice, *box.slices, slice(0, len(fields.channels))), values.astype(model.dtype))
            sink.commit()
    return num_times, *series.extent, len(fields.channels)


class FieldImages:
    """Images (N, H, W, C) of a series, normalised as in training."""

    has_single_sample_axis = True

    def __init__(
        self,
        series: FieldSeries,
        times_per_image: int,
        channels: Sequence[int],
        factor: Sequence[float],
        subtrahend: Sequence[float],
    ) -> None:
        count = len(series) - times_per_image + 1
        if count < 1:
            first_name, *later_names = series.file_names
            raise DataError(
                f"{f'the files from {first_name} on have' if later_names else f'{first_name}: has'}"
                f" {counted(len(series), 'time step')}, but an input of the network needs {times_per_image}; give more"
                " files"
            )
        self.series, self.factor, self.subtrahend = series, factor, subtrahend
        self._times_per_image, self._channels, self._first_time_indices = times_per_image, channels, np.arange(count)
        self.source = series.source_containing(0)

    def repeat_last_image(self, count: int) -> None:
        """Replace the images by `count` copies of the last one, one per replica."""
        self._first_time_indices = np.repeat(self._first_time_indices[-1:], count)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, H, W, C) of the input images."""
        return len(self._first_time_indices), *self.series.extent, self._times_per_image * len(self._channels)

    @property
    def sample_extents(self) -> tuple[int, ...]:
        """Extents of the sample axes."""
        return self.shape[:1]

    def read(self, samples: range, box: Box, dtype: Any) -> np.ndarray:
        """Return the cells of a box of consecutive images (n, *box, C)."""
        tiles = FieldTiles(self.series, self._first_time_indices, self._times_per_image, self._channels, box.slices)
        return normalise(tiles[np.arange(samples.start, samples.stop)], self.factor, self.subtrahend, dtype)


def require_outputs_cover_inputs(dataset: ClimateFiles, fields: FieldMetadata, series: FieldSeries) -> None:
    """Raise ConfigError unless forecasts contain all inputs of the next forecast."""
    for at in dataset.input_channels(series):
        name = series.channels[at].name
        if name not in fields.names:
            raise ConfigError(
                f"steps: '{name}' is an input but not an output of the network, so forecasts cannot be rolled out;"
                " train the network with all inputs as targets"
            )
    if dataset.lead < 1 or (dataset.lead > 1 and dataset.steps > 1):
        raise ConfigError(
            f"steps: inputs of {counted(dataset.steps, 'time')} with a lead of {dataset.lead} cannot be rolled out;"
            " train with lead: 1, or with steps: 1"
        )


def _forecast_times_in_seconds(
    series: FieldSeries, fields: FieldMetadata, dataset: ClimateFiles, steps: int | None
) -> list[float]:
    start_times = series.times[dataset.steps - 1 :] if steps is None else np.repeat(series.times[-1], steps)
    lead_steps = [dataset.lead * (1 if steps is None else number + 1) for number in range(len(start_times))]
    starts_and_leads = zip(start_times.tolist(), lead_steps, strict=True)
    month_steps = [step for step in (fields.month_step, series.month_step) if step is not None]
    for months in sorted(month_steps, key=lambda step: bool(step.stamps)):  # irregular times last
        if months.matches_times(series.times, series.calendar):
            month_step = months.with_stamps(series.times, series.calendar)
            return [month_step.advance(start, lead, series.calendar) for start, lead in starts_and_leads]
    return [start + lead * (series.time_step_seconds or fields.time_step_seconds) for start, lead in starts_and_leads]


def _run_single_steps(method: WholeImagePrediction, fields: FieldMetadata) -> ForecastIterator:
    """Yield forecasts from all images: this rank's samples and tile."""
    for part in range(method.num_parts):
        x = None
        with all_or_none(method.grid.world):
            x = method.read_local_input(part)
        assert x is not None
        y = method.compute_local_output(part, x)
        samples, _ = method.local_output_samples_and_box(part)
        yield slice(samples.start, samples.stop), None if y is None else fields.to_physical_units(y)


def _roll_out(method: WholeImagePrediction, steps: int, fields: FieldMetadata, num_forecasts: int) -> ForecastIterator:
    """Yield forecasts of a rollout; every replica computes all of them, and the first one yields values."""
    model, grid, images = method.model, method.grid, method.images
    own_box, channels = model.input.own, images.shape[-1] // steps
    input_names = fields.input_names[-channels:]
    output_indices = [fields.names.index(name) for name in input_names]
    factor, offset = (np.resize(v, images.shape[-1])[-channels:] for v in (images.factor, images.subtrahend))
    is_aligned = all(grid.world.allgather(own_box == grid.partition(method.output_shape[:-1]).box(grid.tile)))
    x = None
    with all_or_none(grid.world):
        x = method.read_local_input(0)
    assert x is not None
    for number in range(num_forecasts):
        y = to_host(model.fprop(x, training=False, batch_size=grid.replicas))
        values = fields.to_physical_units(y)
        yield slice(number, number + 1), values if grid.replica == 0 else None
        if not is_aligned:  # the tiles that ranks read overlap
            global_output = GlobalArray(grid, (grid.replicas, *method.output_shape), dtype=str(y.dtype)).gather(y)
            values = fields.to_physical_units(global_output[(slice(grid.replica, grid.replica + 1), *own_box.slices)])
        next_input = values[..., output_indices] * factor - offset
        x = np.concatenate([x[..., channels:], next_input.astype(x.dtype)], axis=-1)


class ForecastCoordinates(TileSource):
    """Coordinates of forecasts: the spatial grid of an input variable, and the times of the forecasts.

    Parameters
    ----------
    source : TileSource
        A variable of the input.
    encoded_times : array (time,)
        Times of the forecasts, in the units of the variable's time coordinate.
    """

    def __init__(self, source: TileSource, encoded_times: np.ndarray) -> None:
        extent_by_axis = dict(zip(source.axes, source.shape, strict=True))
        names = {letter: dimension_name(source, letter) for letter in "TYX"}
        self._source, self._times, self._dimension_names = source, encoded_times, names
        shape = len(encoded_times), extent_by_axis["Y"], extent_by_axis["X"]
        super().__init__(source.path, "TYX", shape, source.dtype, metadata={"dimensions": list(names.values())})

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the coordinates of the grid, the new times, and the attributes of the file."""
        variables, t_name = list[AuxiliaryVariable](), self._dimension_names["T"]
        source_variables = self._source.auxiliary_variables()[0]
        time_coord = coordinate_along_axis(self._source, "T", source_variables)
        for variable in source_variables:
            axes = {*variable.dimensions} & {self._dimension_names["Y"], self._dimension_names["X"]}
            if variable is time_coord:
                attributes = {key: item for key, item in variable.attributes.items() if key not in _DROPPED_TIME_KEYS}
                variables.append(replace(variable, values=self._times, attributes=attributes))
            elif variable.name == "/":
                variables.append(replace(variable, attributes=_CF_CONVENTIONS_ATTRIBUTE | variable.attributes))
            elif variable.name == "" or (
                variable.values is not None and t_name not in variable.dimensions and (axes or not variable.dimensions)
            ):
                variables.append(variable)  # levels and time-dependent variables are left out
        if not any(variable.name == "/" for variable in variables):
            variables.append(AuxiliaryVariable("/", (), None, dict(_CF_CONVENTIONS_ATTRIBUTE)))
        return variables, []

    def _read(self, cells: Cells) -> np.ndarray:
        raise DataError(f"{self.path}: these coordinates contain no forecast values; read the output file")


_CF_CONVENTIONS_ATTRIBUTE = {"Conventions": np.bytes_(b"CF-1.8")}
_DROPPED_TIME_KEYS = ("bounds", "climatology", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max")


@contextmanager
def _open_forecast_sink(
    series: FieldSeries,
    fields: FieldMetadata,
    times: Sequence[float],
    target: Path,
    grid: ProcessGrid,
    dtype: Any,
    overwrite: bool,
) -> Iterator[Any]:
    """Yield the output file of forecasts at the given times in seconds."""
    coords, variables = None, list[tuple[str, Mapping[str, Any]]]()
    with all_or_none(grid.world):
        source = series.source_containing(len(series) - 1)
        coords = ForecastCoordinates(source, _encode_times(source, series.times[-1], times))
        for channel in fields.channels:
            variables.append((channel.name, _output_attributes(series, channel.name, channel.units)))
    assert coords is not None
    shape = len(times), *series.extent, len(fields.channels)
    file = create_sink(target, shape, dtype, "TYXC", like=coords, overwrite=overwrite, grid=grid, variables=variables)
    with closing(file) as sink:
        yield sink


def _encode_times(source: TileSource, last_input_seconds: float, seconds: Sequence[float]) -> np.ndarray:
    """Return times in the units and integer type of a file's time coordinate."""
    coord = coordinate_along_axis(source, "T", source.auxiliary_variables()[0])
    assert coord is not None
    stored_times = unpacked_values(source.path, coord)
    unit_coord = replace(coord, values=np.arange(2.0), attributes=_unit_attributes(coord))
    zero, unit = times_in_seconds(source.path, unit_coord)
    times = float(stored_times[-1]) + (np.asarray(seconds) - last_input_seconds) / (unit - zero)
    rounded = np.rint(times)
    has_integers = coord.values is not None and coord.values.dtype.kind in "iu"
    return rounded.astype(np.int64) if has_integers and np.allclose(times, rounded, atol=1e-6) else times


def _unit_attributes(variable: AuxiliaryVariable) -> dict[str, Any]:
    return {name: value for name, value in variable.attributes.items() if name in ("units", "calendar")}


def _output_attributes(series: FieldSeries, name: str, units: str) -> dict[str, Any]:
    channel = next((item for item in series.channels if item.name == name), None)
    attributes = {} if channel is None else dict(channel.attributes)
    dropped = {*PACKING_ATTRIBUTES, *POSITION_ATTRIBUTES}
    kept = {k: v for k, v in attributes.items() if k not in dropped and not k.startswith("_") and k.isidentifier()}
    kept |= {"units": units} if units else {}
    if channel is not None and channel.level is not None:
        kept["level"] = np.float64(channel.level[1])
    return kept
