"""Builders of strategies in which owners of parameters apply the updates (parameter servers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from ..registry.ranges import Index
from .builder import StrategyBuilder
from .parameter_spec import ParameterSpec
from .partition import AxisPartition, balance_owners, even_partition, part_sizes, smallest_divisor, smallest_non_divisor
from .strategy import ParameterStrategy


class PS(StrategyBuilder):
    """Reduction of gradients to one owner, which updates all parameters; values are broadcast.

    Parameters
    ----------
    local_proxy_variable : bool
        Without effect, for compatibility with AutoDist: replicas always keep a copy of the values.
    sync : bool
        Whether a step waits for all replicas.
    staleness : int
        Number of steps by which the fastest replica may be ahead of the slowest one. Requires `sync` if not 0.

    Raises
    ------
    ConfigError
        If `staleness` is given without `sync`.
    """

    def __init__(self, local_proxy_variable: bool = False, sync: bool = True, staleness: Index = 0) -> None:
        if staleness and not sync:
            raise ConfigError(f"staleness: {staleness} needs sync=True; set sync=True or staleness=0")
        self.local_proxy_variable, self.sync, self.staleness = local_proxy_variable, sync, staleness

    @property
    def needs_servers(self) -> bool:
        """Whether updates do not wait for all replicas."""
        return not self.sync or self.staleness > 0

    def choose_partition(self, spec: ParameterSpec) -> AxisPartition | None:
        """Return the partition of a parameter; None: not partitioned."""
        return None

    def assign_owners(self, sizes: Mapping[str, Sequence[int]], servers: int) -> dict[str, list[int]]:
        """Return the owners of all parts, given their sizes in bytes."""
        return {name: [0] * len(parts) for name, parts in sizes.items()}

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return the partition of each parameter, and the owners of its parts."""
        partitions = {spec.name: self.choose_partition(spec) if spec.shape else None for spec in specs}
        owners = self.assign_owners({spec.name: part_sizes(spec, partitions[spec.name]) for spec in specs}, servers)
        return {
            name: ParameterStrategy("server", partitions[name], owners[name], sync=self.sync, staleness=self.staleness)
            for name in partitions
        }


class PSLoadBalancing(PS):
    """`PS` with several owners: whole parameters are distributed over them, balanced by bytes, largest first."""

    def assign_owners(self, sizes: Mapping[str, Sequence[int]], servers: int) -> dict[str, list[int]]:
        """Return the owners of all parts, given their sizes in bytes."""
        return balance_owners(sizes, servers)


class PartitionedPS(PSLoadBalancing):
    """Like `PSLoadBalancing`, but each parameter is split along its first axis into n parts.

    n is the smallest divisor above 1 of that axis's extent.
    """

    def choose_partition(self, spec: ParameterSpec) -> AxisPartition | None:
        """Return the partition of a parameter; None: not partitioned."""
        return even_partition(spec, 0, smallest_divisor(spec.shape[0]))


class UnevenPartitionedPS(PSLoadBalancing):
    """Like `PSLoadBalancing`, but each parameter is split along its first axis into n parts.

    n is the smallest integer between 1 and that axis's extent that does not divide it, or the extent if there is none.
    """

    def choose_partition(self, spec: ParameterSpec) -> AxisPartition | None:
        """Return the partition of a parameter; None: not partitioned."""
        return even_partition(spec, 0, smallest_non_divisor(spec.shape[0]))
