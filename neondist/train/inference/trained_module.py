"""PyTorch module with weights from a file, without an experiment or a data set."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...errors import AmbiguousAxesError, ConfigError, DataError
from ...formats import open_source
from ...formats.base import convert_read_errors
from ...io.regular_file import open_regular, read_bytes
from ...terminal.console import counted
from .images import SourceSamples, open_images
from .prediction_methods import PredictionMethod, choose_method, memory_limit_per_rank
from .window_prediction import WindowPrediction, check_window_fits, windows_per_block

MAX_WHOLE_IMAGE_BATCH = 8
"""Largest batch of whole images."""


class TrainedModule:
    """A module from a factory, with trained weights, ready for images of any size.

    Parameters
    ----------
    factory : callable
        Function that returns the torch.nn.Module, which takes images (n, C, *spatial).
    weights : path
        A state_dict, as safetensors or from torch.save; see `neondist.torch.load_weights`.
    name : str
        Name of the factory in messages and journals.
    windows, stride : int, optional
        For a tile classifier: cells along each axis of a window, and distance between windows (default: the window).
        The output is then a map of scores, with one cell for each window that lies completely in the image.
    scale : float
    mean, std : sequence of float
        One value, or one per channel. The module's input is (x / scale - mean) / std for values x of a file.
    axes : str, optional
        A letter for each stored axis of the images, such as 'NYX', if their file specifies none.
    memory : int or str, optional
        Memory limit, in bytes or as text such as '4GiB', for the total of all processes on a machine.

    Attributes
    ----------
    class_names : list of str
        The attribute `class_names` of the module, for reports; [] if it has none.

    Raises
    ------
    UserError
        ConfigError about the factory or an option; DataError if the weights are missing, damaged or of another module.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        weights: str | Path,
        name: str,
        *,
        windows: int | None = None,
        stride: int | None = None,
        scale: float = 1.0,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        axes: str | None = None,
        memory: int | str | None = None,
    ) -> None:
        from ...torch import TorchModel, load_weights
        from ...torch.training.module_inputs import expected_ndim_and_channels

        if stride is not None and windows is None:
            raise ConfigError("--stride requires --windows CELLS; give --windows, or leave out --stride")
        if scale == 0 or 0 in std:
            raise ConfigError(f"--{'scale' if scale == 0 else 'std'}: must not be 0, since values are divided by it")
        self.name, self.weights, self.window_extent, self.stride = name, Path(weights), windows, stride or windows
        self.mean, self.std, self.scale = list(mean), list(std), scale
        self.axes = axes
        self.model = TorchModel(factory)
        self.model.configure_execution(memory=memory)
        try:
            module = self.model.module
        except ConfigError as error:
            remedy = "; specify a class or function without arguments" if _needs_arguments(factory) else ""
            raise ConfigError(f"{name}: {error}{remedy}") from error
        load_weights(module, self.weights)
        for parameter, value in module.named_parameters():
            if not value.isfinite().all():
                raise DataError(f"{weights}: {parameter} has values that are not finite; give another weights file")
        self.spatial_ndim, self.channels = expected_ndim_and_channels(module)
        self.class_names = [str(name) for name in getattr(module, "class_names", ())]
        self._factory_source = _read_source_file(factory)

    def check_images(self, source: str | Path) -> None:
        """Raise UserError if the images are invalid; called before ranks are started."""
        with closing(self.open_source_images(source)) as images, self._report_channel_mismatch(images):
            if self.window_extent is not None:
                self._create_window_prediction(images, None, None)

    def open_source_images(self, source: str | Path) -> SourceSamples:
        """Return the images of a file in the layout of the module.

        Raises
        ------
        UserError
            DataError for a file that cannot be read, has other axes, or is smaller than a window; ConfigError if the
            number of means or standard deviations is neither 1 nor the number of channels.
        """
        channels = self.channels
        try:
            with open_source(source, axes=self.axes) as file:
                channels = file.shape[-1] if file.axes_given else channels or file.shape[-1]
        except AmbiguousAxesError as error:
            channels = channels or error.shape[-1]
        for option in ("mean", "std"):
            if len(getattr(self, option)) not in (1, channels):
                raise ConfigError(
                    f"--{option}: {len(getattr(self, option))} values, but {source} has"
                    f" {counted(channels, 'channel')}; give one, or one per channel"
                )
        std = np.asarray(self.std, np.float64)
        factor = np.broadcast_to(1 / (self.scale * std), (len(self.std),)).tolist()
        offset = (np.asarray(self.mean, np.float64) / std).tolist()
        images = open_images(source, (*(1 for _ in range(self.spatial_ndim)), channels), factor, offset, axes=self.axes)
        try:
            if self.window_extent is not None:
                check_window_fits(images, self.window_extent)
        except DataError:
            images.close()
            raise
        return images

    @contextmanager
    def open_prediction_method(
        self, source: str | Path, grid: ProcessGrid, block: int | None, resumed_method: list[Any] | None
    ) -> Iterator[tuple[PredictionMethod, SourceSamples, dict[str, str]]]:
        """Yield the prediction method, the images, and hashes of the weights and the module. Collective."""
        with all_or_none(grid.world):
            images = self.open_source_images(source)
        with closing(images):
            with all_or_none(grid.world), self._report_channel_mismatch(images):
                method = (
                    choose_method(self.model, images, grid, MAX_WHOLE_IMAGE_BATCH, block, resumed_method)
                    if self.window_extent is None
                    else self._create_window_prediction(images, block, resumed_method, grid.size)
                )
                identities = self._hash_weights_and_network() if grid.rank == 0 else None
            yield method, images, grid.world.bcast(identities)

    def _create_window_prediction(
        self, images: SourceSamples, block: int | None, resumed_method: list[Any] | None, ranks: int = 1
    ) -> WindowPrediction:
        from ...torch.training.windows import WindowScores

        assert self.window_extent is not None
        assert self.stride is not None
        windows_per_axis = [windows_per_block(self.stride, block, resumed_method)] * self.spatial_ndim
        window_args = self.model.dtype, images.shape[1:], self.window_extent, self.stride, windows_per_axis
        return WindowPrediction(
            images, WindowScores(self.model.module, *window_args), memory_limit_per_rank(self.model.memory, ranks)
        )

    @contextmanager
    def _report_channel_mismatch(self, images: SourceSamples) -> Iterator[None]:
        """Replace an error of the module by one about the number of channels, if that number is wrong."""
        try:
            yield
        except ConfigError as error:
            channels = images.shape[-1]
            if self.channels in (None, channels):
                raise
            raise DataError(
                f"{images.source.path}: has {counted(channels, 'channel')}, but the first convolution of {self.name}"
                f" takes {counted(self.channels, 'channel')}; give images with that many channels, or another --factory"
            ) from error

    def _hash_weights_and_network(self) -> dict[str, str]:
        """Return hashes that a resumed job must have in common with the original."""
        weights_hash = hashlib.sha256()
        with convert_read_errors(self.weights), open_regular(self.weights) as file:
            while chunk := file.read(1 << 20):
                weights_hash.update(chunk)
        settings = self.name, self.window_extent, self.stride, self.scale, self.mean, self.std, str(self.model.module)
        network_hash = hashlib.sha256(repr(settings).encode() + self._factory_source).hexdigest()[:16]
        return {"weights": weights_hash.hexdigest()[:16], "network": network_hash}


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function cannot be called without arguments; False if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in
        return False
    parameters = signature.parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _read_source_file(factory: Callable[..., Any]) -> bytes:
    """Return the source file of a function as bytes; b'' if there is none."""
    with suppress(TypeError, OSError):
        return read_bytes(inspect.getfile(factory))
    return b""
