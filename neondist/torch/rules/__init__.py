"""How operators are distributed; importing this package registers its rules.

pointwise: one index each. window: a bounded neighbourhood. resample: values between cells. index: cells moved. shape:
dimensions regrouped. reduce: a few numbers of the whole. norm: normalisations. product: matrix products and attention.
create: tensors made of nothing. function: autograd.Functions of users. random: keyed by the global index. loss: costs.
"""

from . import create, function, index, loss, norm, pointwise, product, random, reduce, resample, shape, window

__all__ = [
    "create",
    "function",
    "index",
    "loss",
    "norm",
    "pointwise",
    "product",
    "random",
    "reduce",
    "resample",
    "shape",
    "window",
]
