"""Exchange policies, which users call border schemes: how cells of other tiles reach a view, and what returns.

base: what every policy says of itself. names: policies as text. The others: one small class each.
"""

from .base import ExchangePolicy
from .every import Every
from .halo import Halo
from .halo_oneway import HaloOneway
from .names import as_scheme, scheme_names, scheme_text
from .quantised import Quantised
from .stale import Stale
from .tower import Tower

__all__ = [
    "Every",
    "ExchangePolicy",
    "Halo",
    "HaloOneway",
    "Quantised",
    "Stale",
    "Tower",
    "as_scheme",
    "scheme_names",
    "scheme_text",
]
