"""The field's files in and out: any box of an array that lies in a file, and a file that many ranks fill box by box.

base: what a source and a sink are. axes: the order of a file's axes, and channels-last. cache: what has been decoded
before. draft: a file under another name until it is complete. placed: cells that lie in a file as they are, so that
every rank writes its own. tiles: into what pieces. table: which class reads and writes which files; `open_source` and
`create_sink` choose by the name. Then one file a format, each over the library that is best kept; image_loader:
pictures as Pillow decodes them. tiff_tags, ome: what files tell of place, time and calibration.
"""

from .base import TileSink, TileSource
from .table import Format, create_sink, open_source

__all__ = ["Format", "TileSink", "TileSource", "create_sink", "open_source"]
