"""Integer geometry of tiles, windows and halos; it imports neither MPI nor arrays.

box: a half-open box of cells. partition: balanced partitions. window: the window of a layer. gradient_window: its
adjoint, the outputs that depend on a cell. index_map: a window whose position depends on the output. lattice: cells
at equal distances, as in strided windows. plan: the cells that each tile sends and receives. regions: overlapping
tiles. Distributed tests presuppose the tests of this package.
"""

from .box import Box
from .gradient_window import GradientWindow, halo_volume
from .grid_shape import GridShape, StripGrid, grid_shape
from .index_map import IndexMap
from .lattice import Cells, Lattice, as_ranges, clip_ranges, hull_of, shift_range, to_slice
from .partition import Partition, factorisations, part_range
from .plan import HaloPlan, Kinds, Level, Piece, RepartitionPlan, TransferPlan, fold, sources_within
from .regions import Overlapping, hulls, joined, sources, view_cells
from .upsampling import Upsampling
from .window import Window, same_padding

__all__ = [
    "Box",
    "Cells",
    "GradientWindow",
    "GridShape",
    "HaloPlan",
    "IndexMap",
    "Kinds",
    "Lattice",
    "Level",
    "Overlapping",
    "Partition",
    "Piece",
    "RepartitionPlan",
    "StripGrid",
    "TransferPlan",
    "Upsampling",
    "Window",
    "as_ranges",
    "clip_ranges",
    "factorisations",
    "fold",
    "grid_shape",
    "halo_volume",
    "hull_of",
    "hulls",
    "joined",
    "part_range",
    "same_padding",
    "shift_range",
    "sources",
    "sources_within",
    "to_slice",
    "view_cells",
]
