"""Sums of gradients over ranks in fewer bytes, with error feedback: the residual of a step is added in the next step.

Nothing is lost: the result and the residuals of all ranks add up to the exact sum, apart from rounding. All arrays are
flat arrays on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from ..arrays import rng
from ..arrays.precision import BFLOAT16, FLOAT16, ComputePrecision
from ..comm import Reductions

Shape = tuple[int, ...]


class SyncState(NamedTuple):
    """An array that synchronisation keeps from step to step.

    Attributes
    ----------
    name : str
        '<layer name>/<parameter>/<kind of state>'.
    same_on_all_ranks : bool
        Whether the array is the same on all ranks; otherwise only its sum over ranks matters.
    """

    name: str
    array: np.ndarray
    same_on_all_ranks: bool


class Compressor(ABC):
    """Compressed sums of the gradients of some parameters.

    Parameters
    ----------
    shapes : mapping of str to tuple
        Shapes of the parameters, whose gradients are contiguous.
    share_or_rank : float
        Share of the numbers that `TopK` sends, or rank of the matrices of `PowerSGD`.

    Attributes
    ----------
    residual : flat array
        Error feedback: the part that this rank has not sent yet.
    """

    def __init__(self, shapes: Mapping[str, Shape], share_or_rank: float, dtype: np.dtype) -> None:
        self.shapes, self.share_or_rank, self.dtype = dict(shapes), share_or_rank, dtype
        self.spans = list(pairwise(accumulate(map(prod, self.shapes.values()), initial=0)))
        self.residual = np.zeros(self.spans[-1][1], dtype)

    @staticmethod
    @abstractmethod
    def contribution_bytes(shape: Shape, share_or_rank: float, itemsize: int) -> int:
        """Return the bytes that a rank contributes to the sum of one parameter's gradient."""

    @abstractmethod
    def sum_over_ranks(self, reductions: Reductions, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum over all ranks, and the residual of this rank's gradients. Collective."""

    def store_state_for_next_step(self) -> None:
        """Store state for the next step, once the last sum is known to be finite."""
        return

    def split_by_parameter(self, flat: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each parameter's name and its part of a flat array, as a view of the parameter's shape."""
        for (name, shape), (start, stop) in zip(self.shapes.items(), self.spans, strict=True):
            yield name, flat[start:stop].reshape(shape)

    def sync_states(self) -> list[SyncState]:
        """Return the state kept from step to step, as views."""
        return [
            SyncState(f"{name}/error_feedback", part, False) for name, part in self.split_by_parameter(self.residual)
        ]


class HalfPrecisionCompressor(Compressor):
    """Base of compressors that send 16-bit numbers; each rank sums a slice in full precision.

    Attributes
    ----------
    precision : ComputePrecision
        Format of the 16-bit numbers.
    largest : float
        Largest finite 16-bit number; numbers outside [-largest, largest] are clipped.
    """

    precision: ComputePrecision
    largest: float

    @staticmethod
    def contribution_bytes(shape: Shape, share_or_rank: float, itemsize: int) -> int:
        """Return two bytes per number."""
        return 2 * prod(shape)

    def sum_over_ranks(self, reductions: Reductions, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum, and the rounding errors of this rank's gradients and of its slice of the sum."""
        codes = self.encode(gradients)
        gradients -= self.decode(codes)
        total, own_slice, error = reductions.sum_encoded("world", codes, self.encode, self.decode)
        gradients[own_slice] += error
        return self.decode(total), gradients

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Return the codes (uint16) of the nearest 16-bit numbers."""
        return self.precision.encode(array.clip(-self.largest, self.largest))

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return 16-bit codes as numbers of the gradients' dtype."""
        return self.precision.decode(codes).astype(self.dtype)


class Float16Compressor(HalfPrecisionCompressor):
    """IEEE half precision."""

    precision, largest = FLOAT16, 65504.0


class BFloat16Compressor(HalfPrecisionCompressor):
    """The most significant 16 bits of a float32, rounded to nearest (ties to even)."""

    precision, largest = BFLOAT16, 3.3895e38


class TopK(Compressor):
    """Entries of largest magnitude, as indices and values (Aji and Heafield 2017; Stich et al. 2018)."""

    @staticmethod
    def contribution_bytes(shape: Shape, share_or_rank: float, itemsize: int) -> int:
        """Return the bytes of indices and values."""
        return ceil(share_or_rank * prod(shape)) * (np.dtype(_index_dtype(prod(shape))).itemsize + itemsize)

    def sum_over_ranks(self, reductions: Reductions, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum, in rank order, of all ranks' largest entries, and the other entries of this rank."""
        index_dtype = _index_dtype(gradients.size)
        chosen = [start + self._indices_of_largest_magnitudes(gradients[start:stop]) for start, stop in self.spans]
        indices = np.concatenate(chosen).astype(index_dtype)
        sent = np.concatenate([indices.view(np.uint8), gradients[indices].view(np.uint8)])
        total = np.zeros_like(gradients)
        for message in reductions.gather("world", sent):
            total[message[: indices.nbytes].view(index_dtype)] += message[indices.nbytes :].view(self.dtype)
        gradients[indices] = 0
        return total, gradients

    def _indices_of_largest_magnitudes(self, gradient: np.ndarray) -> np.ndarray:
        least = gradient.size - ceil(self.share_or_rank * gradient.size)
        return np.sort(np.argpartition(np.abs(gradient), least)[least:]) if least else np.arange(gradient.size)


class PowerSGD(Compressor):
    """Low-rank matrix approximation, by one step of subspace iteration (Vogels, Karimireddy and Jaggi 2019).

    Attributes
    ----------
    right_factors : dict of str to array
        The right factor of each parameter's last sum, from which the next step's iteration starts.
    """

    def __init__(self, shapes: Mapping[str, Shape], share_or_rank: float, dtype: np.dtype) -> None:
        super().__init__(shapes, share_or_rank, dtype)
        self.right_factors: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            rows, cols = _matrix_shape(shape)
            factor_shape = cols, min(int(share_or_rank), rows, cols)
            random_values = rng.normal(rng.key("powersgd", name), np.arange(prod(factor_shape)))
            self.right_factors[name] = random_values.reshape(factor_shape).astype(dtype)

    @staticmethod
    def contribution_bytes(shape: Shape, share_or_rank: float, itemsize: int) -> int:
        """Return the bytes of both factors."""
        rows, cols = _matrix_shape(shape)
        return min(int(share_or_rank), rows, cols) * (rows + cols) * itemsize

    def sum_over_ranks(self, reductions: Reductions, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the projections onto the common left factor, and this rank's residual."""
        named_gradients = self.split_by_parameter(gradients)
        matrices = {name: part.reshape(_matrix_shape(part.shape)) for name, part in named_gradients}
        lefts = self._sum_factors_over_ranks(
            reductions, {name: matrix @ self.right_factors[name] for name, matrix in matrices.items()}
        )
        lefts = {name: np.linalg.qr(left.astype(np.float64))[0].astype(self.dtype) for name, left in lefts.items()}
        right_factors = {name: matrices[name].T @ left for name, left in lefts.items()}
        for name, matrix in matrices.items():
            matrix -= lefts[name] @ right_factors[name].T
        self._last_right_factors = self._sum_factors_over_ranks(reductions, right_factors)
        return np.concatenate(
            [(lefts[name] @ right.T).ravel() for name, right in self._last_right_factors.items()]
        ), gradients

    def store_state_for_next_step(self) -> None:
        """Keep the last right factors for the next step."""
        for name, right in self._last_right_factors.items():
            self.right_factors[name][...] = right

    def sync_states(self) -> list[SyncState]:
        """Return the residual and the right factors."""
        right_factors = [SyncState(f"{name}/powersgd", factor, True) for name, factor in self.right_factors.items()]
        return [*super().sync_states(), *right_factors]

    @staticmethod
    def _sum_factors_over_ranks(reductions: Reductions, factors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the sum of each factor over all ranks, using one allreduce for all factors."""
        flat = reductions.allreduce("world", np.concatenate([factor.ravel() for factor in factors.values()]))
        factor_ranges = pairwise(accumulate((factor.size for factor in factors.values()), initial=0))
        return {
            name: flat[start:stop].reshape(factor.shape)
            for (name, factor), (start, stop) in zip(factors.items(), factor_ranges, strict=True)
        }


COMPRESSORS_BY_NAME: dict[str, type[Compressor]] = {
    "fp16": Float16Compressor, "bf16": BFloat16Compressor, "topk": TopK, "powersgd": PowerSGD,
}  # fmt: skip


def create_compressor(specification: str, shapes: Mapping[str, Shape], dtype: np.dtype) -> Compressor:
    """Return the compressor for a canonical text, such as 'topk(0.01)', and some parameters."""
    compressor_class, share_or_rank = _parse_compressor(specification)
    return compressor_class(shapes, share_or_rank, dtype)


def compressed_bytes_if_smaller(specification: str, shape: Shape, itemsize: int) -> int | None:
    """Return the bytes of a parameter's compressed gradient; None if compression does not reduce them."""
    compressor_class, share_or_rank = _parse_compressor(specification)
    nbytes = compressor_class.contribution_bytes(shape, share_or_rank, itemsize)
    return nbytes if nbytes < prod(shape) * itemsize else None


def _parse_compressor(specification: str) -> tuple[type[Compressor], float]:
    name, _, share_or_rank = specification.rstrip(")").partition("(")
    return COMPRESSORS_BY_NAME[name], float(share_or_rank or 0)


def _index_dtype(size: int) -> type[np.integer]:
    return np.int32 if size < 1 << 31 else np.int64


def _matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape of a gradient as a matrix: its axes are divided so that rows + columns is smallest."""
    matrix_shapes = [(prod(shape[:at]), prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(matrix_shapes, key=sum)
