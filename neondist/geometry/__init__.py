"""Integer geometry of tiles, windows and halos, without MPI or arrays.

box: a half-open box of cells. grid_shape: numbers of replicas and tiles. partition: balanced partitions. window: the
window of a layer. gradient_window: its adjoint, the outputs that depend on a cell. index_map: a window whose position
depends on the output. upsampling: a window that advances by fractions of a cell. lattice: equally spaced cells, as in
strided windows. transfer: the cells that each rank needs from each owner. plan: the transfers of tiles for a window,
and of ranks between arbitrary boxes. regions: overlapping tiles.
"""

from .box import Box
from .gradient_window import GradientWindow
from .grid_shape import GridShape, TileStripGrid, grid_shape
from .index_map import IndexMap
from .lattice import AxisCells, Lattice, Range, clip_ranges, group_into_ranges, hull_of, shift_range, to_slice
from .partition import Atom, Partition, Place, coords_of, factorisations, index_of, part_range
from .plan import (
    HaloPlan,
    KeyDetail,
    PartClassKeys,
    RepartitionPlan,
    TransferPlan,
    fold_index,
    sources_within,
    total_halo_volume,
)
from .regions import OverlappingPartition, hull_of_ranges, hull_partition, needed_image_cells, view_cells
from .transfer import DimRequest, Piece, ViewTransfer
from .upsampling import Upsampling
from .window import Window, same_padding

__all__ = [
    "Atom",
    "AxisCells",
    "Box",
    "DimRequest",
    "GradientWindow",
    "GridShape",
    "HaloPlan",
    "IndexMap",
    "KeyDetail",
    "Lattice",
    "OverlappingPartition",
    "PartClassKeys",
    "Partition",
    "Piece",
    "Place",
    "Range",
    "RepartitionPlan",
    "TileStripGrid",
    "TransferPlan",
    "Upsampling",
    "ViewTransfer",
    "Window",
    "clip_ranges",
    "coords_of",
    "factorisations",
    "fold_index",
    "grid_shape",
    "group_into_ranges",
    "hull_of",
    "hull_of_ranges",
    "hull_partition",
    "index_of",
    "needed_image_cells",
    "part_range",
    "same_padding",
    "shift_range",
    "sources_within",
    "to_slice",
    "total_halo_volume",
    "view_cells",
]
