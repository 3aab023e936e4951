"""Choice of the cheapest exact scheme of each layer on a grid, by the planner's cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from ..errors import ConfigError
from ..geometry import GridShape
from ..geometry.partition import part_range
from ..halo import as_scheme, scheme_text
from ..layers import Layer, Node
from ..system.machine import Machine, MachineProfile
from .planner import (
    LayerWithRegions,
    can_compute_halo_cells,
    cheapest_ranges,
    halo_seconds_if_gathered,
    overhead_seconds,
)
from .segments import Chain, is_layer, is_pointwise, layers_with_regions, windowed_layer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SchemeChoice:
    """The scheme of one layer.

    Attributes
    ----------
    layer, scheme : str
        Name of the layer, and its scheme as text.
    seconds, halo_scheme_seconds : float
        Time of its exchange and redundant computation in a training step, and the same time with the scheme `halo`.
    """

    layer: str
    scheme: str
    seconds: float
    halo_scheme_seconds: float


def choose_schemes(chain: Node, input_shape: Shape, grid: GridShape, profile: MachineProfile) -> list[SchemeChoice]:
    """Return the cheapest exact scheme of every layer with a halo on the grid.

    Candidates: `halo` with scattered or gathered gradients for a single layer; `deep_halo` for a
    segment; `overlap_tile` for a segment that reads the image, outside containers. A segment stays within its chain.
    """
    chains = enumerate(chain.chains_with_input_shapes(input_shape))
    return [
        choice
        for number, links in chains
        for halo_layers in _runs_of_joinable_layers(links, grid)
        for choice in _SegmentSearch(links, halo_layers, grid, profile, is_first=number == 0).choose_layer_schemes()
    ]


def machine_profile_for(
    machine: Machine,
    grid: GridShape,
    batch_size: int,
    itemsize: int,
    seconds_per_cell: Mapping[str, float] | None = None,
) -> MachineProfile:
    """Return the profile of a machine for the tiles of a grid and the samples of its largest replica.

    Parameters
    ----------
    seconds_per_cell : mapping of str to float, optional
        Measured times, as in `MachineProfile`.
    """
    samples = max(1, part_range(batch_size, grid.replicas, 0)[1])
    profile = machine.planner_profile(grid.tiles)
    return replace(
        profile, samples_per_replica=samples, itemsize=itemsize, seconds_per_cell=dict(seconds_per_cell or {})
    )


def set_schemes(layers: Iterable[Layer], schemes: Mapping[str, str]) -> bool:
    """Set the schemes of layers, by name, before their model is built; return whether any scheme changed.

    Raises
    ------
    ConfigError
        A layer does not exist, or a scheme is invalid.
    """
    layer_by_name, any_changed = {str(layer.name): layer for layer in layers}, False
    for name, scheme_name in schemes.items():
        if name not in layer_by_name:
            raise ConfigError(f"schemes: layer '{name}' does not exist in the model; plan again for this model")
        layer, scheme = layer_by_name[name], as_scheme(scheme_name)
        any_changed |= layer.scheme is None or scheme_text(scheme) != scheme_text(layer.scheme)
        layer.scheme = scheme
    return any_changed


def _runs_of_joinable_layers(links: Chain, grid: GridShape) -> Iterator[list[int]]:
    """Yield the indices of layers with halos, grouped into runs within which segments may be formed."""
    halo_layers: list[int] = []
    for at, (node, shape) in enumerate(links):
        if windowed_layer(node, shape, grid) is not None:
            halo_layers.append(at)
        elif halo_layers and not is_pointwise(node, shape, grid):
            yield halo_layers
            halo_layers = []
    if halo_layers:
        yield halo_layers


class _SegmentSearch:
    """Search for the cheapest division into segments of a chain's layers with halos, at `halo_layers`."""

    def __init__(
        self, links: Chain, halo_layers: Sequence[int], grid: GridShape, profile: MachineProfile, is_first: bool
    ) -> None:
        self.links, self.halo_layers, self.grid = links, halo_layers, grid
        self.profile, self.is_first = profile, is_first
        self.can_join_segment = [
            is_layer(node) and can_compute_halo_cells(node.leaves[0], shape) for node, shape in links
        ]
        self.reads_image = is_first and all(is_pointwise(node, shape, grid) for node, shape in links[: halo_layers[0]])

    def choose_layer_schemes(self) -> list[SchemeChoice]:
        """Return the choice of each layer."""
        choices, num_halo_layers = [], len(self.halo_layers)
        for first, last in cheapest_ranges(lambda a, b: sum(self._best_segment_scheme(a, b)[1]), num_halo_layers):
            scheme, seconds = self._best_segment_scheme(first, last)
            for link_index, cost in zip(self.halo_layers[first : last + 1], seconds, strict=True):
                node, shape = self.links[link_index]
                single_layer = [LayerWithRegions(node.leaves[0], shape)]
                halo_scheme_seconds = sum(
                    overhead_seconds(self.profile, single_layer, self.grid, self._needs_input_gradient(link_index))
                )
                choices.append(SchemeChoice(str(node.name), scheme, cost, halo_scheme_seconds))
        return choices

    def _best_segment_scheme(self, first: int, last: int) -> tuple[str, list[float]]:
        """Return the best scheme of a segment and the cost of each of its layers with a halo."""
        begin, end = self.halo_layers[first], self.halo_layers[last] + 1
        segment, needs_dx, options = self.links[begin:end], self._needs_input_gradient(begin), []
        if first == last:
            single_layer = layers_with_regions(segment, self.grid, is_single=True)
            options.append(("halo", overhead_seconds(self.profile, single_layer, self.grid, needs_dx)))
            if needs_dx:
                seconds = halo_seconds_if_gathered(self.profile, single_layer[0], self.grid)
                options.append(("halo(backward=gather)", [seconds]))
        elif all(self.can_join_segment[begin:end]):
            layers = layers_with_regions(segment, self.grid, extends_input=False)
            costs = overhead_seconds(self.profile, layers, self.grid, needs_dx)
            options.append(
                (f"deep_halo(layers={last - first + 1})", self._costs_per_halo_layer(costs, begin, first, last))
            )
        if self.reads_image and first == 0 and all(self.can_join_segment[:end]):
            leading_links = self.links[:end]
            scheme = "overlap_tile" + "(statistics=global)" * any(
                node.leaves[0].reduces_over_image(shape) for node, shape in leading_links
            )
            layers = layers_with_regions(leading_links, self.grid, extends_input=True)
            costs = overhead_seconds(self.profile, layers, self.grid, needs_dx)
            options.append((scheme, self._costs_per_halo_layer(costs, 0, first, last)))
        return min(options, key=lambda pair: sum(pair[1]), default=("halo", [inf]))

    def _needs_input_gradient(self, link_index: int) -> bool:
        """Return whether the input of a layer needs a gradient: every input except the images does."""
        return not self.is_first or link_index > 0

    def _costs_per_halo_layer(self, costs: Sequence[float], begin: int, first: int, last: int) -> list[float]:
        """Return the costs of the layers with halos, including those of the layers between (or before) them."""
        bounds = [begin, *self.halo_layers[first + 1 : last + 1], begin + len(costs)]
        return [sum(costs[a - begin : b - begin]) for a, b in pairwise(bounds)]
