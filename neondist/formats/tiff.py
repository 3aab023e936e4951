"""TIFF, BigTIFF, OME-TIFF, GeoTIFF and slide-scanner pyramids, with tifffile; reads decode only the tiles of a box."""

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
from ..system.memory import format_bytes
from ..terminal.console import counted
from .axes import Cells
from .base import MAX_CHUNK_BYTES, TileSource, convert_read_errors
from .in_place import CellLayout, InPlaceSink, read_cells_in_place
from .ome import axes_with_sizes, largest_declared_plane_count, sizes_for_xml
from .tiff_segments import SegmentDecoder
from .tiff_tags import (
    CENTIMETER_UNIT_CODE,
    GEOREFERENCE_TAGS,
    affine_of_georeference,
    check_colour_space,
    check_same_page_tags,
    check_side_file_nodata,
    image_metadata,
    nodata_value,
    rename_metadata_axes,
    resolution_from_sizes,
)
from .tiles import default_chunks

_UNNAMED_PAGES = "IQ"
_RENAMED_AXES = {"I": "Z", "Q": "Z", "R": "N"}
"""tifffile's letters for pages without a name, which are treated as depth, and for samples"""
_ORIENTATION, _FLIPPED_Y, _FLIPPED_X, _TRANSPOSED = (274, (3, 4, 6, 7), (2, 3, 7, 8), (5, 6, 7, 8))
_MAX_PLANES, _NON_OME_DTYPES = 1_000_000, ("float16", "int64", "uint64")
_MASK_SUBFILE_BIT = 4  # a bit of the page's subfile type
_SILENT_HANDLER = logging.NullHandler()  # otherwise Python prints tifffile's warnings about unusual files


class TIFFSource(TileSource):
    """Image in a TIFF file, by default the first ('FILE:1' is the second), with the resolution levels of its pyramid.

    In floating-point images, cells that have GDAL's nodata value, or are excluded by a mask (in the file, or FILE.msk),
    become NaN, as in NetCDF; integers are not converted. Images are rotated according to their orientation tag.
    """

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        import tifffile

        logging.getLogger("tifffile").addHandler(_SILENT_HANDLER)  # adding it again does nothing
        self._mask_source: TIFFSource | None = None
        with convert_read_errors(path):
            self._binary_file = open_regular(path)
            try:
                self._tiff = tifffile.TiffFile(self._binary_file, _multifile=False)
                check_ome_xml(path, self._tiff.ome_metadata)
                self._open_image(path, name_in_file, level, axes)
            except BaseException:
                self._close_files()
                raise

    def _open_image(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        images = self._tiff.series
        if not images:
            raise DataError(f"{path}: contains no image; restore it from a good copy")
        if not (name_in_file or "0").isdecimal() or int(name_in_file or 0) >= len(images):
            raise DataError(
                f"{path}: has no image '{name_in_file}'; specify an image number from 0 to {len(images) - 1}"
            )
        image_number = int(name_in_file or 0)
        levels = images[image_number].levels
        level = min(level, len(levels) - 1)
        series = levels[level]
        keyframe = series.keyframe
        self._keyframe: Any = keyframe
        check_colour_space(path, keyframe)
        self._pages: list[Any] = list(series)
        self._decoder = SegmentDecoder(path, keyframe, series.dtype)
        check_same_page_tags(path, keyframe, self._pages)
        leading_shape: list[int] = []
        names = ["C" if keyframe.shaped[0] > 1 else "", "Z" if keyframe.shaped[1] > 1 else "", "Y", "X"]
        self._page_axes = [axis for axis, name in enumerate([*names, "C" if keyframe.shaped[4] > 1 else ""]) if name]
        inner = "".join(names) + "C" * (keyframe.shaped[4] > 1)
        series_axes = list(zip(series.get_axes(False), series.get_shape(False), strict=True))
        num_pages = prod(n for _, n in series_axes) // prod(keyframe.shaped)
        outer, axes_known = "", True
        while prod(leading_shape) < num_pages and series_axes:
            name, n = series_axes.pop(0)
            if n > 1:
                axes_known &= name not in _UNNAMED_PAGES
                name = _RENAMED_AXES.get(name, name)
                outer += next(letter for letter in name + "NTMLKJ" if letter not in inner + outer)
                leading_shape.append(n)
        if prod(leading_shape) != num_pages:
            pages = f"{counted(len(self._pages), 'page')} for an image of shape {list(series.shape)}"
            raise DataError(f"{path}: has {pages}; restore it from a good copy")
        self._leading_shape = leading_shape
        shape = (*leading_shape, *(keyframe.shaped[axis] for axis in self._page_axes))
        segment = self._decoder.segment_shape
        chunks: tuple[int, ...] | None = (*(1 for _ in leading_shape), *(segment[axis] for axis in self._page_axes))
        nodata = nodata_value(path, levels[0].keyframe) if series.dtype.kind in "fiu" else None
        self._nodata = nodata if series.dtype.kind == "f" else None
        self._value_of_unwritten_cells = _value_of_unwritten_cells(nodata, series.dtype)
        self._cell_layout = self._find_cell_layout(outer + inner, shape, series)
        if self._cell_layout is not None:
            chunks = None
        else:
            self._decoder.require_decodable()
        stored = outer + inner
        orientation = keyframe.tags[_ORIENTATION].value if _ORIENTATION in keyframe.tags else 1
        axis_letters = list(axes or stored)
        if orientation in _TRANSPOSED and len(axis_letters) == len(stored):
            y, x = stored.index("Y"), stored.index("X")
            axis_letters[y], axis_letters[x] = axis_letters[x], axis_letters[y]
        flip_codes = (("Y", _FLIPPED_Y), ("X", _FLIPPED_X))
        self._flipped_axes = [stored.index(axis) for axis, codes in flip_codes if orientation in codes]
        masks, metadata = _mask_numbers(images, image_number), image_metadata(self._tiff, path, image_number, level)
        metadata = rename_metadata_axes(metadata, stored, "".join(axis_letters), orientation) | (
            {"mask": None} if masks else {}
        )
        name = f"{path}:{name_in_file}" if name_in_file else str(path)
        axes_known |= axes is not None or "C" in stored  # other unnamed pages may be samples, depth or channels
        super().__init__(
            name, "".join(axis_letters), shape, series.dtype, chunks, len(levels), metadata, axes_given=axes_known
        )
        if series.dtype.kind == "f":
            check_side_file_nodata(path)
            self._open_mask(path, masks[:1] or image_number, level, axes, is_upright=orientation == 1)

    def _open_mask(self, path: Path, image: list[int] | int, level: int, axes: str | None, is_upright: bool) -> None:
        """Open the mask of an image, if any: number `image[0]` in the file, or FILE.msk if `image` is 0."""
        axes, mask_file = axes and axes.replace("C", ""), path.with_name(path.name + ".msk")
        if isinstance(image, list):
            self._mask_source = TIFFSource(path, str(image[0]), level, axes)
        elif image == 0 and mask_file.is_file():
            self._mask_source = TIFFSource(mask_file, "", level, axes)
        if self._mask_source is not None:
            if not is_upright:
                raise DataError(
                    f"{path}: masks of rotated or mirrored images are not supported; write the image with orientation"
                    " 1, or without the mask"
                )
            *extent, channels = self._mask_source.shape
            if tuple(extent) != self.shape[:-1] or channels not in (1, self.shape[-1]):
                raise DataError(
                    f"{path}: its mask, of {list(self._mask_source.shape)} cells, does not match its image of"
                    f" {list(self.shape)}; open level 0, or write the image without the mask"
                )

    def close(self) -> None:
        """Close the file."""
        self._tiff.close()
        self._close_files()

    def _close_files(self) -> None:
        self._binary_file.close()
        if self._mask_source is not None:
            self._mask_source.close()

    def _read_channels_last(self, cells: Cells) -> np.ndarray:
        array = super()._read_channels_last(cells)
        if self._mask_source is not None:
            channels = cells[-1] if self._mask_source.shape[-1] > 1 else slice(0, 1)
            array[np.broadcast_to(self._mask_source.read((*cells[:-1], channels)) == 0, array.shape)] = np.nan
        return array

    def _find_cell_layout(self, axes: str, shape: tuple[int, ...], series: Any) -> CellLayout | None:
        """Return the layout of the cells, or None if they are compressed or not contiguous."""
        block = (*(1 for _ in self._leading_shape), *shape[len(self._leading_shape) :])
        dtype = np.dtype(self._tiff.byteorder + series.dtype.char).str
        if series.dataoffset is not None:
            return CellLayout(axes, dtype, shape, shape, (series.dataoffset,))
        if all(page is not None and page.is_final for page in self._pages):
            return CellLayout(axes, dtype, shape, block, tuple(page.dataoffsets[0] for page in self._pages))
        return None

    def affine(self) -> np.ndarray | None:
        """Return the affine of the georeference."""
        return affine_of_georeference(self.metadata.get("georeference", {}))

    def _read(self, cells: Cells) -> np.ndarray:
        stored_cells = list(cells)
        for axis in self._flipped_axes:
            n = self.stored_axes.to_stored_order(self.shape)[axis]
            stored_cells[axis] = slice(n - cells[axis].stop, n - cells[axis].start)
        array = np.flip(self._read_stored(tuple(stored_cells)), tuple(self._flipped_axes))
        if self._nodata is not None:
            array[_nodata_mask(array, self._nodata)] = np.nan
        return array

    def _read_stored(self, cells: Cells) -> np.ndarray:
        file = self._tiff.filehandle
        if self._cell_layout is not None:
            return read_cells_in_place(file, self.path, self._cell_layout, cells)
        outer, page_cells = cells[: len(self._leading_shape)], cells[len(self._leading_shape) :]
        page_box = [slice(0, n) for n in self._keyframe.shaped]
        for axis, cut in zip(self._page_axes, page_cells, strict=True):
            page_box[axis] = cut
        pages = [self._read_page(index, page_box) for index in product(*(range(cut.start, cut.stop) for cut in outer))]
        return np.stack(pages).reshape([cut.stop - cut.start for cut in cells])

    def _read_page(self, page_index: tuple[int, ...], box: list[slice]) -> np.ndarray:
        """Return cells of one page, with the five axes of tifffile's pages."""
        page_number = int(np.ravel_multi_index(page_index, self._leading_shape)) if page_index else 0
        page, keyframe, file = self._pages[page_number], self._keyframe, self._tiff.filehandle
        out = np.full([cut.stop - cut.start for cut in box], self._value_of_unwritten_cells, self.dtype)
        if page is None:
            return out
        segment = self._decoder.segment_shape
        segment_counts = [ceil(n / c) for n, c in zip(keyframe.shaped, segment, strict=True)]
        for at in product(*(range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(box, segment, strict=True))):
            segment_index = int(np.ravel_multi_index(at, segment_counts))
            offset, size = page.dataoffsets[segment_index], page.databytecounts[segment_index]
            if not size:
                continue  # the tile was never written
            if size > file.size:
                raise DataError(f"{self.path}: a tile of {size} bytes exceeds the file; restore it from a good copy")
            if size > MAX_CHUNK_BYTES:
                raise DataError(
                    f"{self.path}: has a tile of {format_bytes(size)}, but at most {format_bytes(MAX_CHUNK_BYTES)} can"
                    " be decoded at once; rewrite the file with tiles of about 1 MB"
                )
            file.seek(offset)
            data = file.read(size)
            if len(data) != size:
                raise DataError(f"{self.path}: ends early; restore it from a good copy")
            tile, corner, extents = self._decoder.decode(data, segment_index, page)
            if tile is None:
                continue
            target, source = [], []
            for cut, lo, n in zip(box, corner, (1, *extents), strict=True):
                start, stop = max(cut.start, lo), min(cut.stop, lo + n)
                target.append(slice(start - cut.start, stop - cut.start))
                source.append(slice(start - lo, stop - lo))
            out[tuple(target)] = tile[None][tuple(source)]
        return out


class TIFFSink(InPlaceSink):
    """New tiled BigTIFF with the georeference of the `like` image; OME-TIFF if the suffix is .ome.tif."""

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        import tifffile

        extents = dict(zip(self.axes, self.shape, strict=True))
        if not {"Y", "X"} <= set(self.axes):
            raise ConfigError(f"{self.path}: TIFF files need axes Y and X, not '{self.axes}'; choose .npy or .h5")
        if extents["X"] == extents["C"] == 1 and len(self.axes) > 3:
            raise ConfigError(
                f"{self.path}: the TIFF library cannot write pages of one column, axes '{self.axes}', shape"
                f" {list(self.shape)}; choose .npy or .h5"
            )
        chunks = dict(zip(self.axes, self.chunks or default_chunks(self.shape, self.axes, self.dtype), strict=True))
        tile = tuple(ceil(chunks[name] / 16) * 16 for name in "YX")
        has_channels = extents["C"] > 1
        axes, shape = self.axes[: None if has_channels else -1], self.shape[: None if has_channels else -1]
        is_rgb = extents["C"] in (3, 4) and self.dtype in (np.uint8, np.uint16)
        is_ome = self.path.name.lower().endswith((".ome.tif", ".ome.tiff"))
        if self.dtype.kind == "b" or (is_ome and self.dtype.name in _NON_OME_DTYPES):
            raise ConfigError(
                f"{self.path}: {'OME-TIFF' if is_ome else 'TIFF'} files cannot store {self.dtype}; choose another dtype"
            )
        if is_ome and "N" in axes:
            raise ConfigError(f"{self.path}: OME-TIFF has no axis for samples; name the axis T or Z")
        georeference = self._copy_metadata(like, "georeference") or {}
        tags, calibration = dict[str, Any](), dict[str, Any]()
        if resolution := self._copy_metadata(like, "resolution"):
            tags = {"resolution": resolution[:2], "resolutionunit": resolution[2]}
        elif like is not None and (counts := resolution_from_sizes(like.metadata)):
            tags = {"resolution": counts, "resolutionunit": CENTIMETER_UNIT_CODE}
            for name in ("scale", "units"):
                self._copy_metadata(like, name, "XY")
        if is_ome and like is not None:
            calibration = sizes_for_xml(like.metadata.get("scale", {}), like.metadata.get("units", {}))
            for name in ("scale", "units"):
                self._copy_metadata(like, name, axes_with_sizes(calibration))
            if date := self._copy_metadata(like, "AcquisitionDate"):
                calibration["AcquisitionDate"] = date
        tifffile.imwrite(
            draft,
            shape=shape,
            dtype=self.dtype,
            tile=tile,
            bigtiff=True,
            ome=is_ome,
            photometric="rgb" if is_rgb else "minisblack",
            planarconfig="contig" if has_channels else None,
            metadata={
                "axes": axes.replace("C", "S").replace("N", "R"),
                **calibration,
                # tifffile's UUID would be random, but equal cells must give equal files
                **({"UUID": str(uuid5(NAMESPACE_OID, f"{self.path.name} {shape} {self.dtype}"))} if is_ome else {}),
            },
            extratags=[
                (code, kind, 0 if kind == "s" else np.size(georeference[code]), georeference[code], True)
                for code, kind in GEOREFERENCE_TAGS.items()
                if code in georeference
            ],
            **tags,
        )
        with tifffile.TiffFile(draft) as file:
            offsets = tuple(offset for page in file.pages for offset in page.dataoffsets)
            dtype = np.dtype(file.byteorder + self.dtype.char).str
        block = (*(1 for name in axes if name not in "YXC"), *tile, *((extents["C"],) if has_channels else ()))
        self.chunks = (*block[: len(self.shape) - 1], extents["C"])
        return CellLayout(axes, dtype, shape, block, offsets)


def _mask_numbers(images: Any, image_number: int) -> list[int]:
    """Return the numbers of the masks of an image: masks of its size before the next image of its size."""
    keyframe, masks = images[image_number].keyframe, list[int]()
    for at, image in enumerate(images[image_number + 1 :], image_number + 1):
        if (image.keyframe.imagelength, image.keyframe.imagewidth) == (keyframe.imagelength, keyframe.imagewidth):
            if not image.keyframe.subfiletype & _MASK_SUBFILE_BIT:
                break
            masks.append(at)
    return [] if keyframe.subfiletype & _MASK_SUBFILE_BIT else masks


def _value_of_unwritten_cells(nodata: float | None, dtype: np.dtype) -> Any:
    """Return GDAL's value of unwritten cells: 0 without `nodata`; otherwise NaN, or clipped `nodata` for integers."""
    if dtype.kind == "f":
        return 0 if nodata is None else np.nan
    if dtype.kind == "b" or nodata is None or np.isnan(nodata):
        return 0
    rounded = np.floor(abs(nodata) + 0.5) * np.sign(nodata)
    min_value, max_value = np.iinfo(dtype).min, np.iinfo(dtype).max
    return max_value if rounded >= max_value else min_value if rounded <= min_value else int(rounded)


def _nodata_mask(cells: np.ndarray, nodata: float) -> np.ndarray:
    """Return a mask of the cells that GDAL treats as nodata: equal to `nodata` to 7 digits, in at least float32."""
    float_type = np.result_type(cells.dtype, np.float32).type
    with np.errstate(over="ignore", invalid="ignore"):
        number, values = float_type(nodata), cells.astype(float_type, copy=False)
        tolerance = 2 * float_type(np.finfo(np.float32).eps) * np.abs(values + number)
        return np.asarray((values == number) | (np.abs(values - number) < tolerance))


def check_ome_xml(path: Path, ome_xml: str | None) -> None:
    """Reject an OME-TIFF of several files, or with too many planes, all of which tifffile would list."""
    with suppress(ElementTree.ParseError):
        root = ElementTree.fromstring(ome_xml or "<none/>")
        files = {(one.text, one.get("FileName")) for one in root.iter() if one.tag.endswith("}UUID")}
        if len({uuid for uuid, _ in files} | ({root.attrib["UUID"]} if files and "UUID" in root.attrib else set())) > 1:
            raise DataError(f"{path}: is part of an OME-TIFF of several files; write the image into one file")
        count = max(largest_declared_plane_count(one.attrib) for one in root.iter())
        if count > _MAX_PLANES:
            raise DataError(
                f"{path}: its OME-XML specifies {count:.0f} planes, but at most {_MAX_PLANES:,} are supported;"
                " correct the OME-XML"
            )
