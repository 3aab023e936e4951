"""Hybrid of allreduce and parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

from ..registry.ranges import Count, Index
from .all_reduce import AllReduce
from .builder import StrategyBuilder
from .parameter_spec import ParameterSpec
from .server import PSLoadBalancing
from .strategy import ParameterStrategy


class Parallax(StrategyBuilder):
    """Allreduce of dense gradients; sparse parameters have owners, as in `PSLoadBalancing` (Kim et al. 2019).

    Parameters
    ----------
    chunk_size : int
        As in `AllReduce`.
    local_proxy_variable, sync, staleness
        As in `PS`, for sparse parameters.
    """

    def __init__(
        self, chunk_size: Count = 128, local_proxy_variable: bool = False, sync: bool = True, staleness: Index = 0
    ) -> None:
        self.dense_builder = AllReduce(chunk_size)
        self.sparse_builder = PSLoadBalancing(local_proxy_variable, sync, staleness)

    @property
    def needs_servers(self) -> bool:
        """Whether sparse parameters are updated without waiting for all replicas."""
        return self.sparse_builder.needs_servers

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return the allreduce of dense parameters, and the owners of sparse ones."""
        dense = self.dense_builder.assign([spec for spec in specs if not spec.sparse], replicas, servers)
        return dense | self.sparse_builder.assign([spec for spec in specs if spec.sparse], replicas, servers)
