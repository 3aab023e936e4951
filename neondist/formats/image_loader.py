"""Conversion of image files to arrays with Pillow, without silent loss of information.

Pillow maps many pixel formats to a few: it reduces 16-bit colour to 8 bits, clips values at 255, and turns a palette of
4 classes into grey levels. Conversions that would lose values are rejected.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, UserError
from ..io.regular_file import open_regular
from ..system.memory import require_memory

IMAGE_SUFFIXES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".gif", ".webp")
_BYTE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_KEPT_MODES = ("L", "LA", "RGB", "RGBA", *_WIDE_MODES)
_MODE_WITH_ALPHA = {"L": "LA", "P": "RGBA", "PA": "RGBA", "RGB": "RGBA"}
_ORIENTATION, _SAMPLE_FORMAT, _SAMPLE_BITS = 274, 339, 258  # tags of EXIF and TIFF
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
_LAYOUT_TAGS = (*range(254, 270), *range(273, 282), 284, 317, 322, 323, 324, 325, 338, _SAMPLE_FORMAT)
"""TIFF tags for the pixel layout, which Pillow includes in EXIF"""
_INCH_UNIT_CODE = 2  # TIFF's code for the unit of resolution
_METADATA_NAMES = {"icc_profile": "colour profile", "comment": "comment", "gamma": "gamma"}
_UNSIGNED_FORMAT, _SIGNED_FORMAT = 1, 2
_PILLOW_LOCK = threading.Lock()  # Pillow's pixel limit and Python's warnings are process-wide; ranks may be threads
_SILENT_HANDLER = logging.NullHandler()  # otherwise Python prints Pillow's log messages before an error
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_IMAGE_COPIES_IN_MEMORY = 3  # copies while an image is decoded, converted to an array, and written


@dataclass(frozen=True)
class ImageLoader:
    """Conversion of an image file to an array.

    Attributes
    ----------
    mode : 'L', 'RGB', 'RGBA', or None to keep the mode of the image
    size : (H, W) to which images are scaled, or None to keep their sizes
    """

    mode: str | None = None
    size: tuple[int, int] | None = None

    def load(self, path: Path) -> np.ndarray:
        """Return an image (H, W, C), or the pages of a TIFF file as a volume (D, H, W, C).

        Raises
        ------
        DataError
            If the file is damaged, not an image or too large for this machine, or values would be lost.
        """
        from PIL import ImageSequence

        with _open_pillow_image(path, self.size) as image:
            num_pages = getattr(image, "n_frames", 1)
            if image.format == "TIFF" and num_pages > 1:
                _require_memory(path, image.size if self.size is None else self.size, 4, num_pages)
                return np.stack([_to_array(self._convert_image(path, page)) for page in ImageSequence.Iterator(image)])
            return _to_array(self._convert_image(path, image))

    def load_labels(self, path: Path) -> np.ndarray:
        """Return a class map (H, W): the stored values, or palette indices; DataError if reading would change them."""
        from PIL import Image

        with _open_pillow_image(path, self.size) as image:
            if image.mode not in ("1", "L", "P", *_WIDE_MODES):
                raise DataError(
                    f"{path}: a class map has one channel, but this image is {image.mode}; save the class indices"
                )
            if image.format in ("JPEG", "MPO"):
                raise DataError(
                    f"{path}: JPEG is lossy and changes class indices; recreate the map, and save it as PNG"
                )
            raw_mode = _raw_mode(image)
            if image.format == "PPM" and image.tile[0].codec_name != "raw":
                raise DataError(
                    f"{path}: reading this PPM file can rescale its class indices, as it is a text file, or the maximum"
                    " in its header is not 255 or 65535; recreate the map, and save it as PNG"
                )
            if image.mode == "L" and ";" in raw_mode:  # 'L;4', 'L;I': grey levels, which Pillow stretches or inverts
                raise DataError(f"{path}: its values are grey levels ({raw_mode}); save the map with 8 bits per pixel")
            image = _apply_orientation(image, path)
            size = image.size if self.size is None else self.size[::-1]
            array = np.asarray(image if image.size == size else image.resize(size, Image.Resampling.NEAREST))
        return array.astype(np.uint8) if array.dtype == bool else array.astype(array.dtype.newbyteorder("="))

    def load_pillow_image(self, path: Path) -> Any:
        """Return an image as a Pillow image; DataError as for `load`, or if there are several pages."""
        with _open_pillow_image(path, self.size) as image:
            if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
                raise DataError(f"{path}: has several pages; save each as an image")
            return self._convert_image(path, image).copy()

    def extents(self, path: Path) -> tuple[int, int]:
        """Return (H, W) of an image before it is scaled, without decoding it; DataError if it is invalid."""
        with _open_pillow_image(path, self.size) as image:
            # for TIFF, Pillow returns the extents after rotation
            is_sideways = image.format != "TIFF" and _read_exif(image).get(_ORIENTATION, 1) in _SIDEWAYS_ORIENTATIONS
            return image.size if is_sideways else image.size[::-1]

    def shape_and_dtype(self, path: Path) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype of the result of `load` without `mode` and `size`; only TIFF files are decoded."""
        with _open_pillow_image(path, None) as image:
            if image.format != "TIFF":
                _check_bit_depth(path, image)
                mode = self._default_mode(path, image)
                is_sideways = _read_exif(image).get(_ORIENTATION, 1) in _SIDEWAYS_ORIENTATIONS
                width, height = image.size[::-1] if is_sideways else image.size
                type_code = {"I": "i4", "F": "f4"}.get(mode, "u2" if mode in _WIDE_MODES else "u1")
                return (height, width, 1 if mode in _WIDE_MODES else len(mode)), np.dtype(type_code)
        cells = self.load(path)
        return cells.shape, cells.dtype

    def embedded_metadata(self, path: Path) -> dict[str, Any]:
        """Return the metadata in an image file: resolution, EXIF, colour profile, texts."""
        with _open_pillow_image(path, None) as image:
            info = image.info
            metadata = {name: info[key] for key, name in _METADATA_NAMES.items() if info.get(key)}
            dpi = info.get("dpi", ())
            if len(dpi) == 2 and min(dpi) > 0:
                metadata["resolution"] = (float(dpi[0]), float(dpi[1]), _INCH_UNIT_CODE)
            metadata |= {f"text '{name}'": value for name, value in info.items() if isinstance(value, str)}
            exif = {tag: value for tag, value in _read_exif(image).items() if tag not in (_ORIENTATION, *_LAYOUT_TAGS)}
            return metadata | ({"EXIF": exif} if exif else {})

    def _default_mode(self, path: Path, image: Any) -> str:
        mode = image.mode
        target_mode = (
            _MODE_WITH_ALPHA.get(mode, mode) if image.has_transparency_data else {"1": "L", "P": "RGB"}.get(mode, mode)
        )
        if target_mode not in _KEPT_MODES:
            raise DataError(f"{path}: has {mode} pixels; convert them (--mode RGB), or save them as RGB")
        return str(target_mode)

    def _convert_image(self, path: Path, image: Any) -> Any:
        _check_bit_depth(path, image)
        image = _apply_orientation(image, path)
        mode, is_transparent = image.mode, image.has_transparency_data
        if self.mode is None:
            target_mode = self._default_mode(path, image)
        else:
            target_mode = self.mode
            if mode in _WIDE_MODES:
                raise DataError(
                    f"{path}: has {mode} pixels, with values beyond the 8 bits of mode {self.mode}; leave the"
                    " mode out, or scale the values to 0 ... 255 yourself"
                )
            if is_transparent and target_mode != "RGBA":
                image = image.convert("RGBA")
                if image.getextrema()[-1][0] < 255:
                    raise DataError(
                        f"{path}: has transparent pixels, which mode {target_mode} would lose; use mode RGBA, or"
                        " composite the image on a background yourself"
                    )
        image = image if image.mode == target_mode else image.convert(target_mode)
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1])
        return image


def image_files_in(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name; DataError if it has none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        nested = next((path for path in folder.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES), None)
        remedy = "give a folder with images"
        if nested is not None:
            remedy = f"give a subfolder or, for the images of a data set, the pattern '{folder}/*/*{nested.suffix}'"
        raise DataError(f"{folder}: has no images ({', '.join(IMAGE_SUFFIXES)}); {remedy}")
    return paths


def _to_array(image: Any) -> np.ndarray:
    array = np.asarray(image)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.ndim == 3 else array[..., None]


def _raw_mode(image: Any) -> str:
    """Return Pillow's raw mode, which describes the pixels in the file; '' if unknown."""
    decoder_args = image.tile[0].args if image.tile else ""
    first = decoder_args[0] if isinstance(decoder_args, tuple) and decoder_args else decoder_args
    return first if isinstance(first, str) else ""


def _check_bit_depth(path: Path, image: Any) -> None:
    """Raise DataError for pixels whose values Pillow would truncate."""
    raw, tags = _raw_mode(image), getattr(image, "tag_v2", {})
    args = image.tile[0].args if image.tile else ()
    max_value = args[1] if image.format == "PPM" and isinstance(args, tuple) and len(args) > 1 else 0
    # BGR;16 has 5 or 6 bits per channel
    if image.mode in _BYTE_MODES and ((";16" in raw and raw != "BGR;16") or max_value > 255):
        raise DataError(
            f"{path}: has 16 bits per channel, of which only 8 would be kept; save it as .npy, or with 8 bits"
        )
    if ";64" in raw:
        raise DataError(f"{path}: has 64-bit values, of which only 32 bits would be kept; save it as .npy")
    if raw in ("I;32", "I;32N", "I;32B") and tags.get(_SAMPLE_FORMAT, (_UNSIGNED_FORMAT,))[0] == _UNSIGNED_FORMAT:
        if image.getextrema()[0] < 0:
            raise DataError(f"{path}: has values above 2147483647, which would turn negative; save it as .npy")
    elif tags.get(_SAMPLE_FORMAT, (_UNSIGNED_FORMAT,))[0] == _SIGNED_FORMAT and tags.get(_SAMPLE_BITS, (16,))[0] <= 8:
        raise DataError(f"{path}: has signed 8-bit values, which would lose their sign; save it as .npy")
    if image.format == "TIFF" and raw.endswith("X"):
        raise DataError(f"{path}: has channels {raw}, of which X would be lost on reading; save it as .npy")


def _read_exif(image: Any) -> Any:
    """Return the EXIF data of an open image; Pillow alone would decode every PNG file to find data after the pixels."""
    from PIL import Image

    if image.format != "PNG" or "exif" in image.info or _has_metadata_after_pixels(image.fp):
        return image.getexif()
    return Image.Image.getexif(image)


def _has_metadata_after_pixels(file: Any) -> bool:
    """Return whether a PNG file has EXIF data or texts after its pixels."""
    position, seen_pixels = file.tell(), False
    file.seek(len(_PNG_SIGNATURE))
    while len(head := file.read(8)) == 8:
        chunk_type = head[4:]
        if seen_pixels and chunk_type in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            break
        seen_pixels |= chunk_type == b"IDAT"
        file.seek(int.from_bytes(head[:4], "big") + 4, 1)  # content and checksum
    file.seek(position)
    return len(head) == 8


def _apply_orientation(image: Any, path: Path) -> Any:
    from PIL import ImageOps

    image.load()
    return ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) != 1 else image


def _require_memory(path: Path, size: tuple[int, ...], channels: int, pages: int = 1) -> None:
    """Reject images that do not fit in memory, based on their extents."""
    extents_text = " x ".join(map(str, size)) + (f" x {pages} pages" if pages > 1 else "")
    needed = prod(size) * channels * pages * _IMAGE_COPIES_IN_MEMORY
    require_memory(
        needed, f"{path}: an image of {extents_text}", "split it into smaller images, or use a machine with more memory"
    )


@contextmanager
def _open_pillow_image(path: Path, target_size: tuple[int, int] | None) -> Iterator[Any]:
    """Open an image of one frame or of several pages that fits in memory; convert errors into DataError."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow; install it with: pip install pillow (or neondist[images])") from None
    logging.getLogger("PIL").addHandler(_SILENT_HANDLER)  # adding it again does nothing
    # given a name, Pillow would memory-map the file, which crashes on truncated images and scrambles rotated images
    with (
        _PILLOW_LOCK,
        _convert_decode_errors(path),
        open_regular(path) as file,
        warnings.catch_warnings(),
        _without_pixel_limit(Image),
    ):
        # invalid tags of a TIFF file may change its pixels; a wrong date in a JPEG does not matter
        warnings.simplefilter("error" if file.read(2) in (b"II", b"MM") else "ignore", UserWarning)
        file.seek(0)
        with Image.open(file) as image:
            for extents in (image.size, target_size or ()):
                if extents:
                    _require_memory(path, extents, 1 if image.mode in ("1", "L") else 4)
            frames = 1 if image.format in ("TIFF", "MPO") else getattr(image, "n_frames", 1)
            if frames > 1:
                raise DataError(f"{path}: has {frames} frames, of which only one would be kept; save each as an image")
            yield image


@contextmanager
def _without_pixel_limit(module: Any) -> Iterator[None]:
    """Let Pillow read images of any size, limited only by the machine's memory."""
    limit, module.MAX_IMAGE_PIXELS = module.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        module.MAX_IMAGE_PIXELS = limit


@contextmanager
def _convert_decode_errors(path: Path) -> Iterator[None]:
    """Convert exceptions and warnings of Pillow on damaged images into DataError; a UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise DataError(f"{path}: not enough memory to decode it; split it into smaller images") from error
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, LookupError, ArithmeticError, RuntimeError,
            AttributeError, UserWarning) as error:  # fmt: skip
        reason = " ".join(str(error).partition("<")[0].split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read as an image ({reason}); replace or remove it") from error
