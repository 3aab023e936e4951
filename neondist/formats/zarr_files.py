"""Zarr 2, Zarr 3 and OME-Zarr, with zarr-python; ranks write compressed chunks in parallel, one file per chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import ConfigError, DataError, OutputError
from .axes import Axes, Cells, guess_axes, relative_slices
from .base import TileSource, convert_read_errors, convert_write_errors, raise_on_all_ranks
from .class_colours import class_colours
from .conventions import AuxiliaryVariable, infer_axes, list_metadata_names
from .draft import LOCK_SUFFIX, DraftSink
from .ome import MultiscaleImage, format_multiscale, parse_multiscale
from .packing import PACKING_ATTRIBUTES, Packing
from .tiles import default_chunks
from .zarr_fields import (
    METADATA_FILES,
    auxiliary_variables,
    choose_array,
    decoded_attributes,
    dimension_names,
    require_no_pickle,
    variable_metadata,
)

_MAX_LAST_LEVEL_CELLS = 512  # cells along the longest axis of the last level of a pyramid


class ZarrSource(TileSource):
    """Array of a Zarr folder, or image of an OME-Zarr group with its levels."""

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        import zarr

        from .zarr_store import FolderStore

        name = f"{path}:{name_in_file}" if name_in_file else str(path)
        if ".." in name_in_file.split("/"):
            raise DataError(f"{name}: points outside the folder; specify an array in it")
        with convert_read_errors(name):
            if name_in_file.strip("/") and not (path / name_in_file.strip("/")).exists():
                folders = (one for one in path.iterdir() if any((one / file).is_file() for file in METADATA_FILES))
                names = ", ".join(sorted(one.name for one in folders))
                choices = f"choose one of {names}" if names else "specify another folder"
                raise DataError(f"{path}: has no array '{name_in_file}'; {choices}")
            store = FolderStore(path, read_only=True)
            node: Any = zarr.open(store, path=name_in_file.strip("/"), mode="r")
            image = MultiscaleImage([""])
            if isinstance(node, zarr.Group):
                node, image = _find_image(name, node, level)
            paths = image.levels
            level_path = paths[min(level, len(paths) - 1)]
            if ".." in level_path.split("/"):
                raise DataError(f"{name}: level {level} points outside the folder; restore it from a good copy")
            array = node[level_path] if level_path else node
            if not isinstance(array, zarr.Array):
                raise DataError(f"{name}: level {level} is not an array; restore it from a good copy")
            require_no_pickle(name, array)
            store.limit_chunk_sizes_to(array)
            metadata = dict[str, Any]()
            self._array_path = path / name_in_file.strip("/") / level_path
            if image.names:
                axes = axes or infer_axes(name, image.to_variable_metadata(), array.shape)
            elif dims := dimension_names(array):
                self.packing = Packing(name, array.dtype, decoded_attributes(array))
                metadata = {"dimensions": list(dims)}
                axes = axes or infer_axes(name, variable_metadata(self._array_path, array), array.shape)
            self._array = array
            if self.packing is None:
                image.other_metadata |= {key: value for key, value in array.attrs.items() if key != "_ARRAY_DIMENSIONS"}
                metadata = image.array_metadata(axes or guess_axes(array.shape, name))
            super().__init__(
                name,
                axes or guess_axes(array.shape, name),
                array.shape,
                array.dtype if self.packing is None else self.packing.dtype,
                array.chunks,
                len(paths),
                metadata,
                axes_given=axes is not None,
            )

    def _read(self, cells: Cells) -> np.ndarray:
        return self._unpack(np.asarray(self._array[cells]))

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the coordinates and other variables of the array, and the names of those that cannot be read."""
        with convert_read_errors(self.path):
            return auxiliary_variables(self._array_path, self._array) if self.packing is not None else ([], [])

    def array_attributes(self) -> dict[str, Any]:
        """Return the attributes of the array."""
        return {name: value for name, value in decoded_attributes(self._array).items() if value is not None}

    def metadata_names(self) -> list[str]:
        """Return the names of the array's metadata."""
        if self.packing is None:
            return super().metadata_names()
        own_names = [name for name, value in decoded_attributes(self._array).items() if not isinstance(value, str)]
        unique_names = dict.fromkeys(list_metadata_names(*self.auxiliary_variables()))
        return list(unique_names | {name: None for name in own_names if name not in PACKING_ATTRIBUTES})


class ZarrSink(DraftSink):
    """New Zarr array, or OME-Zarr image with a pyramid if named .ome.zarr.

    Parameters
    ----------
    ome : {'0.5', '0.4'}
        Version of OME-Zarr, which implies Zarr 3 or 2.
    nearest : bool, optional
        Whether a cell of a lower resolution is one of the 2 x 2 (x 2) cells that it replaces, as class maps require;
        otherwise, it is their mean. Default: True unless cells are floating-point.
    classes : int
        Number of classes of an OME-Zarr label image, in which each class has a colour, and class 0 is transparent.
        0 for other images.
    """

    default_options: ClassVar[dict[str, Any]] = {"ome": "0.5", "nearest": None, "classes": 0}

    def _create_empty_file(self, like: TileSource | None) -> dict[str, Any]:
        import zarr

        ome_version, nearest = self._options["ome"], self._options["nearest"]
        if self.path.is_dir() and not any((self.path / name).exists() for name in METADATA_FILES):
            raise OutputError(f"{self.path}: is a folder, but not a Zarr store; choose another name")
        if ome_version not in ("0.4", "0.5"):
            raise ConfigError(f"ome: unsupported version {ome_version!r}; give '0.4' or '0.5'")
        self.chunks = self.chunks or default_chunks(self.shape, self.axes, self.dtype, 1 << 20)
        version: Literal[2, 3] = 3 if ome_version == "0.5" else 2
        nearest = self.dtype.kind in "iub" if nearest is None else nearest
        if not self.path.name.lower().endswith(".ome.zarr"):
            self._create_level(str(self._temp_path), self._dimension_names(like), self.shape, self.chunks, version)
            return {"axes": self.axes, "levels": [""], "nearest": nearest}
        axes = "".join(name for name in "TCZYX" if name in self.axes and (name != "C" or self.shape[-1] > 1))
        if "N" in self.axes:
            raise ConfigError(f"{self.path}: OME-Zarr has no axis for samples; name the axis T, or write a plain .zarr")
        if sum(name in "ZYX" for name in self.axes) < 2:
            raise ConfigError(
                f"{self.path}: OME-Zarr needs two of the axes Z, Y and X, not '{self.axes}'; write a plain .zarr"
            )
        group = zarr.open_group(str(self._temp_path), mode="w", zarr_format=version)
        halved_axes, shape = self._halved_axes(), list(self.shape)
        levels: list[str] = []
        while True:
            stored_axes = Axes(axes)
            self._create_level(
                f"{self._temp_path}/{len(levels)}",
                axes,
                stored_axes.to_stored_order(shape),
                stored_axes.to_stored_order(self.chunks),
                version,
            )
            levels.append(str(len(levels)))
            if max(shape[axis] for axis in halved_axes) <= _MAX_LAST_LEVEL_CELLS:
                break
            shape = [ceil(n / 2) if axis in halved_axes else n for axis, n in enumerate(shape)]
        axis_metadata = [self._copy_metadata(like, name, axes) for name in ("scale", "translation", "units")]
        image = format_multiscale(
            self.path.name, axes, len(levels), {self.axes[axis] for axis in halved_axes}, nearest, *axis_metadata
        )
        labels = self._label_metadata()
        if ome_version == "0.4":
            group.attrs["multiscales"] = [{"version": ome_version, **image}]
            group.attrs.update({name: {"version": ome_version, **one} for name, one in labels.items()})
        else:
            group.attrs["ome"] = {"version": ome_version, "multiscales": [image], **labels}
        return {"axes": axes, "levels": levels, "nearest": nearest}

    def _label_metadata(self) -> dict[str, dict[str, Any]]:
        """Return OME-Zarr's metadata of label images by name; {} if cells are not class indices."""
        colours = enumerate(class_colours(self._options["classes"]))
        colour_entries = [{"label-value": at, "rgba": [*colour, 255 if at else 0]} for at, colour in colours]
        return {"image-label": {"colors": colour_entries}} if colour_entries else {}

    def flush(self) -> None:
        """Do nothing: writes are not buffered by this process."""

    def _create_level(
        self, path: str, axes: Sequence[str], shape: Sequence[int], chunks: Sequence[int], version: Literal[2, 3]
    ) -> None:
        import zarr

        name_arguments: Any = {"dimension_names": [name.lower() if len(name) == 1 else name for name in axes]}
        if version == 2:
            name_arguments = {"attributes": {"_ARRAY_DIMENSIONS": name_arguments["dimension_names"]}}
        zarr.create_array(
            path,
            shape=tuple(shape),
            chunks=tuple(chunks),
            dtype=self.dtype,
            fill_value=0 if version == 3 else None,  # in Zarr 2, xarray treats a fill value as missing
            zarr_format=version,
            chunk_key_encoding={"name": "v2" if version == 2 else "default", "separator": "/"},
            **name_arguments,
        )

    def _dimension_names(self, like: TileSource | None) -> list[str]:
        """Return the dimension names, copied from the `like` array; coordinates are not written."""
        dimensions = () if like is None else like.metadata.get("dimensions", ())
        letters = "" if like is None else like.stored_axes.letters
        names = {letter: name for letter, name in zip(letters, dimensions, strict=False) if name}
        return [names.get(axis, axis) for axis in self.axes]

    def _halved_axes(self) -> list[int]:
        """Return the axes that are halved from level to level: Y, X, and Z unless it is much shorter."""
        extents = dict(zip(self.axes, self.shape, strict=True))
        longest = max(extents.get("Y", 1), extents.get("X", 1))
        halved_names = {"Y", "X", *("Z" if 2 * extents.get("Z", 0) >= longest else "")}
        return [axis for axis, name in enumerate(self.axes) if name in halved_names]

    def _open_created_file(self, open_arguments: dict[str, Any]) -> None:
        import zarr

        self._levels = [zarr.open_array(str(self._temp_path / name), mode="r+") for name in open_arguments["levels"]]
        self._stored_axes, self._uses_nearest_neighbour = Axes(open_arguments["axes"]), open_arguments["nearest"]
        self._lock_fd = os.open(
            str(self._temp_path) + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644
        )

    def _close_file(self) -> None:
        os.close(self._lock_fd)

    def _finish_draft_file(self) -> Path:
        """Remove zarr's temporary files of partially written chunks, and return the folder."""
        if self.resumed:
            for path in self._temp_path.rglob("*.partial"):
                path.unlink()
        return self._temp_path

    def _write(self, cells: Cells, array: np.ndarray) -> None:
        level = self._levels[0]
        stored = self._stored_axes.to_file(array)
        stored_box = self._stored_axes.to_stored_order(cells)
        for part, complete in _split_by_chunks(stored_box, level.chunks, level.shape):
            array_part = relative_slices(part, stored_box)
            if complete:
                level[part] = stored[array_part]
            else:  # other ranks may write the rest of these chunks
                with _lock_chunks(self._lock_fd):
                    level[part] = stored[array_part]

    def _on_all_cells_written(self) -> None:
        """Write the pyramid; chunks of each level are distributed over ranks."""
        rank, size = (0, 1) if self.grid is None else (self.grid.rank, self.grid.size)
        for finer, coarser in zip(self._levels, self._levels[1:], strict=False):
            with raise_on_all_ranks(self.grid), convert_write_errors(self.path):
                chunk_counts = [ceil(n / c) for n, c in zip(coarser.shape, coarser.chunks, strict=True)]
                for number, chunk_index in enumerate(product(*map(range, chunk_counts))):
                    if number % size == rank:
                        bounds = zip(chunk_index, coarser.chunks, coarser.shape, strict=True)
                        box = tuple(slice(at * c, min(n, at * c + c)) for at, c, n in bounds)
                        coarser[box] = _downsample(finer, box, coarser.shape, self._uses_nearest_neighbour)


def _find_image(name: str, group: Any, level: int) -> tuple[Any, MultiscaleImage]:
    """Return the group of an image and the image's description; for a group with one array, describe that array."""
    for node in (group, *([group["0"]] if "0" in group else [])):
        attributes = dict(node.attrs)
        ome = attributes.pop("ome", attributes)
        members = _image_collection(ome)
        if members:
            raise DataError(f"{name}: is {members[0]}, not one image; specify an image, such as {name}/{members[1]}")
        if images := ome.get("multiscales"):
            rest = {key: value for key, value in {**attributes, **ome}.items() if key not in ("multiscales", "version")}
            return node, parse_multiscale(images[0], level, rest)
    return group, MultiscaleImage([choose_array(name, dict(group.arrays()))], other_metadata=dict(group.attrs))


def _image_collection(ome: Any) -> tuple[str, str] | None:
    """Return the kind of a plate or well and the path of its first image; None for other groups."""
    well_paths = [str(one["path"]) for one in ome.get("plate", {}).get("wells", [])]
    if well_paths:
        return f"a plate of {len(well_paths)} wells", f"{well_paths[0]}/0"
    image_paths = [str(one["path"]) for one in ome.get("well", {}).get("images", [])]
    return (f"a well of {len(image_paths)} images", image_paths[0]) if len(image_paths) > 1 else None


def _split_by_chunks(cells: Cells, chunks: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Cells, bool]]:
    """Split a box into an aligned part of complete chunks and slabs around it; yield (part, is complete)."""
    remaining = list(cells)
    for axis, (chunk, n) in enumerate(zip(chunks, shape, strict=True)):
        cut = remaining[axis]
        start = min(cut.stop, ceil(cut.start / chunk) * chunk)
        stop = cut.stop if cut.stop == n else max(start, cut.stop // chunk * chunk)
        for slab in (slice(cut.start, start), slice(stop, cut.stop)):
            if slab.start < slab.stop:
                yield (*remaining[:axis], slab, *remaining[axis + 1 :]), False
        remaining[axis] = slice(start, stop)
    if all(cut.start < cut.stop for cut in remaining):
        yield tuple(remaining), True


def _downsample(finer: Any, box: Cells, shape: Sequence[int], nearest: bool) -> np.ndarray:
    """Compute a box of a level from the next finer one."""
    factors = [1 if n == m else 2 for n, m in zip(finer.shape, shape, strict=True)]
    axis_bounds = zip(box, factors, finer.shape, strict=True)
    cells = np.asarray(finer[tuple(slice(cut.start * f, min(n, cut.stop * f)) for cut, f, n in axis_bounds)])
    if nearest:
        return cells[tuple(slice(None, None, f) for f in factors)]
    cells = np.pad(cells, [(0, -n % f) for n, f in zip(cells.shape, factors, strict=True)], "edge")
    block_shape = [m for n, f in zip(cells.shape, factors, strict=True) for m in (n // f, f)]
    mean: np.ndarray = cells.reshape(block_shape).mean(axis=tuple(range(1, len(block_shape), 2)), dtype=np.float64)
    return mean.astype(cells.dtype)


@contextmanager
def _lock_chunks(descriptor: int) -> Iterator[None]:
    """Lock chunks that several ranks write to."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
