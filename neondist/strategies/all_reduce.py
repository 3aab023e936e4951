"""Builders of strategies that sum gradients over all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import rng
from ..registry.ranges import Count, Index
from .builder import StrategyBuilder
from .compressor import normalise_compressor
from .parameter_spec import ParameterSpec
from .partition import balance_owners, even_partition, part_sizes, smallest_divisor
from .strategy import ParameterStrategy


class AllReduce(StrategyBuilder):
    """Allreduce of gradients; every replica updates all parameters.

    Parameters
    ----------
    chunk_size : int
        Number of parameters whose gradients are summed together, in the order of the model.
    compressor : None, 'fp16', 'bf16', 'topk(SHARE)' or 'powersgd(RANK)'
        Compression of gradients, with error feedback.
    """

    def __init__(self, chunk_size: Count = 128, compressor: str | None = None) -> None:
        self.chunk_size, self.compressor = chunk_size, normalise_compressor(compressor)

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return one group per chunk."""
        return {
            spec.name: ParameterStrategy("allreduce", group=at // self.chunk_size, compressor=self.compressor)
            for at, spec in enumerate(specs)
        }


class PartitionedAllReduce(StrategyBuilder):
    """Reduce-scatter of gradients, update of each part of a parameter by its owner, and allgather of the values.

    Parameters are divided along their first axis; the number of parts is the smallest divisor above 1 of the extent.

    Parameters
    ----------
    chunk_size : int
        Number of parameters whose gradients are summed together.
    """

    def __init__(self, chunk_size: Count = 128) -> None:
        self.chunk_size = chunk_size

    def choose_axis(self, spec: ParameterSpec) -> int:
        """Return the axis along which a parameter is divided."""
        return 0

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return the parts, balanced over the replicas by bytes."""
        parts = {}
        for spec in specs:
            axis = self.choose_axis(spec)
            parts[spec.name] = even_partition(spec, axis, smallest_divisor(spec.shape[axis])) if spec.shape else None
        owners = balance_owners({spec.name: part_sizes(spec, parts[spec.name]) for spec in specs}, replicas)
        return {
            spec.name: ParameterStrategy("allreduce", parts[spec.name], owners[spec.name], group=at // self.chunk_size)
            for at, spec in enumerate(specs)
        }


class RandomAxisPartitionAR(PartitionedAllReduce):
    """Reduce-scatter of gradients, as in `PartitionedAllReduce`, along a random axis of more than one element.

    Sparse parameters are divided along their first axis.

    Parameters
    ----------
    chunk_size : int
        Number of parameters whose gradients are summed together.
    seed : int
        Seed for choosing axes, combined with each parameter's name.
    """

    def __init__(self, chunk_size: Count = 128, seed: Index = 0) -> None:
        super().__init__(chunk_size)
        self.seed = seed

    def choose_axis(self, spec: ParameterSpec) -> int:
        """Return the axis along which a parameter is divided."""
        axes = [axis for axis, extent in enumerate(spec.shape) if extent > 1]
        if spec.sparse or not axes:
            return 0
        return axes[rng.key(self.seed, "partition", spec.name) % len(axes)]


class ShardedOptimizer(StrategyBuilder):
    """Reduce-scatter of gradients over even slices of the flat buffer of all parameters.

    Each replica updates its own slice, keeps optimiser slots only for that slice, and receives the other slices (ZeRO
    stage 1, Rajbhandari et al. 2020).
    """

    def __init__(self) -> None:
        pass

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return all replicas as owners, without a partition along an axis: the flat buffer is divided into slices."""
        owners = list(range(replicas))
        return {spec.name: ParameterStrategy("allreduce", owners=list(owners)) for spec in specs}
