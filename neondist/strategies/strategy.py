"""Strategies as values that can be compared, printed, saved as YAML and loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Literal

import yaml

from ..errors import ConfigError
from ..io.files import write_text
from ..terminal.console import counted
from ..yaml_nodes import Node, join_path, node_error, parse_file, typed_value
from .compressor import normalise_compressor
from .parameter_spec import ParameterSpec
from .partition import AxisPartition, part_sizes

FORMAT_VERSION = 1
MAX_FILE_BYTES, MAX_EXPANDED_NODES = 64 << 20, 4_000_000
"""Limits of a strategy file, enough for hundreds of thousands of parameters."""


@dataclass(frozen=True)
class ParameterStrategy:
    """Partition, owners and synchronisation of one parameter.

    Attributes
    ----------
    kind : 'allreduce' or 'server'
        Whether its gradient is summed over all replicas, or reduced to owners that update it.
    partition : (axis, [extents]), or None
    owners : list of int
        The owner of each part. Several owners without a partition hold even slices of the flat buffer of all
        parameters; no owner: every replica updates the whole.
    group : int
        Number of its reduction group: the gradients of a group are summed in one call.
    compressor : str or None
    sync : bool
    staleness : int
    """

    kind: Literal["allreduce", "server"]
    partition: AxisPartition | None = None
    owners: list[int] = field(default_factory=list)
    group: int = 0
    compressor: str | None = None
    sync: bool = True
    staleness: int = 0

    @property
    def partition_text(self) -> str:
        """The partition as text: 'axis 0: 5+5', or '-'."""
        return "-" if self.partition is None else f"axis {self.partition[0]}: {_join_numbers(self.partition[1], '+')}"

    @property
    def owners_text(self) -> str:
        """The owners as text: '0,1', or 'all'."""
        return _join_numbers(self.owners, ",") if self.owners else "all"


@dataclass(frozen=True)
class Strategy:
    """Partition, owners and synchronisation of all parameters of a model.

    Attributes
    ----------
    builder : str
        The builder that created the strategy, as text.
    replicas, servers : int
        Number of replicas, and of devices that may own parameters.
    specs : dict of str to ParameterSpec
        The parameters, in the order of the model.
    parameters : dict of str to ParameterStrategy
    grid : dict of str to int, optional
        Replicas, planes, rows and cols chosen by a planner.
    schemes : dict of str to str, optional
        Border schemes chosen by a planner, by layer name.
    file_lines : dict of str to str
        'FILE:LINE' of each parameter, of `schemes`, and of the file under ''; empty if it was not loaded from a file.
    """

    builder: str
    replicas: int
    servers: int
    specs: dict[str, ParameterSpec]
    parameters: dict[str, ParameterStrategy]
    grid: dict[str, int] | None = None
    schemes: dict[str, str] | None = None
    file_lines: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def create_error(self, problem: str, name: str = "") -> ConfigError:
        """Return an error about a parameter, or all parameters, with its location in the strategy file."""
        place = self.file_lines.get(name) or self.file_lines.get("")
        return ConfigError(f"{place or 'strategy'}: {problem}")

    @property
    def digest(self) -> str:
        """Hash of the strategy; equal for equal strategies."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    @property
    def bytes_per_owner(self) -> list[int]:
        """Bytes of parameters per owner; empty if every replica holds all of them."""
        owners = max(self.replicas, self.servers)
        owned_bytes = [0] * owners
        for name, parameter in self.parameters.items():
            spec = self.specs[name]
            if len(parameter.owners) > 1 and parameter.partition is None:
                for owner in parameter.owners:
                    owned_bytes[owner] += spec.nbytes // len(parameter.owners)
                continue
            for owner, nbytes in zip(parameter.owners, part_sizes(spec, parameter.partition), strict=False):
                owned_bytes[owner] += nbytes
        return owned_bytes if any(parameter.owners for parameter in self.parameters.values()) else []

    def check_parameters_match(self, parameters: Iterable[ParameterSpec]) -> None:
        """Raise ConfigError if the strategy is for other parameters, naming the first difference."""
        others = {spec.name: spec for spec in parameters}
        for name, spec in others.items():
            if name not in self.specs:
                raise self.create_error(f"no entry for parameter '{name}'; build the strategy for this model")
            for attribute in ("shape", "dtype", "sparse"):
                own, other = getattr(self.specs[name], attribute), getattr(spec, attribute)
                if own != other:
                    problem = f"parameter '{name}' has {attribute} {own}, but {other} in the model"
                    raise self.create_error(f"{problem}; build the strategy for this model", name)
        for name in self.specs:
            if name not in others:
                raise self.create_error(
                    f"parameter '{name}' is not in the model; build the strategy for this model", name
                )

    @property
    def needs_servers(self) -> bool:
        """Whether updates of any parameter do not wait for all replicas."""
        return any(not parameter.sync or parameter.staleness for parameter in self.parameters.values())

    def check_needs_no_servers(self) -> None:
        """Raise ConfigError if a parameter's updates need parameter servers."""
        for name, parameter in self.parameters.items():
            if not parameter.sync or parameter.staleness:
                setting = f"staleness {parameter.staleness}" if parameter.sync else "sync false"
                raise self.create_error(
                    f"parameter '{name}' has {setting}, which needs parameter servers: neondist run -n P starts them"
                    " for an experiment; elsewhere use sync: true and staleness: 0",
                    name,
                )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the strategy to a YAML file.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_text(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Strategy:
        """Load a strategy from a file written by `save`, possibly edited since.

        Raises
        ------
        ConfigError
            If the file is invalid: 'FILE:LINE: field: problem; remedy'.
        """
        path = Path(path)
        root = parse_file(path, max_bytes=MAX_FILE_BYTES, max_nodes=MAX_EXPANDED_NODES)
        return _StrategyFileParser(Node(None, f"{path}:1") if root is None else root).parse()

    def __str__(self) -> str:
        """Return a table of the parameters."""
        head = ("parameter", "shape", "kind", "partition", "owners", "group", "compressor", "staleness")
        rows = [head, *(_table_row(self.specs[name], parameter) for name, parameter in self.parameters.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f"{self.builder}, {counted(self.replicas, 'replica')}, {counted(self.servers, 'owner')}"
        loads = [f"bytes per owner: {', '.join(map(str, self.bytes_per_owner))}"] if self.bytes_per_owner else []
        return "\n".join([title, *lines, *loads])

    def to_yaml(self) -> str:
        """Return the text of a strategy file."""
        entries = {}
        for name, parameter in self.parameters.items():
            spec, entry = self.specs[name], asdict(parameter)
            if parameter.partition is not None:
                entry["partition"] = {"axis": parameter.partition[0], "sizes": parameter.partition[1]}
            entries[name] = {"shape": list(spec.shape), "dtype": spec.dtype, "sparse": spec.sparse, **entry}
        head = {"format": FORMAT_VERSION, "builder": self.builder, "replicas": self.replicas, "servers": self.servers}
        head |= {name: chosen for name in PLANNER_FIELDS if (chosen := getattr(self, name))}
        return yaml.safe_dump(head | {"parameters": entries}, sort_keys=False, default_flow_style=None, width=2**31)


def _table_row(spec: ParameterSpec, entry: ParameterStrategy) -> tuple[str, ...]:
    shape = " x ".join(map(str, spec.shape)) or "scalar"
    mode = str(entry.staleness) if entry.sync else "asynchronous"
    texts = entry.kind, entry.partition_text, entry.owners_text, str(entry.group), entry.compressor or "-"
    return spec.name, shape, *texts, mode


def _join_numbers(numbers: list[int], separator: str) -> str:
    limit = 8
    shown = separator.join(map(str, numbers[:limit]))
    return shown if len(numbers) <= limit else f"{shown}{separator}... ({len(numbers)})"


PLANNER_FIELDS = "grid", "schemes"
"""fields that a planner may add to a strategy"""
_TOP_LEVEL_FIELDS = "format", "builder", "replicas", "servers", "parameters"
_GRID_FIELDS = "replicas", "planes", "rows", "cols"
_PARAMETER_FIELDS = "shape", "dtype", "sparse", *(field.name for field in fields(ParameterStrategy))


class _StrategyFileParser:
    """Parser of the nodes of a strategy file."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def parse(self) -> Strategy:
        """Return the strategy; raise ConfigError at the first wrong field."""
        top = self._parse_map(self.root, "", _TOP_LEVEL_FIELDS, PLANNER_FIELDS)
        if top["format"].value != FORMAT_VERSION:
            raise node_error(top["format"], "format", f"is {top['format']}; expected {FORMAT_VERSION}")
        replicas, servers = (self._parse_integer(top[name], name, 1) for name in ("replicas", "servers"))
        builder = typed_value(top["builder"], "builder", str, "text")
        entries = typed_value(top["parameters"], "parameters", dict, "a mapping")
        specs, parameters = {}, {}
        for name, node in entries.items():
            specs[name], parameters[name] = self._parse_parameter(name, node, max(replicas, servers))
        file_lines = {name: node.place for name, node in (top | entries).items()} | {"": self.root.place}
        grid = self._parse_grid(top["grid"]) if "grid" in top else None
        schemes = self._parse_schemes(top["schemes"]) if "schemes" in top else None
        return Strategy(builder, replicas, servers, specs, parameters, grid, schemes, file_lines)

    def _parse_schemes(self, node: Node) -> dict[str, str]:
        nodes = typed_value(node, "schemes", dict, "a mapping of layers to schemes")
        return {name: typed_value(child, join_path("schemes", name), str, "text") for name, child in nodes.items()}

    def _parse_grid(self, node: Node) -> dict[str, int]:
        nodes = typed_value(node, "grid", dict, f"a mapping with {', '.join(_GRID_FIELDS)}")
        for name, child in nodes.items():
            if name not in _GRID_FIELDS:
                raise node_error(child, join_path("grid", name), f"unknown field; expected {', '.join(_GRID_FIELDS)}")
        return {name: self._parse_integer(child, join_path("grid", name), 1) for name, child in nodes.items()}

    def _parse_parameter(self, name: str, node: Node, owners: int) -> tuple[ParameterSpec, ParameterStrategy]:
        path = join_path("parameters", name)
        nodes = self._parse_map(node, path, _PARAMETER_FIELDS)
        shape = self._parse_integers(nodes["shape"], join_path(path, "shape"))
        dtype = typed_value(nodes["dtype"], join_path(path, "dtype"), str, "text")
        sparse, sync = (
            typed_value(nodes[key], join_path(path, key), bool, "true or false") for key in ("sparse", "sync")
        )
        if nodes["kind"].value not in ("allreduce", "server"):
            raise node_error(
                nodes["kind"], join_path(path, "kind"), f"is {nodes['kind']}; expected allreduce or server"
            )
        kind: Literal["allreduce", "server"] = "server" if nodes["kind"].value == "server" else "allreduce"
        compressor = nodes["compressor"]
        try:
            spec = ParameterSpec(name, shape, dtype, sparse)
            compression = normalise_compressor(None if compressor.value is None else str(compressor.value))
        except ConfigError as error:
            raise node_error(node, path, str(error)) from None
        if compression and (kind == "server" or nodes["owners"].value):
            remedy = "requires kind: allreduce and owners: []; otherwise set compressor: null"
            raise node_error(compressor, join_path(path, "compressor"), f"{compression} {remedy}")
        group, staleness = (self._parse_integer(nodes[key], join_path(path, key), 0) for key in ("group", "staleness"))
        if staleness and not sync:
            raise node_error(nodes["staleness"], join_path(path, "staleness"), f"{staleness} needs sync: true")
        division = self._parse_partition(nodes["partition"], join_path(path, "partition"), shape)
        owner_list = self._parse_integers(nodes["owners"], join_path(path, "owners"))
        location = nodes["owners"], join_path(path, "owners")
        if any(owner >= owners for owner in owner_list):
            raise node_error(*location, f"owner {max(owner_list)} does not exist; owners are 0 to {owners - 1}")
        if division is not None and len(owner_list) != len(division[1]):
            raise node_error(
                *location, f"{counted(len(owner_list), 'owner')} for {len(division[1])} parts; give one for each part"
            )
        return spec, ParameterStrategy(kind, division, owner_list, group, compression, sync, staleness)

    def _parse_partition(self, node: Node, path: str, shape: list[int]) -> AxisPartition | None:
        if node.value is None:
            return None
        nodes = self._parse_map(node, path, ("axis", "sizes"))
        if not shape:
            raise node_error(node, path, "a scalar cannot be partitioned; write null")
        axis = self._parse_integer(nodes["axis"], join_path(path, "axis"), 0)
        if axis >= len(shape):
            raise node_error(nodes["axis"], join_path(path, "axis"), f"is {axis}; expected 0 to {len(shape) - 1}")
        sizes = self._parse_integers(nodes["sizes"], join_path(path, "sizes"))
        if sum(sizes) != shape[axis] or not sizes:
            raise node_error(
                nodes["sizes"], join_path(path, "sizes"), f"add up to {sum(sizes)}, but must be {shape[axis]}"
            )
        return axis, sizes

    def _parse_map(self, node: Node, path: str, names: Iterable[str], optional: Sequence[str] = ()) -> dict[str, Node]:
        nodes = typed_value(node, path, dict, "a mapping with " + ", ".join(names))
        for name, child in nodes.items():
            if name not in (*names, *optional):
                raise node_error(child, join_path(path, name), f"unknown field; expected {', '.join(names)}")
        for name in names:
            if name not in nodes:
                raise node_error(node, join_path(path, name), "missing; add it, as Strategy.save writes it")
        return dict(nodes)

    def _parse_integer(self, node: Node, path: str, minimum: int) -> int:
        value = node.value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise node_error(node, path, f"expected an integer of at least {minimum}, got {node}")
        return value

    def _parse_integers(self, node: Node, path: str) -> list[int]:
        items = typed_value(node, path, list, "a list of integers")
        return [self._parse_integer(item, join_path(path, at), 0) for at, item in enumerate(items)]
