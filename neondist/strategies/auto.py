"""Selection, by a cost model, of the strategy with the fastest step among those that fit in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigError
from ..system.machine import Machine, read_machine
from ..system.memory import format_bytes, parse_bytes
from .all_reduce import AllReduce, PartitionedAllReduce, ShardedOptimizer
from .builder import StrategyBuilder, format_builder
from .parameter_spec import ParameterSpec
from .partition import part_sizes
from .server import PS, PSLoadBalancing
from .strategy import ParameterStrategy, Strategy

Choice = TypeVar("Choice")

DEFAULT_SLOTS_PER_PARAMETER = 2
"""Number of slots assumed if the optimiser is unknown: two, as for Adam."""


def create_candidate_builders() -> list[StrategyBuilder]:
    """Return the exact synchronous builders that a planner considers."""
    return [AllReduce(), PartitionedAllReduce(), ShardedOptimizer(), PS(), PSLoadBalancing()]


@dataclass(frozen=True)
class SyncCosts:
    """Costs of synchronising a step.

    Attributes
    ----------
    seconds : float
        Time of collectives and of the update.
    held_bytes : int
        Bytes of parameters, gradients and the optimiser's arrays on the rank that needs the most.
    """

    seconds: float
    held_bytes: int


def estimate_sync_costs(
    parameters: dict[str, ParameterStrategy], specs: Sequence[ParameterSpec], ranks: int, slots: int, machine: Machine
) -> SyncCosts:
    """Return the costs of synchronising the gradients of some parameters over ranks, and of updating them.

    Gradients without owners take one allreduce per group. Owners receive gradients from all other ranks and send back
    values; the rank that owns the most finishes last.
    """
    whole_bytes, owned_bytes, sliced, num_slices, itemsize, groups = 0, 0, 0, 1, 1, set[int]()
    owned = [0] * ranks
    for spec in specs:
        parameter = parameters[spec.name]
        if not parameter.owners:
            whole_bytes += spec.nbytes
            groups.add(parameter.group)
            continue
        owned_bytes += spec.nbytes
        if len(parameter.owners) > 1 and parameter.partition is None:  # even slices of all these parameters
            sliced += spec.size
            num_slices, itemsize = len(parameter.owners), spec.nbytes // max(1, spec.size)
            continue
        for owner, nbytes in zip(parameter.owners, part_sizes(spec, parameter.partition), strict=True):
            owned[owner] += nbytes
    max_bytes, link = max(owned) + (-(-sliced // num_slices) * itemsize if sliced else 0), machine.slowest_link(ranks)
    seconds = sum(machine.allreduce_seconds(ranks, whole_bytes / len(groups)) for _ in groups)
    if owned_bytes and ranks > 1:
        seconds += 2 * link.message_seconds(ranks - 1, max(owned_bytes - max_bytes, (ranks - 1) * max_bytes))
    seconds += (3 + 2 * slots) * (whole_bytes + max_bytes) / machine.memory_bandwidth
    return SyncCosts(seconds, 2 * (whole_bytes + owned_bytes) + slots * (whole_bytes + max_bytes))


class AutoStrategy(StrategyBuilder):
    """Selection of the builder with the fastest step by a cost model of links and memory; `Auto` in files.

    Ties are broken by name. `neondist plan` chooses the grid as well, for a machine and a network.

    Parameters
    ----------
    memory : int or str, optional
        Limit on the parameters, gradients and optimiser arrays (two per parameter) of a rank.
    machine : str, optional
        Machine file written by `neondist bench model calibrate`; default: typical values.
    """

    _short_names = ("Auto",)
    _compared_names: Collection[str] | None = None
    _tiled_bytes, _slots_per_parameter = 0, DEFAULT_SLOTS_PER_PARAMETER

    def __init__(self, memory: int | str | None = None, machine: str | None = None) -> None:
        self.limit = None if memory is None else parse_bytes("memory", memory)
        self.machine = Machine.default() if machine is None else read_machine(Path(machine))
        self._is_machine_measured = machine is not None

    def on_nodes(self, ranks_by_node: Sequence[int], network_gbits: float | None) -> AutoStrategy:
        """Return a copy for other nodes and, unless the machine is measured, their network bandwidth in Gbit/s."""
        builder = copy(self)
        builder.machine = self.machine.on_nodes(ranks_by_node, None if self._is_machine_measured else network_gbits)
        return builder

    def with_network(self, untiled_names: Collection[str], tiled_bytes: int, slots_per_parameter: int) -> AutoStrategy:
        """Return a copy that compares the costs of parameters that all tiles share, for a network and an optimiser.

        Parameters
        ----------
        untiled_names : collection of str
            Names of these parameters.
        tiled_bytes : int
            Bytes of the other parameters, their gradients and optimiser state on a rank.
        """
        builder = copy(self)
        builder._compared_names, builder._tiled_bytes = untiled_names, tiled_bytes
        builder._slots_per_parameter = slots_per_parameter
        return builder

    def assign(self, specs: Sequence[ParameterSpec], replicas: int, servers: int) -> dict[str, ParameterStrategy]:
        """Return the assignment of the best builder."""
        ranks = max(replicas, servers)
        assignments = {
            format_builder(builder): builder.assign(specs, replicas, servers) for builder in create_candidate_builders()
        }
        compared_specs = [spec for spec in specs if self._compared_names is None or spec.name in self._compared_names]
        costs = {
            name: estimate_sync_costs(rules, compared_specs, ranks, self._slots_per_parameter, self.machine)
            for name, rules in assignments.items()
        }
        held_bytes = [self._tiled_bytes + cost.held_bytes for cost in costs.values()]
        fitting_names = self.select_fitting(list(costs), held_bytes)
        return assignments[min(fitting_names, key=lambda name: (costs[name].seconds, name))]

    def select_fitting(self, choices: Sequence[Choice], held_bytes: Sequence[int]) -> list[Choice]:
        """Return the choices within the memory limit, given the bytes of each; ConfigError if there is none."""
        fitting = [
            choice for choice, held in zip(choices, held_bytes, strict=True) if self.limit is None or held <= self.limit
        ]
        if not fitting:
            raise ConfigError(
                f"strategy: Auto: every strategy needs at least {format_bytes(min(held_bytes))} per rank; raise memory"
                " or add ranks"
            )
        return fitting


def resolve_grid(strategy: Strategy | StrategyBuilder | None, grid: dict[str, int]) -> dict[str, int]:
    """Return the factors of a grid or, if it has none, the factors that a strategy specifies."""
    return dict(strategy.grid) if isinstance(strategy, Strategy) and strategy.grid and not grid else grid
