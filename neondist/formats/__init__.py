"""Readers and writers of image files: readers return any box of an array, and many ranks write a file box by box.

base: interfaces of sources and sinks. axes: axis order of a file, and channels-last. cache: decoded chunks. draft:
files under a temporary name until they are complete. in_place: uncompressed cells, which every rank writes in place.
tiles: default chunk sizes. table: the classes of each file type; `open_source` and `create_sink` choose by the suffix.
One further module per format, on a maintained library each. image_loader: pictures decoded by Pillow. tiff_tags, ome:
metadata of position, time and calibration.
"""

from .base import TileSink, TileSource
from .draft import DraftSink
from .table import Format, create_sink, open_source

__all__ = ["DraftSink", "Format", "TileSink", "TileSource", "create_sink", "open_source"]
