"""Synchronisation of gradients between ranks that hold the same parameters, or samples of the same batch.

parameters: the trained arrays of a model in flat buffers. layer_parameters: the arrays of layers. shard: one array, and
its part on a rank. subset: some of the parameters. sync: sums over ranks. flags: control flags sent with the sums.
compressors: sums in fewer bytes. rows: sums of sparse parameters. compressed: gradients summed in these two ways.
"""

from .compressors import SyncState, compressed_bytes_if_smaller
from .flags import FLAG_HEADER_LENGTH, ControlFlag, ControlFlags
from .layer_parameters import LayerParameters
from .parameters import Parameters, gather_arrays, load_arrays
from .rows import ROWS_COMPRESSOR, row_message_bytes
from .shard import ParameterShard
from .subset import TrainedSubset
from .sync import SYNC_CLASSES_BY_NAME, AllReduce, Bucketed, GradientSync, are_all_finite

__all__ = [
    "FLAG_HEADER_LENGTH",
    "ROWS_COMPRESSOR",
    "SYNC_CLASSES_BY_NAME",
    "AllReduce",
    "Bucketed",
    "ControlFlag",
    "ControlFlags",
    "GradientSync",
    "LayerParameters",
    "ParameterShard",
    "Parameters",
    "SyncState",
    "TrainedSubset",
    "are_all_finite",
    "compressed_bytes_if_smaller",
    "gather_arrays",
    "load_arrays",
    "row_message_bytes",
]  # fmt: skip
