"""How ranks that hold the same parameters, or samples of the same batch, come to one gradient."""

from .flags import HEADER, ControlFlags, Flag
from .sync import SYNCS, AllReduce, Bucketed, GradientSync, finite

__all__ = ["HEADER", "SYNCS", "AllReduce", "Bucketed", "ControlFlags", "Flag", "GradientSync", "finite"]
