"""PNG, JPEG and other Pillow formats, decoded and encoded as whole images, and folders of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, DataError
from ..io.files import atomic_replacement
from .axes import Cells
from .base import TileSource
from .class_colours import class_colours
from .draft import COMPRESSED_SUFFIX
from .image_loader import ImageLoader, image_files_in
from .in_place import CellLayout, InPlaceSink
from .table import open_source

_ENCODER_NAMES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}


class PictureSource(TileSource):
    """Picture, decoded at the first read and cached until it is closed."""

    max_chunk_bytes = 1 << 62  # the loader checks available memory

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        shape, dtype = ImageLoader().shape_and_dtype(path)
        self._decoded_cells: np.ndarray | None = None
        self._path = path
        super().__init__(
            path, axes or "ZYXC"[-len(shape) :], shape, dtype, shape, metadata=ImageLoader().embedded_metadata(path)
        )

    def _read(self, cells: Cells) -> np.ndarray:
        if self._decoded_cells is None:
            self._decoded_cells = self._decode_file()
        return self._decoded_cells[cells]

    def _decode_file(self) -> np.ndarray:
        return ImageLoader().load(self._path)

    def close(self) -> None:
        """Release the cells."""
        self._decoded_cells = None


class ClassMapSource(PictureSource):
    """Class map in a picture: its stored values, or palette indices."""

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        self._path = path
        self._decoded_cells = self._decode_file()
        TileSource.__init__(
            self, path, "YXC", self._decoded_cells.shape, self._decoded_cells.dtype, self._decoded_cells.shape
        )

    def _decode_file(self) -> np.ndarray:
        return ImageLoader().load_labels(self._path)[..., None]


class FolderSource(TileSource):
    """Images of a folder as samples, sorted by name; all have the same shape and dtype."""

    max_chunk_bytes = 1 << 62

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        self._files = image_files_in(path)
        with open_source(self._files[0], level=level) as first:
            shape, chunks = first.shape, first.chunks
            metadata = {f"{name} of each image": None for name in first.metadata_names()}
            stack_shape = (len(self._files), *shape)
            super().__init__(
                path, "N" + first.axes, stack_shape, first.dtype, chunks and (1, *chunks), first.levels, metadata
            )
        self._level = level
        for file in self._files[1:]:
            self._open_image(file).close()

    def _read(self, cells: Cells) -> np.ndarray:
        samples = []
        for file in self._files[cells[0]]:
            with self._open_image(file) as source:
                samples.append(source.read(cells[1:]))
        return np.stack(samples)

    def _open_image(self, file: Path) -> TileSource:
        source = open_source(file, level=self._level)
        if (source.shape, source.dtype) == (self.shape[1:], self.dtype):
            return source
        source.close()
        raise DataError(
            f"{file}: has shape {list(source.shape)} and dtype {source.dtype}, but the first image of the folder has"
            f" {list(self.shape[1:])} and {self.dtype}; all images of a folder must have the same size and type"
        )


class PictureSink(InPlaceSink):
    """New PNG or JPEG file, stored uncompressed until rank 0 encodes it at the end.

    Parameters
    ----------
    quality : int
        JPEG quality, 1 to 95.
    palette : bool
        For an 8-bit PNG with one channel: cells are class indices, each shown in its own colour, 0 in black.
    """

    default_options: ClassVar[dict[str, Any]] = {"quality": 90, "palette": False}

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        encoder = _ENCODER_NAMES.get(self.path.suffix.lower())
        if encoder is None:
            raise ConfigError(f"{self.path}: writing this format is not supported; choose .png or .tif")
        channels = (1, 3) if encoder == "JPEG" else (1, 2, 3, 4)
        supported = "1 or 3 channels" if encoder == "JPEG" else "1 to 4 channels, or 16-bit with 1"
        is_wide = encoder == "PNG" and self.dtype == np.uint16 and self.shape[-1] == 1
        if self.axes != "YXC" or self.shape[-1] not in channels or not (is_wide or self.dtype in (np.uint8, np.bool_)):
            alternative = ".tif" if {"Y", "X"} <= set(self.axes) else ".npy or .h5"
            raise ConfigError(
                f"{self.path}: {encoder} cannot store shape {list(self.shape)}, axes '{self.axes}', dtype {self.dtype};"
                f" it stores 8-bit (Y, X, C) with {supported}; choose {alternative}"
            )
        if self._options["palette"] and (encoder, self.dtype, self.shape[-1]) != ("PNG", np.uint8, 1):
            raise ConfigError(f"{self.path}: a palette requires a PNG with one 8-bit channel; leave out palette")
        draft.touch(exist_ok=False)
        self.chunks = None
        return CellLayout(self.axes, self.dtype.str, self.shape, self.shape, (0,))

    def _finish_draft_file(self) -> Path:
        from PIL import Image

        cells = np.fromfile(self._temp_path, self.dtype).reshape(self.shape)
        cells = cells.astype(np.uint8) * np.uint8(255) if self.dtype == np.bool_ else cells
        encoded_path = self._temp_path.with_name(self._temp_path.name + COMPRESSED_SUFFIX)
        with atomic_replacement(encoded_path) as file:
            encoder = _ENCODER_NAMES[self.path.suffix.lower()]
            image = Image.fromarray(cells[..., 0] if self.shape[-1] == 1 else cells)
            if self._options["palette"]:
                image.putpalette([part for colour in class_colours(256) for part in colour])
            image.save(file, encoder, quality=self._options["quality"])
        return encoded_path
