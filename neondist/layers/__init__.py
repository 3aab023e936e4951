"""Layers, one concept a file, each serial class beside its distributed twin."""

from .activation import ActivationLayer, ActivationLayerDist
from .avg_pooling import AvgPoolingLayer, AvgPoolingLayerDist
from .base import Context, Dist, Layer, Parameter, Phase
from .batchnorm import BatchNormLayer, BatchNormLayerDist
from .conv import ConvLayer, ConvLayerDist
from .dropout import DropoutLayer, DropoutLayerDist
from .functions import Activation, Identity, Logistic, RectLin, Softmax, Tanh
from .global_avg_pooling import GlobalAvgPoolingLayer, GlobalAvgPoolingLayerDist
from .l2_pooling import L2PoolingLayer, L2PoolingLayerDist
from .linear import FCLayer, FCLayerDist
from .pooling import MaxPoolingLayer, MaxPoolingLayerDist

__all__ = [
    "Activation",
    "ActivationLayer",
    "ActivationLayerDist",
    "AvgPoolingLayer",
    "AvgPoolingLayerDist",
    "BatchNormLayer",
    "BatchNormLayerDist",
    "Context",
    "ConvLayer",
    "ConvLayerDist",
    "Dist",
    "DropoutLayer",
    "DropoutLayerDist",
    "FCLayer",
    "FCLayerDist",
    "GlobalAvgPoolingLayer",
    "GlobalAvgPoolingLayerDist",
    "Identity",
    "L2PoolingLayer",
    "L2PoolingLayerDist",
    "Layer",
    "Logistic",
    "MaxPoolingLayer",
    "MaxPoolingLayerDist",
    "Parameter",
    "Phase",
    "RectLin",
    "Softmax",
    "Tanh",
]
