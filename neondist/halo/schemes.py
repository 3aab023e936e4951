"""Public names of the border schemes: `nd.schemes`."""

from .fusion import Auto, DeepHalo, OverlapTile
from .policies.base import ExchangePolicy
from .policies.every import Every
from .policies.halo import Halo
from .policies.halo_oneway import HaloOneway
from .policies.quantised import Quantised
from .policies.stale import Stale
from .policies.tower import Tower

__all__ = [
    "Auto",
    "DeepHalo",
    "Every",
    "ExchangePolicy",
    "Halo",
    "HaloOneway",
    "OverlapTile",
    "Quantised",
    "Stale",
    "Tower",
]
