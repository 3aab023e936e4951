"""`neondist.train`, under its name until this release."""

from ..renamed import moved

__getattr__ = moved(__name__, "neondist.train", {"Run": "TrainState"})
