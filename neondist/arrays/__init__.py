"""Activations and the views that windows have of them.

padded: serial, and everything that the distributed array shares with it. global_array: tiles over ranks. frame: buffers
and messages of one view. padding: cells copied from inside the image.
"""

from .global_array import GlobalArray
from .padded import PaddedArray

__all__ = ["GlobalArray", "PaddedArray"]
