"""Activations and the views that windows have of them.

padded: serial, and everything that the distributed array shares with it. global_array: tiles over ranks. frame: the
buffers of one view. way, courier: what a scheme sees of the border, and its messages. border: an array's scheme and
books. phase: what a pass is for. padding, local_fill: cells copied from inside the image, and from inside the tile.
real: what callers give.
"""

from .border import Border, Exact
from .courier import Courier
from .global_array import GlobalArray
from .padded import PaddedArray
from .phase import Phase
from .real import real_array
from .way import Way

__all__ = [
    "Border",
    "Courier",
    "Exact",
    "GlobalArray",
    "PaddedArray",
    "Phase",
    "Way",
    "real_array",
]
