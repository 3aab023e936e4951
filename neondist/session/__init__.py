"""`neondist.train`, under its name until this release; and scripts of users: autodist."""

from ..renamed import moved
from .autodist import AutoDist

__all__ = ["AutoDist"]

__getattr__ = moved(__name__, "neondist.train", {"Run": "TrainState"})
