"""Rules for distributing operators; importing this package registers them.

pointwise: elementwise operators. window: convolution and unfolding. pooling: maxima and means of windows. resample:
interpolation. index: moving cells. pick: indexing by tensor values. shape: reshaping. reduce: reductions. norm:
normalisation. product: matrix products and attention. matrix: linear algebra. spectrum: Fourier transforms and complex
numbers. create: tensor creation. function: users' autograd.Functions. random: random numbers keyed by the global index.
loss: costs.
"""

from . import (
    create,
    function,
    index,
    loss,
    matrix,
    norm,
    pick,
    pointwise,
    pooling,
    product,
    random,
    reduce,
    resample,
    shape,
    spectrum,
    window,
)  # fmt: skip

__all__ = [
    "create", "function", "index", "loss", "matrix", "norm", "pick", "pointwise", "pooling", "product", "random",
    "reduce", "resample", "shape", "spectrum", "window",
]  # fmt: skip
