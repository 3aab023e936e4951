"""Models: layers, a cost and an optimiser.

model: the chain and its passes. parameters: all arrays in flat buffers. plan: shapes and halos from arithmetic. dist:
the distributed models. distribute: from one to the other.
"""

from .convnet import Convnet
from .dist import ConvnetDist, DistModel, MLPDist
from .distribute import distribute
from .mlp import MLP
from .model import Model
from .plan import LayerPlan

__all__ = ["MLP", "Convnet", "ConvnetDist", "DistModel", "LayerPlan", "MLPDist", "Model", "distribute"]
