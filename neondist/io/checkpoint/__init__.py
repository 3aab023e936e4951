"""Checkpoint files of global arrays, written and read by any number of ranks.

* pieces: distribution of an array over ranks; checksum: checksum of the file; write, read: the HDF5 file
* stream: transfer to and from rank 0 in blocks, so that no rank holds a distributed array in full
* retention: older checkpoints; weights: loading of weights alone; settings: settings of optimisers as JSON
* scheme_state, sync_state: state of border schemes and of gradient synchronisation
* snapshots: files in the shared memory of nodes
"""

from .pieces import ArrayPart
from .read import CheckpointContents, open_checkpoint, read_checkpoint_texts
from .retention import list_step_checkpoints
from .scheme_state import SCHEME_STATE_TEXT_NAME, collect_scheme_state, restore_scheme_state
from .settings import from_json_value, to_json_value
from .snapshots import SnapshotStore
from .stream import gather_to_root, scatter_from_root
from .sync_state import restore_sync_state, sync_state_parts
from .weights import WeightMatch, load_weights
from .write import write_checkpoint

__all__ = [
    "SCHEME_STATE_TEXT_NAME",
    "ArrayPart",
    "CheckpointContents",
    "SnapshotStore",
    "WeightMatch",
    "collect_scheme_state",
    "from_json_value",
    "gather_to_root",
    "list_step_checkpoints",
    "load_weights",
    "open_checkpoint",
    "read_checkpoint_texts",
    "restore_scheme_state",
    "restore_sync_state",
    "scatter_from_root",
    "sync_state_parts",
    "to_json_value",
    "write_checkpoint",
]  # fmt: skip
