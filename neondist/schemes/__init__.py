"""Border schemes: how cells of other tiles reach a view, and what returns. One small class each, in a file of its own.

base: what a scheme says of itself. names: schemes as text.
"""

from .auto import Auto
from .base import Scheme
from .deep_halo import DeepHalo
from .every import Every
from .halo import Halo
from .halo_oneway import HaloOneway
from .names import as_scheme, scheme_names, scheme_text
from .overlap_tile import OverlapTile
from .quantised import Quantised
from .stale import Stale
from .tower import Tower

__all__ = [
    "Auto",
    "DeepHalo",
    "Every",
    "Halo",
    "HaloOneway",
    "OverlapTile",
    "Quantised",
    "Scheme",
    "Stale",
    "Tower",
    "as_scheme",
    "scheme_names",
    "scheme_text",
]
