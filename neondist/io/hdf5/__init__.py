"""HDF5 files in which damage is found and not believed, and that are written whole or not at all.

reader: an open file, and what of it can be believed. writer: a new file under another name until it is complete,
and where its bytes go when the disk is full. checksums: those of ours, of the blocks of an array. chunks: packed ones
of others, before they are unpacked.

libhdf5 believes most of what a file says of itself. It keeps checksums of all metadata in files of `VERSION`, and of
the cells of arrays written with `fletcher32=True`, which finds all but zeros. Text of variable length has none, and one
wrong byte there makes libhdf5 2.0 search for ever: it is neither written nor read here.
"""

from .checksums import CheckedArray, ChecksumTable, checksum, probe, read_array, read_whole
from .reader import SIGNATURE, array_names, arrays_in, faults, find, get_text, open_file, plain, state
from .writer import VERSION, DeferredErrorFile, NewFile, put_text

__all__ = [
    "SIGNATURE", "VERSION", "CheckedArray", "ChecksumTable", "DeferredErrorFile", "NewFile", "array_names", "arrays_in",
    "checksum", "faults", "find", "get_text", "open_file", "plain", "probe", "put_text", "read_array", "read_whole",
    "state",
]  # fmt: skip
