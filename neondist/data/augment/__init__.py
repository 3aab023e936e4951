"""Augmentation of whole images, of which every rank makes its own tile.

base: what one step is. moves: steps that move cells. elastic: one that bends the image. values: steps that change
cells where they are. tile: a rank's tile of what all steps make of an image, from no more cells than it needs.
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
