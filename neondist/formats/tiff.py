"""TIFF, BigTIFF, OME-TIFF, GeoTIFF and the pyramids of slide scanners, by tifffile; only tiles touched are decoded."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree

import numpy as np

from ..errors import ConfigError, DataError
from ..io.regular_file import open_regular
from .axes import Cells
from .base import LARGEST_CHUNK, TileSource, faults
from .pictures import PictureSource
from .placed import PlacedSink, Placement, read_placed
from .tiles import default_chunks

_GEO = {33550: "d", 33922: "d", 34264: "d", 34735: "H", 34736: "d", 34737: "s"}
"""tags that say where on Earth the image lies, and their types"""
_RESOLUTION = (282, 283, 296)
_NODATA = 42113  # GDAL's: what cells hold that nobody has measured
_JPEG = (6, 7, 34892, 33007)
_NAMES = {"I": "Z", "Q": "Z", "R": "N"}
"""tifffile's letters for pages whose meaning the file does not tell, which `neondist data convert` takes for depth"""
_SILENT = logging.NullHandler()  # without one, Python prints what tifffile notes about odd files


def open_tiff(path: Path, inside: str, level: int, axes: str | None) -> TileSource:
    """Return an image of a TIFF file; one that is to be turned upright is read by Pillow, whole."""
    found = TIFFSource(path, inside, level, axes)
    if not found.turned:
        return found
    found.close()
    return PictureSource(path, inside, level, axes)


class TIFFSource(TileSource):
    """One image of a TIFF file: its first, or that of the number after the colon; levels are those of its pyramid.

    Cells of floats that GDAL's tag calls nodata are NaN, as they are in NetCDF; whole numbers stay as they are.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        import tifffile

        logging.getLogger("tifffile").addHandler(_SILENT)  # adding it again does nothing
        with faults(path):
            self._opened = open_regular(path)
            try:
                self._file = tifffile.TiffFile(self._opened, _multifile=False)
                require_one_file(path, self._file.ome_metadata)
                self._open(path, inside, level, axes)
            except BaseException:
                self._opened.close()
                raise

    def _open(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        images = self._file.series
        if not (inside or "0").isdecimal() or int(inside or 0) >= len(images):
            raise DataError(f"{path}: has no image '{inside}'; give a number below {len(images)}")
        levels = images[int(inside or 0)].levels
        series = levels[min(level, len(levels) - 1)]
        key = series.keyframe
        self._key: Any = key
        self.turned = 274 in key.tags and key.tags[274].value != 1
        self._pages: list[Any] = list(series)
        leading: list[int] = []
        names = ["C" if key.shaped[0] > 1 else "", "Z" if key.shaped[1] > 1 else "", "Y", "X"]
        self._within = [axis for axis, name in enumerate([*names, "C" if key.shaped[4] > 1 else ""]) if name]
        inner = "".join(names) + "C" * (key.shaped[4] > 1)
        full = list(zip(series.get_axes(False), series.get_shape(False), strict=True))
        count, outer = prod(n for _, n in full) // prod(key.shaped), ""
        while prod(leading) < count and full:
            name, n = full.pop(0)
            if n > 1:
                name = _NAMES.get(name, name)
                outer += next(letter for letter in name + "NTMLKJ" if letter not in inner + outer)
                leading.append(n)
        if prod(leading) != count:
            raise DataError(f"{path}: its pages are {len(self._pages)}, of an image of shape {list(series.shape)}")
        self._leading = leading
        shape = (*leading, *(key.shaped[axis] for axis in self._within))
        chunks: tuple[int, ...] | None = (*(1 for _ in leading), *(_chunk(key)[axis] for axis in self._within))
        self._missing: Any = None
        if series.dtype.kind == "f" and _NODATA in key.tags:  # tifffile's own `nodata` lacks the lowest float32
            with suppress(ValueError), np.errstate(over="ignore"):
                self._missing = np.float64(str(key.tags[_NODATA].value).strip("\0 ")).astype(series.dtype)
        self._place = self._placement(outer + inner, shape, series)
        if self._place is not None:
            chunks = None
        tags = {code: key.tags[code].value for code in (*_GEO, *_RESOLUTION) if code in key.tags}
        super().__init__(
            f"{path}:{inside}" if inside else path,
            axes or outer + inner,
            shape,
            series.dtype,
            chunks,
            len(levels),
            {"tags": tags, "ome": {} if level else _sizes(self._file.ome_metadata, int(inside or 0))},
            named=axes is not None,
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._opened.close()

    def _placement(self, axes: str, shape: tuple[int, ...], series: Any) -> Placement | None:
        """Return where the cells lie, if they lie there as they are."""
        block = (*(1 for _ in self._leading), *shape[len(self._leading) :])
        dtype = np.dtype(self._file.byteorder + series.dtype.char).str
        if series.dataoffset is not None:
            return Placement(axes, dtype, shape, shape, (series.dataoffset,))
        if all(page is not None and page.is_final for page in self._pages):
            return Placement(axes, dtype, shape, block, tuple(page.dataoffsets[0] for page in self._pages))
        return None

    def _read(self, cells: Cells) -> np.ndarray:
        found = self._raw(cells)
        if self._missing is not None:
            found[found == self._missing] = np.nan
        return found

    def _raw(self, cells: Cells) -> np.ndarray:
        file = self._file.filehandle
        if self._place is not None:
            return read_placed(file, self.path, self._place, cells)
        outer, inner = cells[: len(self._leading)], cells[len(self._leading) :]
        box = [slice(0, n) for n in self._key.shaped]
        for axis, cut in zip(self._within, inner, strict=True):
            box[axis] = cut
        pages = [self._page(place, box) for place in product(*(range(cut.start, cut.stop) for cut in outer))]
        return np.stack(pages).reshape([cut.stop - cut.start for cut in cells])

    def _page(self, place: tuple[int, ...], box: list[slice]) -> np.ndarray:
        """Return cells of one page, on the five axes that tifffile gives every page."""
        number = int(np.ravel_multi_index(place, self._leading)) if place else 0
        page, key, file = self._pages[number], self._key, self._file.filehandle
        out = np.full(
            [cut.stop - cut.start for cut in box], key.nodata if self._missing is None else np.nan, self.dtype
        )
        if page is None:
            return out
        chunk = _chunk(key)
        counts = [ceil(n / c) for n, c in zip(key.shaped, chunk, strict=True)]
        of_jpeg = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader} if key.compression in _JPEG else {}
        for at in product(*(range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(box, chunk, strict=True))):
            index = int(np.ravel_multi_index(at, counts))
            offset, size = page.dataoffsets[index], page.databytecounts[index]
            if not size:
                continue  # nothing was written there
            if size > min(file.size, LARGEST_CHUNK):
                raise DataError(f"{self.path}: a tile of {size} bytes is more than the file has")
            file.seek(offset)
            data = file.read(size)
            if len(data) != size:
                raise DataError(f"{self.path}: ends early; put back a good copy")
            tile, corner, extents = key.decode(data, index, **of_jpeg)
            if tile is None:
                continue
            there, here = [], []
            for cut, lo, n in zip(box, corner, (1, *extents), strict=True):
                start, stop = max(cut.start, lo), min(cut.stop, lo + n)
                there.append(slice(start - cut.start, stop - cut.start))
                here.append(slice(start - lo, stop - lo))
            out[tuple(there)] = tile[None][tuple(here)]
        return out


class TIFFSink(PlacedSink):
    """A new tiled BigTIFF, an OME-TIFF if its name says so, with the georeference of the image that it belongs to."""

    def _lay(self, part: Path, like: TileSource | None) -> Placement:
        import tifffile

        extents = dict(zip(self.axes, self.shape, strict=True))
        if not {"Y", "X"} <= set(self.axes):
            raise ConfigError(f"{self.path}: TIFF files hold images; axes '{self.axes}' have no Y and X")
        asked = dict(zip(self.axes, self.chunks or default_chunks(self.shape, self.axes, self.dtype), strict=True))
        tile = tuple(ceil(asked[name] / 16) * 16 for name in "YX")
        channels = extents["C"] > 1
        axes, shape = self.axes[: None if channels else -1], self.shape[: None if channels else -1]
        tags = {} if like is None else like.metadata.get("tags", {})
        rgb = extents["C"] in (3, 4) and self.dtype in (np.uint8, np.uint16)
        ome = self.path.name.lower().endswith((".ome.tif", ".ome.tiff"))
        if ome and "N" in axes:
            raise ConfigError(f"{self.path}: OME-TIFF has no axis for samples; name it T, or Z")
        more: dict[str, Any] = (
            {"resolution": tuple(tags[code] for code in _RESOLUTION[:2])} if {282, 283} <= set(tags) else {}
        )
        if more and 296 in tags:
            more["resolutionunit"] = tags[296]
        tifffile.imwrite(
            part,
            shape=shape,
            dtype=self.dtype,
            tile=tile,
            bigtiff=True,
            ome=ome,
            photometric="rgb" if rgb else "minisblack",
            planarconfig="contig" if channels else None,
            metadata={
                "axes": axes.replace("C", "S").replace("N", "R"),
                **(like.metadata.get("ome", {}) if ome and like is not None else {}),
                # tifffile would draw one: the same cells make the same file
                **({"UUID": str(uuid5(NAMESPACE_OID, f"{self.path.name} {shape} {self.dtype}"))} if ome else {}),
            },
            extratags=[
                (code, kind, 0 if kind == "s" else np.size(tags[code]), tags[code], True)
                for code, kind in _GEO.items()
                if code in tags
            ],
            **more,
        )
        with tifffile.TiffFile(part) as file:
            offsets = tuple(offset for page in file.pages for offset in page.dataoffsets)
            dtype = np.dtype(file.byteorder + self.dtype.char).str
        block = (*(1 for name in axes if name not in "YXC"), *tile, *((extents["C"],) if channels else ()))
        self.chunks = (*block[: len(self.shape) - 1], extents["C"])
        return Placement(axes, dtype, shape, block, offsets)


def _sizes(ome: str | None, number: int) -> dict[str, str]:
    """Return how large a cell of an image is, and in which units, as its OME metadata say."""
    try:
        pixels = [one for one in ElementTree.fromstring(ome or "<none/>").iter() if one.tag.endswith("}Pixels")]
    except ElementTree.ParseError:
        return {}
    known = pixels[number].attrib if number < len(pixels) else {}
    return {name: value for name, value in known.items() if name.startswith("PhysicalSize")}


def _chunk(key: Any) -> tuple[int, ...]:
    """Return what is decoded at once of a page, on tifffile's five axes."""
    depth, length, width = 1, key.rowsperstrip, key.imagewidth
    if key.is_tiled:
        depth, length, width = key.tiledepth, key.tilelength, key.tilewidth
    return (1, depth, min(length, key.shaped[2]), width, key.shaped[4])


def require_one_file(path: Path, ome: str | None) -> None:
    """Refuse an OME-TIFF whose pages lie in several files: what it names may lie anywhere."""
    with suppress(ElementTree.ParseError):
        root = ElementTree.fromstring(ome or "<none/>")
        parts = {(one.text, one.get("FileName")) for one in root.iter() if one.tag.endswith("}UUID")}
        if len({uuid for uuid, _ in parts} | ({root.attrib["UUID"]} if parts and "UUID" in root.attrib else set())) > 1:
            raise DataError(f"{path}: is one of several files of an OME-TIFF; write the image into one file")
