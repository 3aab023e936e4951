"""How operators are distributed; importing this package registers its rules.

pointwise: one index each. window: a bounded neighbourhood. resample: values between cells. index: cells moved. pick: by
the values of tensors. shape: dimensions regrouped. reduce: a few numbers of the whole. norm: normalisations. product:
matrix products and attention. matrix: linear algebra. spectrum: Fourier transforms, complex numbers. create: tensors
made of nothing. function: autograd.Functions of users. random: keyed by the global index. loss: costs.
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
    product,
    random,
    reduce,
    resample,
    shape,
    spectrum,
    window,
)

__all__ = [
    "create",
    "function",
    "index",
    "loss",
    "matrix",
    "norm",
    "pick",
    "pointwise",
    "product",
    "random",
    "reduce",
    "resample",
    "shape",
    "spectrum",
    "window",
]
