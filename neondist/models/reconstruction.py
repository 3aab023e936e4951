"""The cost of a sparse autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..arrays.namespace import namespace


class AutoencoderReconstruction(NamedTuple):
    """Reconstruction of an autoencoder's input x, on this rank's tiles.

    Attributes
    ----------
    x : array (n, *tile, C)
    residual : array (n, *tile, C)
        Wᵀ(Wx) - x, including contributions of windows of neighbouring tiles.
    pooled : array (n, *pooled tile, channels)
        Sums of the squares of Wx over the pooling windows.
    """

    x: Any
    residual: Any
    pooled: Any


@dataclass(frozen=True)
class ReconstructionCost:
    """½‖x − Wᵀ(Wx)‖² + λ Σ sqrt(ε + pooled squares of Wx), of each sample (Le et al. 2012).

    Attributes
    ----------
    sparsity_weight : float
        λ.
    epsilon : float
        ε, which smooths the root at 0.
    """

    sparsity_weight: float
    epsilon: float

    def local_sum(self, y: AutoencoderReconstruction, targets: Any = None, sum_over_tiles: Any = None) -> Any:
        """Return the sum over all local cells, in float64, to be summed over ranks."""
        error = 0.5 * (y.residual * y.residual).sum(dtype="f8")
        return error + self.sparsity_weight * namespace(y.pooled).sqrt(self.epsilon + y.pooled).sum(dtype="f8")

    def pooled_gradient(self, pooled: Any) -> Any:
        """Return the gradient of `local_sum` with respect to the pooled squares."""
        return (0.5 * self.sparsity_weight) / namespace(pooled).sqrt(self.epsilon + pooled)

    def denominator_per_sample(self, shape: Any) -> int:
        """Return 1, since the cost of a sample is a sum over its cells."""
        return 1
