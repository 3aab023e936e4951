"""Files of whole arrays that any number of ranks writes, and any other number reads.

pieces: which rank holds which part of an array. stream: parts to rank 0 and back, in blocks, so that no rank holds a
cut array whole. seal: the checksum over the file. write, read: the HDF5 file. keep: older files beside the newest.
weights: a file's weights alone.
"""

from .keep import kept_files
from .pieces import Piece
from .read import Facts, opened
from .stream import collect, spread
from .weights import Taken, take
from .write import write

__all__ = ["Facts", "Piece", "SturdyFile", "Taken", "collect", "kept_files", "opened", "spread", "take", "write"]
