"""HDF5 files with detection of damage and atomic writing.

reader: safe access to an open file. writer: a new file under a temporary name until it is complete, with deferred
errors when the disk is full. checksums: checksums of the blocks of an array. chunks: checks of compressed chunks before
they are decompressed.

libhdf5 trusts most of a file's content. Files written with `HDF5_LIBRARY_VERSIONS` have checksums of all metadata;
arrays written with `fletcher32=True` have checksums of their cells, which do not detect zeroed chunks. Variable-length
text has no checksum, and a wrong byte in it makes libhdf5 2.0 loop forever, so it is neither written nor read.
"""

from .checksums import CheckedArray, ChecksumTable, checksum, fingerprint_array, read_array, read_verified_array
from .reader import (
    HDF5_SIGNATURE,
    array_names,
    convert_hdf5_errors,
    find_object,
    get_text_attribute,
    is_numeric,
    iter_arrays,
    open_hdf5,
    size_and_mtime,
)
from .writer import HDF5_LIBRARY_VERSIONS, DeferredErrorHDF5File, NewHDF5File, put_text_attribute

__all__ = [
    "HDF5_LIBRARY_VERSIONS",
    "HDF5_SIGNATURE",
    "CheckedArray",
    "ChecksumTable",
    "DeferredErrorHDF5File",
    "NewHDF5File",
    "array_names",
    "checksum",
    "convert_hdf5_errors",
    "find_object",
    "fingerprint_array",
    "get_text_attribute",
    "is_numeric",
    "iter_arrays",
    "open_hdf5",
    "put_text_attribute",
    "read_array",
    "read_verified_array",
    "size_and_mtime",
]  # fmt: skip
