"""Integer geometry of tiles, windows and halos; it imports neither MPI nor arrays.

box: a half-open box of cells. split: balanced partitions. window: what a layer looks at. gradient_window: what
looks at a cell. plan: who sends which cells to whom. regions: tiles that overlap. If the tests of this package fail,
no distributed test can pass.
"""

from .box import Box
from .gradient_window import GradientWindow, halo_volume, looking_at
from .grid_shape import GridShape, StripGrid, grid_shape
from .plan import HaloPlan, Kinds, Level, Piece, RepartitionPlan, TransferPlan, fold, sources_within
from .regions import Overlapping, hulls, looked_at, sources
from .split import Partition, factorisations, split
from .upsampling import Upsampling
from .window import Window, same_padding

__all__ = [
    "Box",
    "GradientWindow",
    "GridShape",
    "HaloPlan",
    "Kinds",
    "Level",
    "Overlapping",
    "Partition",
    "Piece",
    "RepartitionPlan",
    "StripGrid",
    "TransferPlan",
    "Upsampling",
    "Window",
    "factorisations",
    "fold",
    "grid_shape",
    "halo_volume",
    "hulls",
    "looked_at",
    "looking_at",
    "same_padding",
    "sources",
    "sources_within",
    "split",
]
