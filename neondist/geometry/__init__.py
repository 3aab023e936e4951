"""Integer geometry of tiles, windows and halos; it imports neither MPI nor arrays.

box: a half-open box of cells. split: balanced partitions. window: what a layer looks at. dependents: what looks at a
cell. plan: who sends which cells to whom. regions: tiles that overlap. If the tests of this package fail, no
distributed test can pass.
"""

from .box import Box
from .dependents import Dependents, received_cells
from .grid_shape import GridShape, grid_shape
from .plan import HaloPlan, Piece, RepartitionPlan, TransferPlan, fold
from .regions import Overlapping, needed_of, sources
from .split import Partition, factorisations, split
from .upsampling import Upsampling
from .window import Window, same_padding

__all__ = [
    "Box",
    "Dependents",
    "GridShape",
    "HaloPlan",
    "Overlapping",
    "Partition",
    "Piece",
    "RepartitionPlan",
    "TransferPlan",
    "Upsampling",
    "Window",
    "factorisations",
    "fold",
    "grid_shape",
    "needed_of",
    "received_cells",
    "same_padding",
    "sources",
    "split",
]
