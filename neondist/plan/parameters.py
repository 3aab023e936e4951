"""The trained parameters of a model on a grid: owners, bytes of reductions and messages, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ..geometry import GridShape
from ..layers import Parameter
from ..parallel import FLAG_HEADER_LENGTH, ROWS_COMPRESSOR, compressed_bytes_if_smaller, row_message_bytes
from ..strategies import AllReduce, AutoStrategy, ParameterSpec, Strategy, StrategyBuilder
from ..strategies.shares import OwnerBoxes, compute_owner_boxes

SPARSE_HEADER_BYTES = 16  # bytes per rank of the header with the numbers of rows and elements that follow


@dataclass(frozen=True)
class ParameterPlan:
    """The trained parameters of a model of layers or a PyTorch module on every rank of a grid.

    Attributes
    ----------
    parameters : mapping of str to Parameter
        By full name.
    grid : GridShape
    dtype : numpy.dtype
    slots_per_parameter : int
        Elements of optimiser state per parameter element.
    requested_strategy : StrategyBuilder or Strategy, optional
        Default: all ranks sum all gradients, and update all parameters.
    """

    parameters: Mapping[str, Parameter]
    grid: GridShape
    dtype: np.dtype
    slots_per_parameter: int
    requested_strategy: StrategyBuilder | Strategy | None = None

    @cached_property
    def strategy(self) -> Strategy:
        """Partition, owners and synchronisation of each parameter.

        Raises
        ------
        ConfigError
            The strategy is for another model or more ranks, or cannot be executed within one MPI job.
        """
        requested = self.requested_strategy or AllReduce()
        if isinstance(requested, AutoStrategy):
            shared = sum(prod(item.shape) for item in self.untiled.values())
            tiled_bytes = (self.num_parameters_on(0) - shared) * self.dtype.itemsize * (2 + self.slots_per_parameter)
            requested = requested.with_network(self.untiled, tiled_bytes, self.slots_per_parameter)
        strategy = requested.build(self.specs, self.grid.size) if isinstance(requested, StrategyBuilder) else requested
        strategy.check_parameters_match(self.specs)
        strategy.check_needs_no_servers()
        return strategy

    @cached_property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """Parameter specifications for a strategy, in the order of the model."""
        dtype, items = str(self.dtype), self.parameters.items()
        return tuple(ParameterSpec(name, item.shape, dtype, bool(item.max_rows_per_sample)) for name, item in items)

    @cached_property
    def shares(self) -> dict[str, OwnerBoxes]:
        """Parts of parameters that ranks own, by full name; parameters partitioned over the tiles are omitted."""
        return compute_owner_boxes(self.strategy, self.grid.size, self.untiled)

    @cached_property
    def gradient_compressors(self) -> dict[str, str]:
        """Compressors of gradients, by full name; parameters that are tiled or have owners are omitted."""
        compressors, itemsize = dict[str, str](), self.dtype.itemsize
        for name, parameter in self.untiled.items():
            plan, shape = self.strategy.parameters[name], parameter.shape
            if plan.owners:
                continue
            if parameter.max_rows_per_sample:
                compressors[name] = ROWS_COMPRESSOR
            elif plan.compressor and compressed_bytes_if_smaller(plan.compressor, shape, itemsize) is not None:
                compressors[name] = plan.compressor
        return compressors

    @property
    def _compressors_and_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (kind, self.untiled[name].shape)
            for name, kind in self.gradient_compressors.items()
            if kind != ROWS_COMPRESSOR
        ]

    @cached_property
    def untiled(self) -> dict[str, Parameter]:
        """Parameters that are not partitioned over the tiles."""
        return {name: item for name, item in self.parameters.items() if not self.is_tiled(item)}

    def is_tiled(self, parameter: Parameter) -> bool:
        """Return whether a parameter is partitioned over the tiles."""
        return parameter.layout.is_partitioned and self.grid.tiles > 1

    @cached_property
    def num_split_parameters(self) -> int:
        """Number of parameters that are partitioned over the tiles or have owners."""
        return sum(map(self.is_tiled, self.parameters.values())) + len(self.shares)

    @cached_property
    def num_elements_with_owners(self) -> int:
        """Number of elements of all parameters with owners."""
        return sum(prod(share.shape) for share in self.shares.values())

    @property
    def splits_parameters(self) -> bool:
        """Whether several ranks own parts of one parameter."""
        return any(sum(box.size > 0 for box in share.boxes) > 1 for share in self.shares.values())

    def num_parameters_on(self, rank: int) -> int:
        """Return a rank's number of parameter elements: whole untiled parameters, and its parts of tiled parameters."""
        return sum(item.elements_on(self.grid, rank % self.grid.tiles) for item in self.parameters.values())

    def reduction_bytes(self, rank: int, num_norms: int = 0) -> int:
        """Return the bytes that a rank contributes to reductions in a training step, including control flags.

        Parameters
        ----------
        num_norms : int
            Number of norms that the optimiser sums over the ranks.
        """
        tile = rank % self.grid.tiles
        untiled_elements, tiled_elements = (
            sum(item.elements_on(self.grid, tile) for item in self.parameters.values() if self.is_tiled(item) is tiled)
            for tiled in (False, True)
        )
        untiled_elements -= sum(self.untiled[name].elements_on(self.grid, tile) for name in self.gradient_compressors)
        untiled_elements -= self.num_elements_with_owners
        itemsize = self.dtype.itemsize
        packed = sum(compressed_bytes_if_smaller(*each, itemsize) or 0 for each in self._compressors_and_shapes)
        summed_elements = (FLAG_HEADER_LENGTH + untiled_elements) * (self.grid.size > 1)
        summed_elements += tiled_elements * (self.grid.replicas > 1)
        sums_norms = (self.grid.size if self.shares else self.grid.tiles) > 1
        return itemsize * summed_elements + packed * (self.grid.size > 1) + 8 * num_norms * sums_norms

    def redistribution_bytes(self, rank: int, samples: int = 0) -> int:
        """Return the bytes that a rank sends in a training step: gradients to their owners, and owned values.

        For sparse parameters the result is an upper bound, given the number of samples of the rank's replica.
        """
        sparse_names = {
            name
            for name, item in self.untiled.items()
            if item.max_rows_per_sample and (name not in self.shares or self.shares[name].flat_ranges is not None)
        }
        dense = [share for name, share in self.shares.items() if name not in sparse_names]
        num_owned, num_total = sum(share.boxes[rank].size for share in dense), sum(prod(share.shape) for share in dense)
        args = self.grid, samples, self.dtype.itemsize
        sparse = [(self.untiled[name], self.shares.get(name)) for name in sparse_names]
        sparse_bytes = sum(_max_sparse_bytes_sent(item, share, rank, *args) for item, share in sparse)
        return self.dtype.itemsize * (num_total - num_owned + num_owned * (self.grid.size - 1)) + sparse_bytes

    def memory(self, rank: int) -> int:
        """Return the bytes of parameters, gradients and optimiser state on a rank."""
        remote = self.num_elements_with_owners - sum(share.boxes[rank].size for share in self.shares.values())
        feedback = sum(prod(shape) for _, shape in self._compressors_and_shapes)
        return self.dtype.itemsize * (
            self.num_parameters_on(rank) * (2 + self.slots_per_parameter) - remote * self.slots_per_parameter + feedback
        )

    def max_memory_of(self, tile: int) -> int:
        """Return the maximum of `memory` over the ranks of a tile in all replicas."""
        replicas = range(self.grid.replicas if self.shares else 1)
        return max(self.memory(replica * self.grid.tiles + tile) for replica in replicas)

    def memory_traffic(self, rank: int) -> int:
        """Return a lower bound on the bytes that an update reads and writes on a rank."""
        return self.dtype.itemsize * (3 + 2 * self.slots_per_parameter) * self.num_parameters_on(rank)


def _max_sparse_bytes_sent(
    parameter: Parameter, share: OwnerBoxes | None, rank: int, grid: GridShape, samples: int, itemsize: int
) -> int:
    """Return an upper bound on the bytes that a rank sends in a step for a sparse parameter.

    Parameters
    ----------
    share : OwnerBoxes or None
        Parts of the owners; None: all ranks receive all rows.
    samples : int
        Samples of the rank's replica.
    """
    num_rows, row_length, num_other_ranks = parameter.shape[0], prod(parameter.shape[1:]), grid.size - 1
    num_used_rows = min(num_rows, parameter.max_rows_per_sample * samples)
    if not num_other_ranks:
        return 0
    if share is None:
        return num_other_ranks * (SPARSE_HEADER_BYTES + row_message_bytes(num_used_rows, row_length, itemsize))
    own = min(num_rows, -(-share.boxes[rank].size // row_length) + 1)  # + 1: a part may begin and end within rows
    gradient_bytes = row_message_bytes(num_used_rows + num_other_ranks, row_length, itemsize)
    value_bytes = num_other_ranks * row_message_bytes(own, row_length, itemsize)
    return 2 * num_other_ranks * SPARSE_HEADER_BYTES + gradient_bytes + value_bytes
