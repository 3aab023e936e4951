"""Records of CSV files, RecordIO files, database tables, HDF5 arrays and data sets, each an array.

base: the reader's base class. csv_file, recordio, table, arrays: one reader each. reading: opening by name. fed: data
set of the features and labels that a user's function computes from records.
"""

from .base import BadRecord, RecordReader
from .fed import Feed, Mode, Samples, record_dataset
from .reading import open_records
from .recordio import RecordIOWriter

__all__ = ["BadRecord", "Feed", "Mode", "RecordIOWriter", "RecordReader", "Samples", "open_records", "record_dataset"]
