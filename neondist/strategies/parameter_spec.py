"""Description of a parameter, from which strategies are built."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from operator import index

import numpy as np

from ..errors import ConfigError
from ..registry.arguments import check_value


@dataclass(frozen=True)
class ParameterSpec:
    """A trained parameter.

    Parameters
    ----------
    name : str
        Name, unique within a model, such as 'conv1/weights'.
    shape : sequence of int
        Global shape; () is a scalar.
    dtype : str
        A NumPy dtype name, or 'bfloat16'.
    sparse : bool
        Whether a step changes only a few rows, as in an embedding: the gradient is (ids, rows).

    Raises
    ------
    ConfigError
        If the name, an extent, the dtype or `sparse` is invalid.
    """

    name: str
    shape: Sequence[int]
    dtype: str = "float32"
    sparse: bool = False

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"parameter: invalid name {self.name!r}; expected a non-empty string")
        try:
            shape = tuple(map(index, self.shape))
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            problem = f"invalid shape {self.shape!r}; expected a sequence of integers of at least 0"
            raise ConfigError(f"parameter '{self.name}': {problem}")
        check_value(f"parameter '{self.name}': sparse", self.sparse, bool)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", str(self.dtype))
        _itemsize(self)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * _itemsize(self)


def _itemsize(spec: ParameterSpec) -> int:
    if spec.dtype == "bfloat16":
        return 2
    with suppress(TypeError):
        dtype = np.dtype(spec.dtype)
        if dtype.kind in "biufc":
            return dtype.itemsize
    raise ConfigError(f"parameter '{spec.name}': unknown dtype '{spec.dtype}'; expected for example float32")
