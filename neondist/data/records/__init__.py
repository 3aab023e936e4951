"""Records of CSV files, RecordIO files, tables of databases, arrays in HDF5, and data sets: an array each.

base: the reader that all are; a file for each kind; reading: from a name to a reader; fed: records to a data set of
features and labels, by a function of the user's.
"""

from .base import BadRecord, RecordReader
from .fed import Feed, Mode, Samples, record_dataset
from .reading import open_records
from .recordio import RecordIOWriter

__all__ = ["BadRecord", "Feed", "Mode", "RecordIOWriter", "RecordReader", "Samples", "open_records", "record_dataset"]
