"""The trained parameters of a model on a grid: owners, bytes of sums and messages, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ..geometry import GridShape
from ..layers import Parameter
from ..parallel import HEADER, ROWS
from ..strategies import AllReduce, ParameterSpec, Strategy, StrategyBuilder
from ..strategies.shares import Share, shares_of
from .gradient_costs import bytes_reduced, compressors_of, most_rows_sent


@dataclass(frozen=True)
class ParameterPlan:
    """The trained parameters of a model of either kind on every rank of a grid.

    Attributes
    ----------
    parameters : mapping of str to Parameter
        By full name.
    grid : GridShape
    dtype : numpy.dtype
    slots : int
        Numbers that the optimiser keeps of each trained one.
    chosen : StrategyBuilder or Strategy, optional
        Default: all ranks sum all gradients, and update all parameters.
    """

    parameters: Mapping[str, Parameter]
    grid: GridShape
    dtype: np.dtype
    slots: int
    chosen: StrategyBuilder | Strategy | None = None

    @cached_property
    def strategy(self) -> Strategy:
        """Partition, owners and synchronisation of each parameter.

        Raises
        ------
        ConfigError
            The strategy is for another model or more ranks, or cannot be executed within one MPI job.
        """
        chosen = self.chosen or AllReduce()
        found = chosen.build(self.specs, self.grid.size) if isinstance(chosen, StrategyBuilder) else chosen
        found.check_model(self.specs)
        found.check_synchronous()
        return found

    @cached_property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """Parameter specifications for a strategy, in the order of the model."""
        given = self.parameters.items()
        return tuple(ParameterSpec(name, one.shape, str(self.dtype), bool(one.sparse)) for name, one in given)

    @cached_property
    def shares(self) -> dict[str, Share]:
        """The parts of parameters that ranks own, by full name; tiles hold those that are cut."""
        return shares_of(self.strategy, self.grid.size, self.whole)

    @cached_property
    def compressors(self) -> dict[str, str]:
        """Compressors of gradients by full parameter name; gradients of a tile's parameters are not compressed."""
        return compressors_of(self.strategy, self.whole, self.dtype.itemsize)

    @cached_property
    def whole(self) -> dict[str, Parameter]:
        """The parameters that are not cut over the tiles."""
        return {name: one for name, one in self.parameters.items() if not self.cut(one)}

    def cut(self, parameter: Parameter) -> bool:
        """Return whether the parts of tiles differ."""
        return parameter.layout.cut and self.grid.tiles > 1

    @cached_property
    def parts(self) -> int:
        """The number of parameters of which ranks update different parts."""
        return sum(map(self.cut, self.parameters.values())) + len(self.shares)

    def owned_by(self, rank: int) -> int:
        """Return how many numbers of the parameters that have owners a rank owns."""
        return sum(share.boxes[rank].size for share in self.shares.values())

    @cached_property
    def owned(self) -> int:
        """The numbers of all parameters that have owners."""
        return sum(prod(share.shape) for share in self.shares.values())

    @property
    def partitioned(self) -> bool:
        """Whether several ranks own parts of one parameter."""
        return any(sum(box.size > 0 for box in share.boxes) > 1 for share in self.shares.values())

    def held_by(self, rank: int) -> int:
        """Return the trained numbers that a rank keeps: all of them, or those of its tile."""
        return sum(one.size_on(self.grid, rank % self.grid.tiles) for one in self.parameters.values())

    def reduced(self, rank: int, norms: int = 0) -> int:
        """Return the bytes that a rank gives into sums over ranks in a training step, control flags included.

        Parameters
        ----------
        norms : int
            Numbers that the optimiser sums over the ranks.
        """
        tile = rank % self.grid.tiles
        shared, own = (
            sum(one.size_on(self.grid, tile) for one in self.parameters.values() if self.cut(one) is cut)
            for cut in (False, True)
        )
        shared -= sum(self.whole[name].size_on(self.grid, tile) for name in self.compressors)
        packed = bytes_reduced(self.compressors, self.whole, self.dtype.itemsize) * (self.grid.size > 1)
        summed = (HEADER + shared - self.owned) * (self.grid.size > 1) + own * (self.grid.replicas > 1)
        several = (self.grid.size if self.shares else self.grid.tiles) > 1
        return self.dtype.itemsize * summed + packed + 8 * norms * several

    def redistributed(self, rank: int, samples: int = 0) -> int:
        """Return the bytes that a rank sends in a training step: gradients to their owners, and values that it owns.

        Of sparse parameters it is the most that it may send for so many samples of its replica.
        """
        dense = [share for name, share in self.shares.items() if not self.parameters[name].sparse]
        owned, whole = sum(share.boxes[rank].size for share in dense), sum(prod(share.shape) for share in dense)
        how = self.grid, samples, self.dtype.itemsize
        rows = sum(most_rows_sent(one, self.shares.get(n), rank, *how) for n, one in self.whole.items() if one.sparse)
        return self.dtype.itemsize * (whole - owned + owned * (self.grid.size - 1)) + rows

    def memory(self, rank: int) -> int:
        """Return the bytes of parameters, gradients and the optimiser's arrays on a rank."""
        of_others = self.owned - self.owned_by(rank)
        feedback = sum(prod(self.whole[name].shape) for name, how in self.compressors.items() if how != ROWS)
        return self.dtype.itemsize * (self.held_by(rank) * (2 + self.slots) - of_others * self.slots + feedback)

    def most_memory(self, tile: int) -> int:
        """Return the same of the replica whose rank of a tile holds most."""
        replicas = range(self.grid.replicas if self.shares else 1)
        return max(self.memory(replica * self.grid.tiles + tile) for replica in replicas)

    def moved(self, rank: int) -> int:
        """Return the bytes that an update reads and writes on a rank, at least."""
        return self.dtype.itemsize * (3 + 2 * self.slots) * self.held_by(rank)
