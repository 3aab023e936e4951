"""Distributed models."""

from __future__ import annotations

from ..registry import DistributedMixin
from .convnet import Convnet
from .gb import GB
from .mlp import MLP


class DistModel(DistributedMixin):
    """Mixin that distributes a model: `class MyModelDist(DistModel, MyModel)`; the default grid has all ranks."""

    distributed = True


class MLPDist(DistModel, MLP):
    """A multi-layer perceptron over tiles."""


class ConvnetDist(DistModel, Convnet):
    """A convolutional network over tiles."""


class GBDist(DistModel, GB):
    """The sparse autoencoder over tiles: each rank stores and trains only the filters of its own output cells."""
