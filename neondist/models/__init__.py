"""Models: layers, a cost and an optimiser.

model: the chain. train_step: a step of training. trainable: what the loop asks for. passes: a pass as users have it.
dist: the distributed models. distribute: from one to the other. gb, autoencoder, reconstruction: the sparse
autoencoder. stimulus: the input that a unit answers to most. targets: those of a rank's outputs.
"""

from .autoencoder import Autoencoder
from .convnet import Convnet
from .dist import ConvnetDist, DistModel, GBDist, MLPDist
from .distribute import distribute
from .gb import GB
from .mlp import MLP
from .model import Model, made_of_layers
from .reconstruction import Reconstruction
from .stimulus import optimal_stimulus
from .train_step import ModelStep, TrainStep
from .trainable import RemoteUpdate, Trainable, TrainableModel

__all__ = [
    "GB",
    "MLP",
    "Autoencoder",
    "Convnet",
    "ConvnetDist",
    "DistModel",
    "GBDist",
    "MLPDist",
    "Model",
    "ModelStep",
    "Reconstruction",
    "RemoteUpdate",
    "TrainStep",
    "Trainable",
    "TrainableModel",
    "distribute",
    "made_of_layers",
    "optimal_stimulus",
]
