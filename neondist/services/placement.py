"""Placement of parameters on servers: the pieces and tables of each, as a strategy says; pure arithmetic."""

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
from ..registry import registered
from ..strategies import ParameterSpec, Strategy
from ..strategies.shares import shares_of
from .message import MessageError

DTYPES = "float32", "float64"
MOST_SERVERS = 1 << 20
MOST_NUMBERS, MOST_DIM = 1 << 62, 1 << 20
"""Of a table, and of a row."""


@dataclass(frozen=True)
class ServerPiece:
    """The part of a parameter that one server holds.

    Attributes
    ----------
    name : str
        Of the parameter.
    dtype : str
    shape : tuple of int
        Of the whole parameter.
    unfolded : tuple of int
        The shape in which the part is a box: the parameter's, or (size,).
    box : Box
    decays : bool
        Whether weight decay applies where biases are exempt.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    box: Box
    decays: bool = True

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.box.size == prod(self.shape)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the part of a whole array, as a view where that is possible."""
        return array.reshape(self.unfolded)[self.box.slices]

    def described(self) -> list[Any]:
        """Return it as JSON, which `parse` reads."""
        return [self.name, self.dtype, *map(list, (self.shape, self.unfolded, self.box.lo, self.box.hi)), self.decays]

    @classmethod
    def parse(cls, described: Any) -> ServerPiece:
        """Return the piece that JSON describes; MessageError if it is invalid."""
        name, dtype, shape, unfolded, lo, hi, decays = _items(described, 7)
        shape, unfolded, lo, hi = map(_extents, (shape, unfolded, lo, hi))
        fits = len(unfolded) == len(lo) == len(hi) and prod(shape) == prod(unfolded)
        fits = fits and all(a <= b <= n for a, b, n in zip(lo, hi, unfolded, strict=True))
        if not isinstance(name, str) or dtype not in DTYPES or not isinstance(decays, bool) or not fits:
            raise MessageError("invalid piece of a parameter")
        return cls(name, dtype, shape, unfolded, Box(lo, hi), decays)


@dataclass(frozen=True)
class TableSpec:
    """An embedding table whose rows servers hold by id: row i is on server i modulo their number.

    Parameters
    ----------
    name : str
        As a parameter's, such as 'embedding/weights'.
    rows, dim : int
        Number of rows, which need not be in use, and extent of a row.
    dtype : str
    initializer : Initializer
        First values of a row, made at its first use.
    stream : int
        Key of the random stream of these values (`rng.key` of the seed and names).
    lazy : bool
        Whether an update changes only the rows that have a gradient, as `torch.optim.SparseAdam` does. False: all rows
        in use, which equals an update of the whole table where unused rows have no weight decay.
    """

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    initializer: Initializer = Gaussian(1.0)  # noqa: RUF009 (it has no state)
    stream: int = 0
    lazy: bool = False

    def described(self) -> list[Any]:
        """Return it as JSON, which `parse` reads."""
        rule = [type(self.initializer).__name__, self.initializer.arguments()]
        return [self.name, self.rows, self.dim, self.dtype, rule, self.stream, self.lazy]

    @classmethod
    def parse(cls, described: Any) -> TableSpec:
        """Return the table that JSON describes; MessageError if it is invalid."""
        name, rows, dim, dtype, rule, stream, lazy = _items(described, 7)
        kind, arguments = _items(rule, 2)
        known = registered(Initializer)
        numbers = all(type(n) is int and n > 0 for n in (rows, dim)) and type(stream) is int and 0 <= stream < 1 << 64
        texts = isinstance(name, str) and dtype in DTYPES and isinstance(lazy, bool) and isinstance(kind, str)
        if (
            not numbers
            or not texts
            or rows * dim > MOST_NUMBERS
            or dim > MOST_DIM
            or kind not in known
            or not isinstance(arguments, dict)
        ):
            raise MessageError("invalid table")
        return cls(name, rows, dim, dtype, constructed(f"table '{name}'", known[kind], arguments), stream, lazy)


@dataclass(frozen=True)
class ServerLayout:
    """All that one server holds.

    Attributes
    ----------
    index, servers : int
        Which server, of how many.
    pieces : tuple of ServerPiece
    tables : tuple of TableSpec
    """

    index: int
    servers: int
    pieces: tuple[ServerPiece, ...]
    tables: tuple[TableSpec, ...]

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the pieces, each of which is one flat array."""
        return [dtype for dtype in DTYPES if any(piece.dtype == dtype for piece in self.pieces)]

    def of_dtype(self, dtype: str) -> list[ServerPiece]:
        """Return the pieces of a flat array in their order."""
        return [piece for piece in self.pieces if piece.dtype == dtype]

    def spans(self, dtype: str) -> list[tuple[int, int]]:
        """Return the places of the pieces in a flat array."""
        return list(pairwise(accumulate((piece.box.size for piece in self.of_dtype(dtype)), initial=0)))

    def size(self, dtype: str) -> int:
        """Return the size of a flat array."""
        return sum(piece.box.size for piece in self.of_dtype(dtype))

    def described(self) -> dict[str, Any]:
        """Return it as JSON, which `parse` reads."""
        return {
            "index": self.index,
            "servers": self.servers,
            "pieces": [piece.described() for piece in self.pieces],
            "tables": [table.described() for table in self.tables],
        }

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> ServerLayout:
        """Return the layout that JSON describes; MessageError if it is invalid."""
        index, servers = described.get("index"), described.get("servers")
        if type(index) is not int or type(servers) is not int or not 0 <= index < servers <= MOST_SERVERS:
            raise MessageError("invalid index of a server")
        pieces, tables = described.get("pieces"), described.get("tables")
        if not isinstance(pieces, list) or not isinstance(tables, list):
            raise MessageError("invalid layout of a server")
        made = cls(index, servers, tuple(map(ServerPiece.parse, pieces)), tuple(map(TableSpec.parse, tables)))
        names = [piece.name for piece in made.pieces] + [table.name for table in made.tables]
        if len(set(names)) < len(names):
            raise MessageError("two parameters with the same name")
        return made


def place(
    strategy: Strategy, servers: int, tables: Sequence[TableSpec] = (), decays: Iterable[str] | None = None
) -> list[ServerLayout]:
    """Return what each server holds under a strategy.

    Parameters
    ----------
    strategy : Strategy
        Of all dense parameters, each with owners.
    servers : int
    tables : sequence of TableSpec
    decays : iterable of str, optional
        Names of the parameters to which weight decay applies where biases are exempt. Default: those of several axes.

    Raises
    ------
    ConfigError
        A parameter has no owner, a dtype that servers cannot update, or an owner that does not exist.
    """
    for name, one in strategy.parameters.items():
        if not one.owners:
            raise strategy.error(
                f"parameter '{name}' has no owner; choose PS, PSLoadBalancing or another strategy with servers"
            )
        if strategy.specs[name].dtype not in DTYPES:
            raise ConfigError(
                f"parameter '{name}': servers update {' and '.join(DTYPES)}, not {strategy.specs[name].dtype}"
            )
    shares = shares_of(strategy, servers)
    chosen = None if decays is None else set(decays)

    def piece(spec: ParameterSpec, server: int) -> ServerPiece:
        share, shape = shares[spec.name], tuple(spec.shape)
        decayed = len(shape) > 1 if chosen is None else spec.name in chosen
        return ServerPiece(spec.name, spec.dtype, shape, share.shape, share.boxes[server], decayed)

    found = [[piece(spec, server) for spec in strategy.specs.values()] for server in range(servers)]
    return [
        ServerLayout(server, servers, tuple(one for one in pieces if one.box.size), tuple(tables))
        for server, pieces in enumerate(found)
    ]


def constructed(field: str, kind: type, arguments: Mapping[str, Any]) -> Any:
    """Return an object of a class that a message names; ConfigError about `field` for other arguments than it has."""
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{field}: {kind.__name__}: {error}") from None


def _items(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise MessageError("invalid layout of a server")
    return value


def _extents(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value) or len(value) > 32:
        raise MessageError("invalid shape")
    return tuple(value)
