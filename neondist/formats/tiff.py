"""TIFF, BigTIFF, OME-TIFF, GeoTIFF and slide-scanner pyramids, with tifffile; only tiles in the box are decoded."""

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
from .ome import axes_in, planes_of, sizes_for_xml
from .placed import PlacedSink, Placement, read_placed
from .tiff_segments import Segments
from .tiff_tags import GEOREFERENCE, check_colours, check_pages, check_side_file, facts_of, nodata_of, rename_axes
from .tiles import default_chunks

_NAMES = {"I": "Z", "Q": "Z", "R": "N"}
"""tifffile's letters for pages of unknown meaning, which `neondist data convert` takes as depth"""
_ORIENTATION, _FLIPPED_Y, _FLIPPED_X, _TRANSPOSED = 274, (3, 4, 6, 7), (2, 3, 7, 8), (5, 6, 7, 8)
_MAX_PLANES = 1_000_000
_MASK = 4  # a bit of the page's subfile type
_SILENT = logging.NullHandler()  # otherwise Python prints tifffile's warnings about unusual files


class TIFFSource(TileSource):
    """Image of a TIFF file: the first, or that with the number after the colon; levels are those of its pyramid.

    Cells of floating-point images that are GDAL's nodata, or excluded by a mask (in the file, or FILE.msk), are NaN, as
    in NetCDF; integers are not converted. Images are rotated according to their orientation tag.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        import tifffile

        logging.getLogger("tifffile").addHandler(_SILENT)  # adding it again does nothing
        self._mask: TIFFSource | None = None
        with faults(path):
            self._opened = open_regular(path)
            try:
                self._file = tifffile.TiffFile(self._opened, _multifile=False)
                check_ome(path, self._file.ome_metadata)
                self._open(path, inside, level, axes)
            except BaseException:
                self._release()
                raise

    def _open(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        images = self._file.series
        if not (inside or "0").isdecimal() or int(inside or 0) >= len(images):
            raise DataError(f"{path}: has no image '{inside}'; give a number below {len(images)}")
        number = int(inside or 0)
        levels = images[number].levels
        level = min(level, len(levels) - 1)
        series = levels[level]
        key = series.keyframe
        self._key: Any = key
        check_colours(path, key)
        self._pages: list[Any] = list(series)
        self._segments = Segments(path, key, series.dtype)
        check_pages(path, key, self._pages)
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
            raise DataError(f"{path}: has {len(self._pages)} pages for an image of shape {list(series.shape)}")
        self._leading = leading
        shape = (*leading, *(key.shaped[axis] for axis in self._within))
        chunks: tuple[int, ...] | None = (*(1 for _ in leading), *(self._segments.chunk[axis] for axis in self._within))
        missing = nodata_of(path, levels[0].keyframe) if series.dtype.kind in "fiu" else None
        self._missing = missing if series.dtype.kind == "f" else None
        self._fill_value = _fill_value(missing, series.dtype)
        self._place = self._placement(outer + inner, shape, series)
        if self._place is not None:
            chunks = None
        else:
            self._segments.check()
        stored, orientation = outer + inner, key.tags[_ORIENTATION].value if _ORIENTATION in key.tags else 1
        named = list(axes or stored)
        if orientation in _TRANSPOSED and len(named) == len(stored):
            y, x = stored.index("Y"), stored.index("X")
            named[y], named[x] = named[x], named[y]
        flips = (("Y", _FLIPPED_Y), ("X", _FLIPPED_X))
        self._flipped = [stored.index(axis) for axis, codes in flips if orientation in codes]
        masks, facts = _masks(images, number), facts_of(self._file, path, number, level)
        facts = rename_axes(facts, stored, "".join(named), orientation) | ({"mask": None} if masks else {})
        name = f"{path}:{inside}" if inside else str(path)
        super().__init__(name, "".join(named), shape, series.dtype, chunks, len(levels), facts, named=axes is not None)
        if series.dtype.kind == "f":
            check_side_file(path)
            self._open_mask(path, masks[:1] or number, level, axes, upright=orientation == 1)

    def _open_mask(self, path: Path, image: list[int] | int, level: int, axes: str | None, upright: bool) -> None:
        """Open the mask of the image: [its number] in the file, or FILE.msk if the image, by number, is the first."""
        axes, side = axes and axes.replace("C", ""), path.with_name(path.name + ".msk")
        if isinstance(image, list):
            self._mask = TIFFSource(path, str(image[0]), level, axes)
        elif image == 0 and side.is_file():
            self._mask = TIFFSource(side, "", level, axes)
        if self._mask is not None:
            fits = self._mask.shape[:-1] == self.shape[:-1] and self._mask.shape[-1] in (1, self.shape[-1])
            if not (fits and upright):
                raise DataError(
                    f"{path}: its mask, of {list(self._mask.shape)} cells, does not match its image of"
                    f" {list(self.shape)}; open level 0, or write the image without the mask"
                )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._release()

    def _release(self) -> None:
        self._opened.close()
        if self._mask is not None:
            self._mask.close()

    def _decode(self, cells: Cells) -> np.ndarray:
        array = super()._decode(cells)
        if self._mask is not None:
            channels = cells[-1] if self._mask.shape[-1] > 1 else slice(0, 1)
            array[np.broadcast_to(self._mask.read((*cells[:-1], channels)) == 0, array.shape)] = np.nan
        return array

    def _placement(self, axes: str, shape: tuple[int, ...], series: Any) -> Placement | None:
        """Return the placement of the cells, or None if they are compressed."""
        block = (*(1 for _ in self._leading), *shape[len(self._leading) :])
        dtype = np.dtype(self._file.byteorder + series.dtype.char).str
        if series.dataoffset is not None:
            return Placement(axes, dtype, shape, shape, (series.dataoffset,))
        if all(page is not None and page.is_final for page in self._pages):
            return Placement(axes, dtype, shape, block, tuple(page.dataoffsets[0] for page in self._pages))
        return None

    def _read(self, cells: Cells) -> np.ndarray:
        stored = list(cells)
        for axis in self._flipped:
            n = self.stored.to_stored(self.shape)[axis]
            stored[axis] = slice(n - cells[axis].stop, n - cells[axis].start)
        array = np.flip(self._read_stored(tuple(stored)), tuple(self._flipped))
        if self._missing is not None:
            array[_is_nodata(array, self._missing)] = np.nan
        return array

    def _read_stored(self, cells: Cells) -> np.ndarray:
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
        """Return cells of one page, on the five axes of tifffile's pages."""
        number = int(np.ravel_multi_index(place, self._leading)) if place else 0
        page, key, file = self._pages[number], self._key, self._file.filehandle
        out = np.full([cut.stop - cut.start for cut in box], self._fill_value, self.dtype)
        if page is None:
            return out
        chunk = self._segments.chunk
        counts = [ceil(n / c) for n, c in zip(key.shaped, chunk, strict=True)]
        for at in product(*(range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(box, chunk, strict=True))):
            index = int(np.ravel_multi_index(at, counts))
            offset, size = page.dataoffsets[index], page.databytecounts[index]
            if not size:
                continue  # was never written
            if size > min(file.size, LARGEST_CHUNK):
                raise DataError(f"{self.path}: a tile of {size} bytes exceeds the file size")
            file.seek(offset)
            data = file.read(size)
            if len(data) != size:
                raise DataError(f"{self.path}: ends early; restore it from a good copy")
            tile, corner, extents = self._segments.decode(data, index, page)
            if tile is None:
                continue
            target, source = [], []
            for cut, lo, n in zip(box, corner, (1, *extents), strict=True):
                start, stop = max(cut.start, lo), min(cut.stop, lo + n)
                target.append(slice(start - cut.start, stop - cut.start))
                source.append(slice(start - lo, stop - lo))
            out[tuple(target)] = tile[None][tuple(source)]
        return out


class TIFFSink(PlacedSink):
    """New tiled BigTIFF, or OME-TIFF if named so, with the georeference of the `like` image."""

    def _lay_out(self, part: Path, like: TileSource | None) -> Placement:
        import tifffile

        extents = dict(zip(self.axes, self.shape, strict=True))
        if not {"Y", "X"} <= set(self.axes):
            raise ConfigError(f"{self.path}: TIFF files hold images; axes '{self.axes}' have no Y and X")
        chunks = dict(zip(self.axes, self.chunks or default_chunks(self.shape, self.axes, self.dtype), strict=True))
        tile = tuple(ceil(chunks[name] / 16) * 16 for name in "YX")
        channels = extents["C"] > 1
        axes, shape = self.axes[: None if channels else -1], self.shape[: None if channels else -1]
        rgb = extents["C"] in (3, 4) and self.dtype in (np.uint8, np.uint16)
        ome = self.path.name.lower().endswith((".ome.tif", ".ome.tiff"))
        if ome and "N" in axes:
            raise ConfigError(f"{self.path}: OME-TIFF has no axis for samples; name it T, or Z")
        place, tags, calibration = self._copy_metadata(like, "georeference") or {}, dict[str, Any](), dict[str, Any]()
        if resolution := self._copy_metadata(like, "resolution"):
            tags = {"resolution": resolution[:2], "resolutionunit": resolution[2]}
        if ome and like is not None:
            calibration = sizes_for_xml(like.metadata.get("scale", {}), like.metadata.get("units", {}))
            for name in ("scale", "units"):
                self._copy_metadata(like, name, axes_in(calibration))
            if date := self._copy_metadata(like, "AcquisitionDate"):
                calibration["AcquisitionDate"] = date
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
                **calibration,
                # tifffile's would be random; equal cells make equal files
                **({"UUID": str(uuid5(NAMESPACE_OID, f"{self.path.name} {shape} {self.dtype}"))} if ome else {}),
            },
            extratags=[
                (code, kind, 0 if kind == "s" else np.size(place[code]), place[code], True)
                for code, kind in GEOREFERENCE.items()
                if code in place
            ],
            **tags,
        )
        with tifffile.TiffFile(part) as file:
            offsets = tuple(offset for page in file.pages for offset in page.dataoffsets)
            dtype = np.dtype(file.byteorder + self.dtype.char).str
        block = (*(1 for name in axes if name not in "YXC"), *tile, *((extents["C"],) if channels else ()))
        self.chunks = (*block[: len(self.shape) - 1], extents["C"])
        return Placement(axes, dtype, shape, block, offsets)


def _masks(images: Any, number: int) -> list[int]:
    """Return the numbers of the masks of an image: mask pages of the same size that follow it directly."""
    key, masks = images[number].keyframe, list[int]()
    for at, image in enumerate(images[number + 1 :], number + 1):
        if (image.keyframe.imagelength, image.keyframe.imagewidth) == (key.imagelength, key.imagewidth):
            if not image.keyframe.subfiletype & _MASK:
                break
            masks.append(at)
    return [] if key.subfiletype & _MASK else masks


def _fill_value(missing: float | None, dtype: np.dtype) -> Any:
    """Return GDAL's value of unwritten cells: nodata, rounded to integers and clipped to their range."""
    if dtype.kind == "f":
        return 0 if missing is None else np.nan
    if dtype.kind == "b" or missing is None or np.isnan(missing):
        return 0
    whole = np.floor(abs(missing) + 0.5) * np.sign(missing)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return most if whole >= most else least if whole <= least else int(whole)


def _is_nodata(cells: np.ndarray, missing: float) -> np.ndarray:
    """Return a mask of the cells that GDAL takes as nodata: equal to 7 digits, in the image's precision."""
    kind = np.result_type(cells.dtype, np.float32).type
    with np.errstate(over="ignore", invalid="ignore"):
        number, values = kind(missing), cells.astype(kind, copy=False)
        tolerance = 2 * kind(np.finfo(np.float32).eps) * np.abs(values + number)
        return np.asarray((values == number) | (np.abs(values - number) < tolerance))


def check_ome(path: Path, ome: str | None) -> None:
    """Refuse an OME-TIFF of several files, or of too many planes, all of which tifffile would list."""
    with suppress(ElementTree.ParseError):
        root = ElementTree.fromstring(ome or "<none/>")
        parts = {(one.text, one.get("FileName")) for one in root.iter() if one.tag.endswith("}UUID")}
        if len({uuid for uuid, _ in parts} | ({root.attrib["UUID"]} if parts and "UUID" in root.attrib else set())) > 1:
            raise DataError(f"{path}: is part of an OME-TIFF of several files; write the image into one file")
        count = max(planes_of(one.attrib) for one in root.iter())
        if count > _MAX_PLANES:
            raise DataError(
                f"{path}: its OME-XML specifies {count:.0f} planes, but at most {_MAX_PLANES:,} are supported;"
                " correct it"
            )
