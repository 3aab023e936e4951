"""Records of CSV files, RecordIO files, database tables, HDF5 arrays and data sets; each record is an array.

base: the reader's base class. csv_file, recordio, table, arrays: one reader each. sources: opening by name. feed: data
set of the features and labels that a user's function computes from records.
"""

from .base import BadRecordError, RecordReader
from .feed import FeedFunction, Mode, RecordSamples, record_dataset
from .recordio import RecordIOWriter
from .sources import open_records

__all__ = [
    "BadRecordError", "FeedFunction", "Mode", "RecordIOWriter", "RecordReader", "RecordSamples", "open_records",
    "record_dataset",
]  # fmt: skip
