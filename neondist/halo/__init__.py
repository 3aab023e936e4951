"""Halo exchange: views of tiled activations, exact or by a border scheme.

global_array: an activation, its view for a window, and the gradient of the view. buffer: the memory of one view.
exchange: gathering of halo cells from their owners, and the adjoint, which scatters and adds. padding: cells copied
from inside the image or the tile. policies: border schemes, one file each. fusion: schemes that fuse several layers, so
that tiles recompute cells of other tiles. schemes: public names of the schemes. redistribute: moves activations to
another grid.
"""

from .exchange import HaloExchange, HaloRecord, PackedExchange, Phase
from .fusion import Auto, DeepHalo, FusionScheme, OverlapTile
from .global_array import GlobalArray, SerialArray
from .policies.base import ExchangePolicy
from .policies.every import Every
from .policies.halo import Halo
from .policies.halo_oneway import HaloOneway
from .policies.names import as_scheme, scheme_text, schemes_by_name
from .policies.narrow_halo import halo_in_precision
from .policies.quantised import Quantised
from .policies.stale import Stale
from .policies.tower import Tower

__all__ = [
    "Auto",
    "DeepHalo",
    "Every",
    "ExchangePolicy",
    "FusionScheme",
    "GlobalArray",
    "Halo",
    "HaloExchange",
    "HaloOneway",
    "HaloRecord",
    "OverlapTile",
    "PackedExchange",
    "Phase",
    "Quantised",
    "SerialArray",
    "Stale",
    "Tower",
    "as_scheme",
    "halo_in_precision",
    "scheme_text",
    "schemes_by_name",
]
