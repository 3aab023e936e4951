"""Zarr 2 and 3, and OME-Zarr, by zarr: a file a chunk, so that ranks write packed arrays beside each other."""

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
from .axes import Axes, Cells, guess, relative
from .base import TileSource, agreed_on, faults, refused
from .class_colours import class_colours
from .conventions import AuxiliaryVariable, letters, names_of
from .draft import LOCK, DraftSink
from .ome import Multiscale, multiscale, read_multiscale
from .packing import OF_VALUES, Packing
from .tiles import default_chunks
from .zarr_fields import METADATA, attributes, auxiliary_variables, choose, dimensions, require_harmless, variable

_SMALL = 512  # cells along the longest axis of the last level of a pyramid


class ZarrSource(TileSource):
    """An array of a Zarr folder, or the image of an OME-Zarr group with its levels."""

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        import zarr

        from .zarr_store import FolderStore

        name = f"{path}:{inside}" if inside else str(path)
        if ".." in inside.split("/"):
            raise DataError(f"{name}: points outside the folder; name an array in it")
        with faults(name):
            if inside.strip("/") and not (path / inside.strip("/")).exists():
                there = sorted(one.name for one in path.iterdir() if any((one / each).is_file() for each in METADATA))
                raise DataError(f"{path}: has no array '{inside}'; it has {', '.join(there) or 'none'}")
            store = FolderStore(path, read_only=True)
            found: Any = zarr.open(store, path=inside.strip("/"), mode="r")
            image = Multiscale([""])
            if isinstance(found, zarr.Group):
                found, image = _image(name, found, level)
            paths = image.levels
            names: Any = image.names
            at = paths[min(level, len(paths) - 1)]
            if ".." in at.split("/"):
                raise DataError(f"{name}: level {level} points outside the folder; restore it from a good copy")
            array = found[at] if at else found
            if not isinstance(array, zarr.Array):
                raise DataError(f"{name}: level {level} is not an array; restore it from a good copy")
            require_harmless(name, array)
            store.expect(array)
            told, facts = axes, dict[str, Any]()
            self._packing, self._place = None, path / inside.strip("/") / at
            if names:
                told = told or letters(name, image.variable(), array.shape)
            elif known := dimensions(array):
                self._packing, facts = Packing(name, array.dtype, attributes(array)), {"dimensions": list(known)}
                told = told or letters(name, variable(self._place, array), array.shape)
            self._array = array
            if self._packing is None:
                image.others |= {key: value for key, value in array.attrs.items() if key != "_ARRAY_DIMENSIONS"}
                facts = image.facts(told or guess(array.shape, name))
            super().__init__(
                name,
                told or guess(array.shape, name),
                array.shape,
                array.dtype if self._packing is None else self._packing.dtype,
                array.chunks,
                len(paths),
                facts,
                named=told is not None,
            )

    def _read(self, cells: Cells) -> np.ndarray:
        raw = np.asarray(self._array[cells])
        return raw if self._packing is None else self._packing.decode(raw)

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the coordinates and other variables that belong to the array, and what of these cannot be read."""
        with faults(self.path):
            return auxiliary_variables(self._place, self._array) if self._packing is not None else ([], [])

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the array."""
        return {name: value for name, value in attributes(self._array).items() if value is not None}

    def known(self) -> list[str]:
        """Return the names of what is known of the array beside its cells."""
        if self._packing is None:
            return super().known()
        own = [name for name, value in attributes(self._array).items() if not isinstance(value, str)]
        return list(
            dict.fromkeys([*names_of(*self.auxiliary_variables()), *(name for name in own if name not in OF_VALUES)])
        )


class ZarrSink(DraftSink):
    """A new Zarr array; called .ome.zarr, an OME-Zarr image with a pyramid.

    Parameters
    ----------
    ome : {'0.5', '0.4'}
        The version of OME-Zarr; that of Zarr is then 3 or 2.
    nearest : bool, optional
        Whether lower resolutions take one cell of each 2 x 2, as maps of classes need, or their mean. Default: of
        whole numbers one, of others the mean.
    classes : int
        Of an OME-Zarr image: its cells are numbers of so many classes, and it is a label image with a colour for each,
        0 transparent. 0: it is none.
    """

    choices: ClassVar[dict[str, Any]] = {"ome": "0.5", "nearest": None, "classes": 0}

    def _make(self, like: TileSource | None) -> dict[str, Any]:
        import zarr

        ome, nearest = self._options["ome"], self._options["nearest"]
        if self.path.is_dir() and not any((self.path / name).exists() for name in METADATA):
            raise OutputError(f"{self.path}: is a folder, but not a Zarr store; choose another name")
        if ome not in ("0.4", "0.5"):
            raise ConfigError(f"ome: unsupported version {ome!r}; give '0.4' or '0.5'")
        self.chunks = self.chunks or default_chunks(self.shape, self.axes, self.dtype, 1 << 20)
        version: Literal[2, 3] = 3 if ome == "0.5" else 2
        nearest = self.dtype.kind in "iub" if nearest is None else nearest
        if not self.path.name.lower().endswith(".ome.zarr"):
            self._create(str(self._part), self._names(like), self.shape, self.chunks, version)
            return {"axes": self.axes, "levels": [""], "nearest": nearest}
        axes = "".join(name for name in "TCZYX" if name in self.axes and (name != "C" or self.shape[-1] > 1))
        if "N" in self.axes:
            raise ConfigError(f"{self.path}: OME-Zarr has no axis for samples; name it T, or the file .zarr")
        group = zarr.open_group(str(self._part), mode="w", zarr_format=version)
        halved, shape = self._halved(), list(self.shape)
        levels: list[str] = []
        while True:
            to = Axes(axes)
            self._create(f"{self._part}/{len(levels)}", axes, to.to_stored(shape), to.to_stored(self.chunks), version)
            levels.append(str(len(levels)))
            if max(shape[axis] for axis in halved) <= _SMALL:
                break
            shape = [ceil(n / 2) if axis in halved else n for axis, n in enumerate(shape)]
        known = [self._keep(like, name, axes) for name in ("scale", "translation", "units")]
        image = multiscale(self.path.name, axes, len(levels), {self.axes[axis] for axis in halved}, nearest, *known)
        labels = self._label_metadata()
        if ome == "0.4":
            group.attrs["multiscales"] = [{"version": ome, **image}]
            group.attrs.update({name: {"version": ome, **one} for name, one in labels.items()})
        else:
            group.attrs["ome"] = {"version": ome, "multiscales": [image], **labels}
        return {"axes": axes, "levels": levels, "nearest": nearest}

    def _label_metadata(self) -> dict[str, dict[str, Any]]:
        """Return the 'image-label' metadata of OME-NGFF under its name; empty where cells are not class indices."""
        colours = enumerate(class_colours(self._options["classes"]))
        entries = [{"label-value": at, "rgba": [*colour, 255 if at else 0]} for at, colour in colours]
        return {"image-label": {"colors": entries}} if entries else {}

    def flush(self) -> None:
        """Nothing is held back: what was written is the system's to put on the disk."""

    def _create(
        self, path: str, axes: Sequence[str], shape: Sequence[int], chunks: Sequence[int], version: Literal[2, 3]
    ) -> None:
        import zarr

        names: Any = {"dimension_names": [name.lower() if len(name) == 1 else name for name in axes]}
        if version == 2:
            names = {"attributes": {"_ARRAY_DIMENSIONS": names["dimension_names"]}}
        zarr.create_array(
            path,
            shape=tuple(shape),
            chunks=tuple(chunks),
            dtype=self.dtype,
            fill_value=0 if version == 3 else None,  # of Zarr 2 it is what xarray takes for missing
            zarr_format=version,
            chunk_key_encoding={"name": "v2" if version == 2 else "default", "separator": "/"},
            **names,
        )

    def _names(self, like: TileSource | None) -> list[str]:
        """Return the dimensions of the array, those of the one that it is like; coordinates have no place beside it."""
        stored = zip(like.stored.stored, like.metadata.get("dimensions", ()), strict=False) if like is not None else ()
        names = {letter: name for letter, name in stored if name}
        return [names.get(axis, axis) for axis in self.axes]

    def _halved(self) -> list[int]:
        """Return the axes whose extent halves from level to level: Y and X, and Z where it is not much shorter."""
        extents = dict(zip(self.axes, self.shape, strict=True))
        longest = max(extents.get("Y", 1), extents.get("X", 1))
        kept = {"Y", "X", *("Z" if 2 * extents.get("Z", 0) >= longest else "")}
        return [axis for axis, name in enumerate(self.axes) if name in kept]

    def _attach(self, facts: dict[str, Any]) -> None:
        import zarr

        self._levels = [zarr.open_array(str(self._part / name), mode="r+") for name in facts["levels"]]
        self._stored, self._nearest = Axes(facts["axes"]), facts["nearest"]
        self._lock = os.open(str(self._part) + LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)

    def _detach(self) -> None:
        os.close(self._lock)

    def _finished(self) -> Path:
        """Return the folder, without chunks of which a killed process has written but a part, under names of zarr's."""
        if self.resumed:
            for path in self._part.rglob("*.partial"):
                path.unlink()
        return self._part

    def _write(self, cells: Cells, array: np.ndarray) -> None:
        target, stored, whole = self._levels[0], self._stored.to_file(array), self._stored.to_stored(cells)
        for part, alone in _by_chunks(whole, target.chunks, target.shape):
            inner = relative(part, whole)
            if alone:
                target[part] = stored[inner]
            else:  # others may write the rest of these chunks
                with _locked(self._lock):
                    target[part] = stored[inner]

    def _complete(self) -> None:
        """Make the pyramid, every rank some chunks of each level."""
        rank, size = (0, 1) if self.grid is None else (self.grid.rank, self.grid.size)
        for finer, coarser in zip(self._levels, self._levels[1:], strict=False):
            with agreed_on(self.grid), refused(self.path):
                counts = [ceil(n / c) for n, c in zip(coarser.shape, coarser.chunks, strict=True)]
                for number, place in enumerate(product(*map(range, counts))):
                    if number % size == rank:
                        bounds = zip(place, coarser.chunks, coarser.shape, strict=True)
                        box = tuple(slice(at * c, min(n, at * c + c)) for at, c, n in bounds)
                        coarser[box] = _half(finer, box, coarser.shape, self._nearest)


def _image(name: str, group: Any, level: int) -> tuple[Any, Multiscale]:
    """Return the group that has an image, and what describes that; or, of a group with one array, the array as such."""
    for found in (group, *([group["0"]] if "0" in group else [])):
        attributes = dict(found.attrs)
        ome = attributes.pop("ome", attributes)
        several = _several(ome)
        if several:
            raise DataError(f"{name}: is {several[0]}, not one image; name one of them, such as {name}/{several[1]}")
        if images := ome.get("multiscales"):
            rest = {key: value for key, value in {**attributes, **ome}.items() if key not in ("multiscales", "version")}
            return found, read_multiscale(images[0], level, rest)
    return group, Multiscale([choose(name, dict(group.arrays()))], others=dict(group.attrs))


def _several(ome: Any) -> tuple[str, str] | None:
    """Return the kind of a group of images and the path of its first; None if it is neither a plate nor a well."""
    wells = [str(one["path"]) for one in ome.get("plate", {}).get("wells", [])]
    if wells:
        return f"a plate of {len(wells)} wells", f"{wells[0]}/0"
    fields = [str(one["path"]) for one in ome.get("well", {}).get("images", [])]
    return (f"a well of {len(fields)} images", fields[0]) if len(fields) > 1 else None


def _by_chunks(cells: Cells, chunks: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Cells, bool]]:
    """Yield the parts of a box, and whether one covers its chunks: at most one that does, and slabs around it."""
    rest = list(cells)
    for axis, (chunk, n) in enumerate(zip(chunks, shape, strict=True)):
        cut = rest[axis]
        start = min(cut.stop, ceil(cut.start / chunk) * chunk)
        stop = cut.stop if cut.stop == n else max(start, cut.stop // chunk * chunk)
        for slab in (slice(cut.start, start), slice(stop, cut.stop)):
            if slab.start < slab.stop:
                yield (*rest[:axis], slab, *rest[axis + 1 :]), False
        rest[axis] = slice(start, stop)
    if all(cut.start < cut.stop for cut in rest):
        yield tuple(rest), True


def _half(finer: Any, box: Cells, shape: Sequence[int], nearest: bool) -> np.ndarray:
    """Return a box of a level from the next finer one."""
    factors = [1 if n == m else 2 for n, m in zip(finer.shape, shape, strict=True)]
    bounds = zip(box, factors, finer.shape, strict=True)
    cells = np.asarray(finer[tuple(slice(cut.start * f, min(n, cut.stop * f)) for cut, f, n in bounds)])
    if nearest:
        return cells[tuple(slice(None, None, f) for f in factors)]
    cells = np.pad(cells, [(0, -n % f) for n, f in zip(cells.shape, factors, strict=True)], "edge")
    split = [m for n, f in zip(cells.shape, factors, strict=True) for m in (n // f, f)]
    mean: np.ndarray = cells.reshape(split).mean(axis=tuple(range(1, len(split), 2)), dtype=np.float64)
    return mean.astype(cells.dtype)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Let one rank at a time write to chunks that several share."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
