"""Checks of layers for `--debug-halo`.

mark: a distinctive NaN for uninitialised cells. guarded_copy: the copy of an array that a layer receives. guard: the
layer task that checks for invalid accesses. Messages are checked by comm.DebugTransport.
"""

from .guard import guard_executor, mark_unowned_cells
from .mark import mask_of_unfilled

__all__ = ["guard_executor", "mark_unowned_cells", "mask_of_unfilled"]
