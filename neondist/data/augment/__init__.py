"""Augmentation of whole images; each rank computes its own tile.

base: base class of transforms. rigid: flips, rotations and shifts. elastic: elastic deformation. intensity: changes
of values in place. tile: a rank's tile after all transforms, computed from the cells that it depends on.
"""

from .base import RandomDraw, Transform
from .elastic import Elastic
from .intensity import Brightness, Contrast, Noise
from .rigid import Flip, QuarterTurns, Shift
from .tile import AugmentedTile

__all__ = [
    "AugmentedTile",
    "Brightness",
    "Contrast",
    "Elastic",
    "Flip",
    "Noise",
    "QuarterTurns",
    "RandomDraw",
    "Shift",
    "Transform",
]
