"""Checkpoint files of global arrays, which any number of ranks write and any other number read.

pieces: distribution of an array over ranks. stream: transfer to and from rank 0 in blocks, so that no rank holds a
distributed array in full. checksum: checksum of the file. write, read: the HDF5 file. keep: older checkpoints. weights:
loading of weights alone. settings: settings of optimisers as JSON. scheme_memory: state of border schemes. sync_state:
state of gradient synchronisation. snapshots: files in the shared memory of nodes.
"""

from .keep import kept_files
from .pieces import Piece
from .read import Facts, open_checkpoint
from .scheme_memory import REMEMBERED, collect_memory, restore_memory
from .settings import from_plain, to_plain
from .snapshots import SnapshotStore
from .stream import collect, scatter
from .sync_state import restore_sync, sync_pieces
from .weights import WeightMatch, load_weights
from .write import write

__all__ = [
    "REMEMBERED",
    "Facts",
    "Piece",
    "SnapshotStore",
    "WeightMatch",
    "collect",
    "collect_memory",
    "from_plain",
    "kept_files",
    "load_weights",
    "open_checkpoint",
    "restore_memory",
    "restore_sync",
    "scatter",
    "sync_pieces",
    "to_plain",
    "write",
]
