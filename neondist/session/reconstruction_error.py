"""The error of an autoencoder's reconstruction, as a share of its input's variance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..datasets import Split
    from ..models import Autoencoder, Reconstruction


class ReconstructionError:
    """‖x − Wᵀ(Wx)‖² over ‖x − mean of x‖², both summed over samples and cells; the mean is each cell's own.

    `evaluate` takes it as a metric, of outputs that are a Reconstruction.

    Parameters
    ----------
    stage : Autoencoder
    split : Split
        What the mean is over; collective.
    batch_size : int
        Samples per pass, over all replicas.
    """

    name = "reconstruction_error"

    def __init__(self, stage: Autoencoder, split: Split, batch_size: int) -> None:
        grid, total = stage.grid, np.zeros(stage.output.local_shape[1:])
        for start in range(0, len(split), batch_size):
            batch = np.arange(start, min(start + batch_size, len(split)))
            lo, hi = grid.sample_range(len(batch))
            total += stage.inputs(split.images(batch[lo:hi], stage.dtype)).sum(axis=0, dtype=np.float64)
        grid.replica_comm.allreduce(total)
        self.mean = (total / max(1, len(split))).astype(stage.dtype)

    def measure(self, y: Reconstruction, targets: np.ndarray | None = None) -> tuple[float, float]:
        """Return the two sums over everything local."""
        around = y.x - self.mean
        return _squares(y.residual), _squares(around)


def _squares(array: np.ndarray) -> float:
    return float(np.sum(array * array, dtype=np.float64))
