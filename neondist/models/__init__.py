"""Models: layers, a cost and an optimiser.

model: the chain. train_step: a training step. trainable: the interface to the training loop. passes: a forward pass and
its backward pass. dist: the distributed models. distribute: conversion of serial models. gb, autoencoder,
reconstruction: the sparse autoencoder. script: training steps of a user's script. stimulus: optimal stimuli of units.
targets: a rank's part of the targets.
"""

from .autoencoder import Autoencoder
from .convnet import Convnet
from .dist import ConvnetDist, DistModel, GBDist, MLPDist
from .distribute import distribute
from .gb import GB
from .mlp import MLP
from .model import Model, require_layer_model
from .reconstruction import AutoencoderReconstruction
from .script import TrainingScriptAdapter
from .stimulus import optimal_stimulus
from .train_step import ModelStep, TrainStep
from .trainable import RemoteUpdate, Trainable, TrainableModel

__all__ = [
    "GB",
    "MLP",
    "Autoencoder",
    "AutoencoderReconstruction",
    "Convnet",
    "ConvnetDist",
    "DistModel",
    "GBDist",
    "MLPDist",
    "Model",
    "ModelStep",
    "RemoteUpdate",
    "TrainStep",
    "Trainable",
    "TrainableModel",
    "TrainingScriptAdapter",
    "distribute",
    "optimal_stimulus",
    "require_layer_model",
]
