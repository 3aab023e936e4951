"""Rules for distributing operators; importing this package registers them.

pointwise: elementwise operators. window: convolution and unfolding. pooling: maxima and means of windows. resample:
interpolation. index: slicing, padding and other moves of cells. gather_scatter: indexing by tensor values. shape:
reshaping. reduce: reductions. norm: normalisation. product: matrix products and attention. matrix: linear algebra.
spectrum: Fourier transforms and complex numbers. creation: tensor creation. user_function: users' autograd.Functions.
random: random numbers keyed by the global index. recurrent: recurrent layers. loss: loss functions.
"""

from . import (
    creation,
    gather_scatter,
    index,
    loss,
    matrix,
    norm,
    pointwise,
    pooling,
    product,
    random,
    recurrent,
    reduce,
    resample,
    shape,
    spectrum,
    user_function,
    window,
)  # fmt: skip

__all__ = [
    "creation", "gather_scatter", "index", "loss", "matrix", "norm", "pointwise", "pooling", "product", "random",
    "recurrent", "reduce", "resample", "shape", "spectrum", "user_function", "window",
]  # fmt: skip
