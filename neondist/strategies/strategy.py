"""Strategies as values that can be compared, printed, saved as YAML and loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal

import yaml

from ..errors import ConfigError
from ..io.files import write_text
from ..registry.arguments import check_fields, type_checked
from ..registry.ranges import Count, Index, between
from ..terminal.console import counted
from ..yaml_nodes import Node, field_error, join_path, node_error, parse_file
from ..yaml_nodes.convert import convert_fields, convert_node
from .compressor import normalise_compressor
from .parameter_spec import ParameterSpec
from .partition import AxisPartition, part_sizes

FORMAT_VERSION = 1
MAX_FILE_BYTES, MAX_EXPANDED_NODES, MAX_DEVICES = 64 << 20, 4_000_000, 1 << 20
"""Limits of a strategy file, enough for hundreds of thousands of parameters."""


@dataclass(frozen=True)
class ParameterStrategy:
    """Partition, owners and synchronisation of one parameter.

    Attributes
    ----------
    kind : 'allreduce' or 'server'
        'allreduce': the gradient is summed over all replicas or, if there are owners, reduce-scattered to them.
        'server': the gradient is reduced to the owners, which may be parameter servers.
    partition : (axis, [extents]), or None
    owners : list of int
        The owner of each part. Several owners without a partition own even slices of the flat buffer of all
        such parameters; if there is no owner, every replica updates the whole parameter.
    group : int
        Number of the parameter's reduction group; the gradients of a group are summed in one call.
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

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "owners", [int(owner) for owner in self.owners])  # NumPy's integers cannot be saved
        if self.partition is not None:
            axis, sizes = self.partition
            object.__setattr__(self, "partition", (int(axis), [int(size) for size in sizes]))

    def find_mismatch(self, shape: Sequence[int], num_owners: int) -> tuple[str, str] | None:
        """Return the field that does not match a parameter's shape or the number of owners, and the problem, if any."""
        if self.compressor and (self.kind == "server" or self.owners):
            remedy = "requires kind: allreduce and owners: []; otherwise set compressor: null"
            return "compressor", f"{self.compressor} {remedy}"
        if self.staleness and not self.sync:
            return "staleness", f"{self.staleness} needs sync: true; set sync: true, or staleness: 0"
        if wrong := [owner for owner in self.owners if not 0 <= owner < num_owners]:
            return "owners", f"owner {max(wrong)} does not exist; owners are 0 to {num_owners - 1}"
        if self.kind == "server" and not self.owners:
            return "owners", "is empty; list at least one owner, or set kind: allreduce"
        if self.partition is None:
            if len(set(self.owners)) < len(self.owners):
                return "owners", "lists an owner twice; without a partition, list each owner once"
            return None
        axis, extents = self.partition
        if not shape:
            return "partition", "a scalar cannot be partitioned; write null"
        if not 0 <= axis < len(shape):
            return "partition.axis", f"is {axis}; expected 0 to {len(shape) - 1}"
        if min(extents, default=0) < 0:
            return "partition.sizes", f"{min(extents)} is negative; expected extents of at least 0"
        if sum(extents) != shape[axis] or not extents:
            return "partition.sizes", f"add up to {sum(extents)}; expected {shape[axis]}, the axis's extent"
        if len(self.owners) != len(extents):
            problem = f"{counted(len(self.owners), 'owner')} for {len(extents)} parts; give one owner for each part"
            return "owners", problem
        return None

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
        'FILE:LINE' of each parameter, of `schemes`, and of the file (key ''); empty if not loaded from a file.
    """

    builder: str
    replicas: int
    servers: int
    specs: dict[str, ParameterSpec]
    parameters: dict[str, ParameterStrategy]
    grid: dict[str, int] | None = None
    schemes: dict[str, str] | None = None
    file_lines: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, spec in self.specs.items():
            if name not in self.parameters:
                raise self.create_error(f"parameters: no entry for parameter '{name}'; add one")
            mismatch = self.parameters[name].find_mismatch(spec.shape, max(self.replicas, self.servers))
            if mismatch is not None:
                raise self.create_error(f"parameters.{name}.{': '.join(mismatch)}")

    def create_error(self, problem: str, name: str = "") -> ConfigError:
        """Return an error about a parameter, or all parameters, with the location in the strategy file."""
        file_line = self.file_lines.get(name) or self.file_lines.get("")
        return ConfigError(f"{file_line or 'strategy'}: {problem}")

    @property
    def digest(self) -> str:
        """Hash of the strategy; equal for equal strategies."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    @property
    def bytes_per_owner(self) -> list[int]:
        """Bytes of parameters per owner; empty if no parameter has an owner."""
        num_owners = max(self.replicas, self.servers)
        owned_bytes = [0] * num_owners
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
        """Raise ConfigError if the strategy is for other parameters; the message names the first difference."""
        model_specs = {spec.name: spec for spec in parameters}
        for name, spec in model_specs.items():
            if name not in self.specs:
                raise self.create_error(f"no entry for parameter '{name}'; build the strategy for this model")
            for attribute in ("shape", "dtype", "sparse"):
                expected, actual = getattr(self.specs[name], attribute), getattr(spec, attribute)
                if expected != actual:
                    problem = f"parameter '{name}' has {attribute} {expected}, but {actual} in the model"
                    raise self.create_error(f"{problem}; build the strategy for this model", name)
        for name in self.specs:
            if name not in model_specs:
                raise self.create_error(
                    f"parameter '{name}' is not in the model; build the strategy for this model", name
                )

    def check_owners_exist(self, num_ranks: int) -> None:
        """Raise ConfigError if there are more owners than ranks."""
        num_owners = 1 + max((owner for entry in self.parameters.values() for owner in entry.owners), default=-1)
        if num_owners > num_ranks:
            problem = f"has {counted(num_owners, 'owner')}, but the job has {counted(num_ranks, 'rank')}"
            raise self.create_error(f"{problem}; build the strategy for {num_ranks}")

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
                    f"parameter '{name}' has {setting}, which needs parameter servers; run the experiment with"
                    " neondist run -n P, which starts servers, or set sync: true and staleness: 0",
                    name,
                )

    @type_checked
    def save(self, path: str | PathLike[str]) -> None:
        """Write the strategy to a YAML file.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_text(Path(path), self.to_yaml())

    @classmethod
    @type_checked
    def load(cls, path: str | PathLike[str]) -> Strategy:
        """Load a strategy from a file written by `save`, possibly edited since.

        Raises
        ------
        ConfigError
            If the file is invalid; the message is 'FILE:LINE: field: problem; remedy'.
        """
        path = Path(path)
        root = parse_file(path, max_bytes=MAX_FILE_BYTES, max_nodes=MAX_EXPANDED_NODES)
        return _parse_strategy(Node(None, f"{path}:1") if root is None else root)

    def __str__(self) -> str:
        """Return a table of the parameters."""
        header = ("parameter", "shape", "kind", "partition", "owners", "group", "compressor", "staleness")
        rows = [header, *(_table_row(self.specs[name], parameter) for name, parameter in self.parameters.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f"{self.builder}, {counted(self.replicas, 'replica')}, {counted(self.servers, 'owner')}"
        load_lines = [f"bytes per owner: {', '.join(map(str, self.bytes_per_owner))}"] if self.bytes_per_owner else []
        return "\n".join([title, *lines, *load_lines])

    def to_yaml(self) -> str:
        """Return the text of a strategy file."""
        entries = {}
        for name, parameter in self.parameters.items():
            spec, entry = self.specs[name], asdict(parameter)
            if parameter.partition is not None:
                entry["partition"] = {"axis": parameter.partition[0], "sizes": parameter.partition[1]}
            entries[name] = {"shape": list(spec.shape), "dtype": spec.dtype, "sparse": spec.sparse, **entry}
        header = {"format": FORMAT_VERSION, "builder": self.builder, "replicas": self.replicas, "servers": self.servers}
        header |= {name: chosen for name in PLANNER_FIELDS if (chosen := getattr(self, name))}
        return yaml.safe_dump(header | {"parameters": entries}, sort_keys=False, default_flow_style=None, width=2**31)


def _table_row(spec: ParameterSpec, entry: ParameterStrategy) -> tuple[str, ...]:
    shape = " x ".join(map(str, spec.shape)) or "scalar"
    staleness_text = str(entry.staleness) if entry.sync else "asynchronous"
    cells = entry.kind, entry.partition_text, entry.owners_text, str(entry.group), entry.compressor or "-"
    return spec.name, shape, *cells, staleness_text


def _join_numbers(numbers: list[int], separator: str) -> str:
    max_shown = 8
    shown = separator.join(map(str, numbers[:max_shown]))
    return shown if len(numbers) <= max_shown else f"{shown}{separator}... ({len(numbers)})"


PLANNER_FIELDS = "grid", "schemes"
"""fields that a planner may add to a strategy"""
_TOP_LEVEL_FIELDS = {
    "format": int,
    "builder": str,
    "replicas": Annotated[int, between(1, MAX_DEVICES)],
    "servers": Annotated[int, between(1, MAX_DEVICES)],
    "parameters": dict[str, Node],
}
_GRID_FIELDS = dict.fromkeys(("replicas", "planes", "rows", "cols"), Count)
_PARTITION_FIELDS = {"axis": Index, "sizes": list[Index]}
_PARAMETER_FIELDS = {
    "shape": list[Index],
    "dtype": str,
    "sparse": bool,
    "kind": Literal["allreduce", "server"],
    "partition": Node,
    "owners": list[Index],
    "group": Index,
    "compressor": str | None,
    "sync": bool,
    "staleness": Index,
}


def _parse_strategy(root: Node) -> Strategy:
    """Return the strategy of a file; raise ConfigError at the first wrong field."""
    top = convert_fields(root, "", _TOP_LEVEL_FIELDS | dict.fromkeys(PLANNER_FIELDS, Node), _TOP_LEVEL_FIELDS)
    if top["format"] != FORMAT_VERSION:
        raise field_error(root, "", "format", f"is {top['format']}; expected {FORMAT_VERSION}")
    specs, parameters = {}, {}
    for name, node in top["parameters"].items():
        specs[name], parameters[name] = _parse_parameter(name, node, max(top["replicas"], top["servers"]))
    grid = convert_fields(top["grid"], "grid", _GRID_FIELDS) if "grid" in top else None
    schemes = convert_node(top["schemes"], dict[str, str], "schemes") if "schemes" in top else None
    node_by_name = {name: top[name] for name in PLANNER_FIELDS if name in top} | top["parameters"] | {"": root}
    file_lines = {name: node.place for name, node in node_by_name.items()}
    return Strategy(top["builder"], top["replicas"], top["servers"], specs, parameters, grid, schemes, file_lines)


def _parse_parameter(name: str, node: Node, num_owners: int) -> tuple[ParameterSpec, ParameterStrategy]:
    path = join_path("parameters", name)
    entry = convert_fields(node, path, _PARAMETER_FIELDS, _PARAMETER_FIELDS)
    shape, dtype, sparse = (entry.pop(key) for key in ("shape", "dtype", "sparse"))
    try:
        spec = ParameterSpec(name, shape, dtype, sparse)
        entry["compressor"] = normalise_compressor(entry["compressor"])
    except ConfigError as error:
        raise node_error(node, path, str(error)) from None
    partition = entry["partition"]
    entry["partition"] = _parse_partition(partition, join_path(path, "partition"))
    parameter = ParameterStrategy(**entry)
    if mismatch := parameter.find_mismatch(shape, num_owners):
        field_name, problem = mismatch
        parent, _, child = field_name.rpartition(".")
        raise field_error(partition if parent else node, join_path(path, parent) if parent else path, child, problem)
    return spec, parameter


def _parse_partition(node: Node, path: str) -> AxisPartition | None:
    if node.value is None:
        return None
    axis, sizes = convert_fields(node, path, _PARTITION_FIELDS, _PARTITION_FIELDS).values()
    return axis, sizes
