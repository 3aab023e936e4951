"""Files of whole arrays that any number of ranks writes, and any other number reads.

pieces: which rank holds which part of an array. stream: parts to rank 0 and back, in blocks, so that no rank holds a
cut array whole. checksum: that over the file. write, read: the HDF5 file. keep: older files beside the newest.
weights: a file's weights alone. settings: numbers and texts of optimisers. scheme_memory: what border schemes remember.
sync_state: that of gradient synchronisation. snapshots: files in the shared memory of nodes.
"""

from .keep import kept_files
from .pieces import Piece
from .read import Facts, opened
from .scheme_memory import REMEMBERED, memory_of, remind
from .settings import from_plain, to_plain
from .snapshots import SnapshotStore
from .stream import collect, scatter
from .sync_state import restore_sync, sync_pieces
from .weights import Taken, take
from .write import write

__all__ = [
    "REMEMBERED",
    "Facts",
    "Piece",
    "SnapshotStore",
    "Taken",
    "collect",
    "from_plain",
    "kept_files",
    "memory_of",
    "opened",
    "remind",
    "restore_sync",
    "scatter",
    "sync_pieces",
    "take",
    "to_plain",
    "write",
]
