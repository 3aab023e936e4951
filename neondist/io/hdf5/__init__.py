"""HDF5 files with detection of damage and atomic writing.

reader: safe access to an open file. writer: a new file under a temporary name until it is complete, with deferred
errors when the disk is full. checksums: checksums of the blocks of an array. chunks: checks of compressed chunks before
they are decompressed.

libhdf5 trusts most of a file's content. Files of `VERSION` have checksums of all metadata; arrays written with
`fletcher32=True` have checksums of their cells, which do not detect zeroed chunks. Variable-length text has none, and a
wrong byte there makes libhdf5 2.0 loop forever: it is neither written nor read.
"""

from .checksums import CheckedArray, ChecksumTable, checksum, fingerprint, read_array, read_whole
from .reader import SIGNATURE, array_names, arrays_in, faults, file_state, find, get_text, is_numeric, open_file
from .writer import VERSION, DeferredErrorFile, NewFile, put_text

__all__ = [
    "SIGNATURE", "VERSION", "CheckedArray", "ChecksumTable", "DeferredErrorFile", "NewFile", "array_names", "arrays_in",
    "checksum", "faults", "file_state", "find", "fingerprint", "get_text", "is_numeric", "open_file", "put_text",
    "read_array", "read_whole",
]  # fmt: skip
