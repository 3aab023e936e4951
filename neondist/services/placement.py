"""Placement of parameters on servers: the pieces and tables of each server under a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..geometry import Box
from ..initializers import Gaussian, Initializer
from ..registry import registered_classes
from ..strategies import ParameterSpec, Strategy
from ..strategies.shares import compute_owner_boxes
from .message import MessageError

SUPPORTED_DTYPES = "float32", "float64"
MAX_SERVERS = 1 << 20
MAX_TABLE_ELEMENTS, MAX_ROW_ELEMENTS = 1 << 62, 1 << 20
"""Maximum numbers of elements of a table and of a row."""


@dataclass(frozen=True)
class ServerPiece:
    """Part of a parameter on a server.

    Attributes
    ----------
    name : str
        Name of the parameter.
    dtype : str
    shape : tuple of int
        Shape of the whole parameter.
    box_shape : tuple of int
        Shape in which the part is a box: that of the parameter, or (size,) if the parameter is flattened.
    box : Box
    has_weight_decay : bool
        Whether weight decay applies to the parameter if the optimiser exempts biases.
    is_sparse : bool
        Whether a gradient changes few rows of the parameter, so that only these are sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box_shape: tuple[int, ...]
    box: Box
    has_weight_decay: bool = True
    is_sparse: bool = False

    @property
    def sends_rows(self) -> bool:
        """Whether some rows of the piece are sent with their ids, instead of the whole piece."""
        return self.is_sparse and self.box.ndim > 1 and self.box.size > 0

    @property
    def row_shape(self) -> tuple[int, int]:
        """Number of rows, and of elements of each."""
        return self.box.shape[0], prod(self.box.shape[1:])

    @property
    def is_whole_parameter(self) -> bool:
        """Whether the piece is the complete parameter."""
        return self.box.size == prod(self.shape)

    def part_of(self, array: np.ndarray) -> np.ndarray:
        """Return the part of a complete array, as a view if possible."""
        return array.reshape(self.box_shape)[self.box.slices]

    def to_json(self) -> list[Any]:
        """Return a JSON value that `parse` accepts."""
        extents = map(list, (self.shape, self.box_shape, self.box.lo, self.box.hi))
        return [self.name, self.dtype, *extents, self.has_weight_decay, self.is_sparse]

    @classmethod
    def parse(cls, value: object) -> ServerPiece:
        """Return the piece described by a JSON value; MessageError if it is invalid."""
        name, dtype, shape, box_shape, lo, hi, *flags = _check_list(value, 8)
        shape, box_shape, lo, hi = map(_parse_shape, (shape, box_shape, lo, hi))
        boxes_fit = len(box_shape) == len(lo) == len(hi) and prod(shape) == prod(box_shape)
        boxes_fit = boxes_fit and all(a <= b <= n for a, b, n in zip(lo, hi, box_shape, strict=True))
        flags_fit = all(isinstance(flag, bool) for flag in flags)
        if not isinstance(name, str) or dtype not in SUPPORTED_DTYPES or not flags_fit or not boxes_fit:
            raise MessageError("invalid piece of a parameter")
        return cls(name, dtype, shape, box_shape, Box(lo, hi), *flags)


@dataclass(frozen=True)
class EmbeddingTableSpec:
    """Embedding table distributed by row: row i is on server i modulo the number of servers.

    Parameters
    ----------
    name : str
        Name of the parameter, such as 'embedding/weights'.
    rows, dim : int
        Number of rows, not all of which need to be in use, and number of elements of a row.
    dtype : str
    initializer : Initializer
        Initial values of a row, created at its first use.
    stream : int
        Key of the random stream of these values (`rng.key` of the seed and names).
    lazy : bool
        Whether an update changes only the rows that have a gradient, as `torch.optim.SparseAdam` does. False: an
        update changes all rows in use, as if the whole table were updated without weight decay on unused rows.
    """

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    initializer: Initializer = Gaussian(1.0)  # noqa: RUF009 (stateless)
    stream: int = 0
    lazy: bool = False

    def to_json(self) -> list[Any]:
        """Return a JSON value that `parse` accepts."""
        rule = [type(self.initializer).__name__, self.initializer.arguments()]
        return [self.name, self.rows, self.dim, self.dtype, rule, self.stream, self.lazy]

    @classmethod
    def parse(cls, value: object) -> EmbeddingTableSpec:
        """Return the table described by a JSON value; MessageError if it is invalid."""
        name, rows, dim, dtype, rule, stream, lazy = _check_list(value, 7)
        kind, arguments = _check_list(rule, 2)
        initializers = registered_classes(Initializer)
        sizes_ok = all(type(n) is int and n > 0 for n in (rows, dim)) and type(stream) is int and 0 <= stream < 1 << 64
        types_ok = isinstance(name, str) and isinstance(lazy, bool) and isinstance(kind, str)
        if (
            not sizes_ok
            or not types_ok
            or dtype not in SUPPORTED_DTYPES
            or rows * dim > MAX_TABLE_ELEMENTS
            or dim > MAX_ROW_ELEMENTS
            or kind not in initializers
            or not isinstance(arguments, dict)
        ):
            raise MessageError("invalid table")
        initializer = construct_from_message(f"table '{name}'", initializers[kind], arguments)
        return cls(name, rows, dim, dtype, initializer, stream, lazy)


@dataclass(frozen=True)
class ServerLayout:
    """Contents of a server.

    Attributes
    ----------
    index, servers : int
        Index of the server, and number of servers.
    pieces : tuple of ServerPiece
    tables : tuple of EmbeddingTableSpec
    """

    index: int
    servers: int
    pieces: tuple[ServerPiece, ...]
    tables: tuple[EmbeddingTableSpec, ...]

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the pieces, with one flat array each."""
        return [dtype for dtype in SUPPORTED_DTYPES if any(piece.dtype == dtype for piece in self.pieces)]

    def pieces_of_dtype(self, dtype: str) -> list[tuple[ServerPiece, slice]]:
        """Return the pieces of the flat array of a dtype in order, sparse ones last, with their cells in this array."""
        pieces = sorted((one for one in self.pieces if one.dtype == dtype), key=lambda one: one.sends_rows)
        ranges = pairwise(accumulate((piece.box.size for piece in pieces), initial=0))
        return [(piece, slice(*cells)) for piece, cells in zip(pieces, ranges, strict=True)]

    def flat_size(self, dtype: str) -> int:
        """Return the size of the flat array of a dtype."""
        return sum(piece.box.size for piece in self.pieces if piece.dtype == dtype)

    def dense_size(self, dtype: str) -> int:
        """Return the size of the start of this array that is sent whole."""
        return sum(piece.box.size for piece in self.pieces if piece.dtype == dtype and not piece.sends_rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `parse` accepts."""
        return {
            "index": self.index,
            "servers": self.servers,
            "pieces": [piece.to_json() for piece in self.pieces],
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> ServerLayout:
        """Return the layout described by a JSON value; MessageError if it is invalid."""
        index, servers = value.get("index"), value.get("servers")
        if type(index) is not int or type(servers) is not int or not 0 <= index < servers <= MAX_SERVERS:
            raise MessageError("invalid index of a server")
        pieces, tables = value.get("pieces"), value.get("tables")
        if not isinstance(pieces, list) or not isinstance(tables, list):
            raise MessageError("invalid server layout")
        layout = cls(
            index, servers, tuple(map(ServerPiece.parse, pieces)), tuple(map(EmbeddingTableSpec.parse, tables))
        )
        names = [piece.name for piece in layout.pieces] + [table.name for table in layout.tables]
        if len(set(names)) < len(names):
            raise MessageError("two parameters with the same name")
        return layout


def place_parameters(
    strategy: Strategy,
    servers: int,
    tables: Sequence[EmbeddingTableSpec] = (),
    decayed_names: Iterable[str] | None = None,
) -> list[ServerLayout]:
    """Return the contents of each server under a strategy.

    Parameters
    ----------
    strategy : Strategy
        Strategy of all dense parameters, each with owners.
    servers : int
    tables : sequence of EmbeddingTableSpec
    decayed_names : iterable of str, optional
        Parameters to which weight decay applies if biases are exempt. Default: parameters with several axes.

    Raises
    ------
    ConfigError
        A parameter has no owner, an owner that does not exist, or a dtype that servers cannot update.
    """
    for name, placement in strategy.parameters.items():
        if not placement.owners:
            raise strategy.create_error(
                f"parameter '{name}' has no owner; choose PS, PSLoadBalancing or another strategy with servers"
            )
        if strategy.specs[name].dtype not in SUPPORTED_DTYPES:
            raise ConfigError(
                f"parameter '{name}': has dtype {strategy.specs[name].dtype}, but servers update only"
                f" {' and '.join(SUPPORTED_DTYPES)}; choose one of these dtypes"
            )
    boxes_by_name = compute_owner_boxes(strategy, servers)
    decayed_set = None if decayed_names is None else set(decayed_names)

    def make_piece(spec: ParameterSpec, server: int) -> ServerPiece:
        owner_boxes, shape = boxes_by_name[spec.name], tuple(spec.shape)
        has_weight_decay = len(shape) > 1 if decayed_set is None else spec.name in decayed_set
        box = owner_boxes.boxes[server]
        return ServerPiece(spec.name, spec.dtype, shape, owner_boxes.shape, box, has_weight_decay, spec.sparse)

    pieces_by_server = [[make_piece(spec, server) for spec in strategy.specs.values()] for server in range(servers)]
    return [
        ServerLayout(server, servers, tuple(part for part in pieces if part.box.size), tuple(tables))
        for server, pieces in enumerate(pieces_by_server)
    ]


def construct_from_message(field: str, kind: type, arguments: Mapping[str, Any]) -> Any:
    """Construct an object of a class named in a message; ConfigError for `field` if the arguments are invalid."""
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{field}: {kind.__name__}: {error}") from None


def _check_list(value: object, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise MessageError("invalid server layout")
    return value


def _parse_shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value) or len(value) > 32:
        raise MessageError("invalid shape")
    return tuple(value)
