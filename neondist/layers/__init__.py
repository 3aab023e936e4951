"""Layers, one concept a file, each serial class beside its distributed twin."""

from .activation import ActivationLayer, ActivationLayerDist
from .avg_pooling import AvgPoolingLayer, AvgPoolingLayerDist
from .base import Dist, Layer, Parameter
from .batchnorm import BatchNormLayer, BatchNormLayerDist
from .containers import Concat, Sequential, Sum
from .conv import ConvLayer, ConvLayerDist
from .dropout import DropoutLayer, DropoutLayerDist
from .functions import Activation, Identity, Logistic, RectLin, Softmax, Tanh
from .global_avg_pooling import GlobalAvgPoolingLayer, GlobalAvgPoolingLayerDist
from .l2_pooling import L2PoolingLayer, L2PoolingLayerDist
from .linear import FCLayer, FCLayerDist
from .node import Context, Node, Phase
from .pooling import MaxPoolingLayer, MaxPoolingLayerDist

__all__ = [
    "Activation",
    "ActivationLayer",
    "ActivationLayerDist",
    "AvgPoolingLayer",
    "AvgPoolingLayerDist",
    "BatchNormLayer",
    "BatchNormLayerDist",
    "Concat",
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
    "Node",
    "Parameter",
    "Phase",
    "RectLin",
    "Sequential",
    "Softmax",
    "Sum",
    "Tanh",
]
