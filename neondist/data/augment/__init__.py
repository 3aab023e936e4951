"""Augmentation of whole images, of which every rank computes its own tile.

base: base class of transforms. moves: transforms that move cells. elastic: elastic deformation. values: transforms that
change values in place. tile: a rank's tile after all transforms, computed from the cells that it depends on.
"""

from .base import Draw, Transform
from .elastic import Elastic
from .moves import Flip, QuarterTurns, Shift
from .tile import AugmentedTile
from .values import Brightness, Contrast, Noise

__all__ = [
    "AugmentedTile",
    "Brightness",
    "Contrast",
    "Draw",
    "Elastic",
    "Flip",
    "Noise",
    "QuarterTurns",
    "Shift",
    "Transform",
]
