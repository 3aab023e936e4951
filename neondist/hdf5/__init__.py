"""HDF5 files in which damage is found and not believed, and that are written whole or not at all.

text: attributes that are safe to read. writer: a new file under another name until it is complete. sturdy and
sink: where bytes go, also when the disk is full. reader: an open file, with faults as DataError. inside: groups and
arrays that lie in the file itself. checksums: those of ours, of the blocks of an array.

libhdf5 believes most of what a file says of itself. It keeps checksums of all metadata in files of `VERSION`, and of
the cells of arrays written with `fletcher32=True`, which finds all but zeros. Text of variable length has none, and one
wrong byte there makes libhdf5 2.0 search for ever: it is neither written nor read here.
"""

from .checksums import CheckedArray, ChecksumTable, checksum, probe, read_whole
from .inside import find
from .reader import faults, open_file, state
from .sturdy import SturdyFile
from .text import SIGNATURE, get_text, plain, put_text
from .writer import VERSION, NewFile

__all__ = [
    "SIGNATURE", "VERSION", "CheckedArray", "ChecksumTable", "NewFile", "SturdyFile", "checksum", "faults", "find",
    "get_text", "open_file", "plain", "probe", "put_text", "read_whole", "state",
]  # fmt: skip
