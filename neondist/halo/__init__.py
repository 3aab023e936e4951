"""Views of activations that are cut into tiles: the exact halo, and what users may have cross instead.

Read in this order. global_array: an activation, the view that a window has of it, and the gradient of that. buffer: the
memory of one view. exchange: cells of other tiles are gathered from their owners, and the adjoint scatters and adds.
padding: cells that are copied from inside the image, or from inside the tile. policies: border schemes, one file each.
fusion: schemes for several layers together, which change who computes what and leave the exchange as it is.
redistribute: activations cut for another grid.
"""

from .exchange import HaloExchange, PackedExchange, Phase
from .fusion import Auto, DeepHalo, Fusion, OverlapTile
from .global_array import GlobalArray, PaddedArray
from .policies.base import ExchangePolicy
from .policies.every import Every
from .policies.halo import Halo
from .policies.halo_oneway import HaloOneway
from .policies.names import as_scheme, scheme_names, scheme_text
from .policies.narrow_halo import halo_in
from .policies.quantised import Quantised
from .policies.stale import Stale
from .policies.tower import Tower

__all__ = [
    "Auto",
    "DeepHalo",
    "Every",
    "ExchangePolicy",
    "Fusion",
    "GlobalArray",
    "Halo",
    "HaloExchange",
    "HaloOneway",
    "OverlapTile",
    "PackedExchange",
    "PaddedArray",
    "Phase",
    "Quantised",
    "Stale",
    "Tower",
    "as_scheme",
    "halo_in",
    "scheme_names",
    "scheme_text",
]
