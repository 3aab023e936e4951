"""A module of PyTorch with the weights of a file, which need no experiment and no data set."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...errors import AxesError, ConfigError, DataError
from ...formats import open_source
from ...io.regular_file import open_regular, read_bytes
from .images import Images, open_images
from .routes import InBlocks, InTiles, choose, limit_of
from .windows import InWindows, block_of, check_windows

BATCH = 8
"""Whole images that go together at most."""


class TrainedModule:
    """A module that a factory makes, with trained weights, ready for images of any size.

    Parameters
    ----------
    factory : callable
        Returns the torch.nn.Module, from images (n, C, *spatial).
    weights : path
        A state_dict: safetensors, or of torch.save, as `neondist.torch.load_weights` reads it.
    name : str
        Of the factory, as messages and journals have it.
    windows, stride : int, optional
        Of a classifier of tiles: cells along each axis of a window, and between the first cells of neighbours (default:
        side by side). The output is then a map of scores, a cell for each window that lies in the image whole.
    scale, mean, std : float, or one for each channel
        The module is given (x / scale - mean) / std of values x of a file.
    memory : int, optional
        Bytes that all processes on a machine may use together.

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
        memory: int | str | None = None,
    ) -> None:
        from ...torch import TorchModel, load_weights
        from ...torch.feeding import expected_image

        if stride is not None and windows is None:
            raise ConfigError("--stride requires --windows CELLS; give it, or leave out --stride")
        if scale == 0 or 0 in std:
            raise ConfigError(f"--{'scale' if scale == 0 else 'std'}: must not be 0, since values are divided by it")
        self.name, self.weights, self.windows, self.stride = name, Path(weights), windows, stride or windows
        self.mean, self.std, self.scale = list(mean), list(std), scale
        self.model = TorchModel(factory)
        self.model.execute(memory=memory)
        try:
            module = self.model.module
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}; name a class or function without arguments") from error
        load_weights(module, self.weights)
        for parameter, value in module.named_parameters():
            if not value.isfinite().all():
                raise DataError(f"{weights}: {parameter} has values that are not finite; name another file of weights")
        self.spatial, self.channels = expected_image(module)
        self._code = _file_of(factory)

    def check(self, source: str | Path) -> None:
        """Find what is wrong with images before ranks are started; UserError."""
        with closing(self.images(source)) as images, self._channels_told(images):
            if self.windows is not None:
                self._in_windows(images, None, None)

    def images(self, source: str | Path) -> Images:
        """Return the images of a file, as the module takes them.

        Raises
        ------
        UserError
            DataError for a file that cannot be read, has other axes, or no room for a window; ConfigError for a number
            of means that is not that of channels.
        """
        channels = self.channels
        try:
            with open_source(source) as found:
                channels = found.shape[-1] if found.named else channels or found.shape[-1]
        except AxesError as error:
            channels = channels or error.shape[-1]
        for option in ("mean", "std"):
            if len(getattr(self, option)) not in (1, channels):
                raise ConfigError(
                    f"--{option}: {len(getattr(self, option))} values, but {source} has {channels} channels; give"
                    " one, or one per channel"
                )
        std = np.asarray(self.std, np.float64)
        factor = np.broadcast_to(1 / (self.scale * std), (len(self.std),)).tolist()
        offset = (np.asarray(self.mean, np.float64) / std).tolist()
        images = open_images(source, (*(1 for _ in range(self.spatial)), channels), factor, offset)
        try:
            if self.windows is not None:
                check_windows(images, self.windows)
        except DataError:
            images.close()
            raise
        return images

    @contextmanager
    def opened(
        self, source: str | Path, grid: ProcessGrid, block: int | None, before: list[Any] | None
    ) -> Iterator[tuple[InBlocks | InTiles, Images, dict[str, str]]]:
        """Yield the route that the module goes, its images, and what both are, as `network` does; collective."""
        with all_or_none(grid.world):
            images = self.images(source)
        with closing(images):
            with all_or_none(grid.world), self._channels_told(images):
                route = (
                    choose(self.model, images, grid, BATCH, block, before)
                    if self.windows is None
                    else self._in_windows(images, block, before, grid.size)
                )
                said = self._said() if grid.rank == 0 else None
            yield route, images, grid.world.bcast(said)

    def _in_windows(self, images: Images, block: int | None, before: list[Any] | None, ranks: int = 1) -> InWindows:
        from ...torch.windows import ModuleWindows

        assert self.windows is not None
        assert self.stride is not None
        size = [block_of(self.stride, block, before)] * self.spatial
        given = self.model.dtype, images.shape[1:], self.windows, self.stride, size
        return InWindows(images, ModuleWindows(self.model.module, *given), limit_of(self.model.memory, ranks))

    @contextmanager
    def _channels_told(self, images: Images) -> Iterator[None]:
        """Raise an error about the channels if the module fails for images with other channels than it takes."""
        try:
            yield
        except ConfigError as error:
            there = images.shape[-1]
            if self.channels in (None, there):
                raise
            raise DataError(
                f"{images.source.path}: has {there} channels, but the first convolution of {self.name} takes"
                f" {self.channels}; give images of {self.channels} channels, or another --factory"
            ) from error

    def _said(self) -> dict[str, str]:
        """Return what a resumed job has to have in common with the one that it resumes."""
        weights = hashlib.sha256()
        with open_regular(self.weights) as file:
            while part := file.read(1 << 20):
                weights.update(part)
        options = self.name, self.windows, self.stride, self.scale, self.mean, self.std, str(self.model.module)
        network = hashlib.sha256(repr(options).encode() + self._code).hexdigest()[:16]
        return {"weights": weights.hexdigest()[:16], "network": network}


def _file_of(factory: Callable[..., Any]) -> bytes:
    """Return the text of the file that a function is in; nothing of one that is in none."""
    with suppress(TypeError, OSError):
        return read_bytes(inspect.getfile(factory))
    return b""
