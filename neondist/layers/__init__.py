"""Layers, one concept per file, each serial class with its distributed counterpart."""

from .activation import ActivationLayer, ActivationLayerDist
from .avg_pooling import AvgPoolingLayer, AvgPoolingLayerDist
from .base import Dist, Layer, Node
from .batchnorm import BatchNormLayer, BatchNormLayerDist
from .branches import Branches, Concat, Sum
from .containers import Sequential
from .context import ModelContext, StepContext
from .conv import ConvLayer, ConvLayerDist
from .crop import CropLayer, CropLayerDist, PadLayer, PadLayerDist
from .declarations import check_declarations, check_signatures
from .deconv import DeconvLayer, DeconvLayerDist
from .dropout import DropoutLayer, DropoutLayerDist
from .embedding import EmbeddingLayer, EmbeddingLayerDist
from .functions import Activation, Identity, Logistic, RectLin, ReLU, Softmax, Tanh
from .global_avg_pooling import GlobalAvgPoolingLayer, GlobalAvgPoolingLayerDist
from .group_norm import GroupNormLayer, GroupNormLayerDist, InstanceNormLayer, InstanceNormLayerDist
from .l2_pooling import L2PoolingLayer, L2PoolingLayerDist
from .layout import Parameter, Replicate, Shard, Tiled, declared_with, method_class
from .lcn import LCNLayer, LCNLayerDist
from .linear import FCLayer, FCLayerDist
from .local import LocalFilteringLayer, LocalFilteringLayerDist
from .lrn import LRNLayer, LRNLayerDist
from .pooling import MaxPoolingLayer, MaxPoolingLayerDist
from .reduction import Reduction
from .upsample import UpsampleLayer, UpsampleLayerDist

__all__ = [
    "Activation",
    "ActivationLayer",
    "ActivationLayerDist",
    "AvgPoolingLayer",
    "AvgPoolingLayerDist",
    "BatchNormLayer",
    "BatchNormLayerDist",
    "Branches",
    "Concat",
    "ConvLayer",
    "ConvLayerDist",
    "CropLayer",
    "CropLayerDist",
    "DeconvLayer",
    "DeconvLayerDist",
    "Dist",
    "DropoutLayer",
    "DropoutLayerDist",
    "EmbeddingLayer",
    "EmbeddingLayerDist",
    "FCLayer",
    "FCLayerDist",
    "GlobalAvgPoolingLayer",
    "GlobalAvgPoolingLayerDist",
    "GroupNormLayer",
    "GroupNormLayerDist",
    "Identity",
    "InstanceNormLayer",
    "InstanceNormLayerDist",
    "L2PoolingLayer",
    "L2PoolingLayerDist",
    "LCNLayer",
    "LCNLayerDist",
    "LRNLayer",
    "LRNLayerDist",
    "Layer",
    "LocalFilteringLayer",
    "LocalFilteringLayerDist",
    "Logistic",
    "MaxPoolingLayer",
    "MaxPoolingLayerDist",
    "ModelContext",
    "Node",
    "PadLayer",
    "PadLayerDist",
    "Parameter",
    "ReLU",
    "RectLin",
    "Reduction",
    "Replicate",
    "Sequential",
    "Shard",
    "Softmax",
    "StepContext",
    "Sum",
    "Tanh",
    "Tiled",
    "UpsampleLayer",
    "UpsampleLayerDist",
    "check_declarations",
    "check_signatures",
    "declared_with",
    "method_class",
]
