"""For code that cuts images by hand: what a window sees of a tile, and sums over tiles, as differentiable functions.

These are no torch.library.custom_op, whose arguments are tensors and numbers. A grid as one needs PyTorch 2.13's
torch._library.opaque_object: tried, gradients and torch.compile(fullgraph=True) work, but it is not public, registers
classes of a private base for all of a process, and its operators fail opcheck's test_schema. torch.autograd.Function
has gradients too; torch.compile breaks its graph at the messages, which it could not compile anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..comm import ProcessGrid
from ..comm.agree import agree
from ..errors import ConfigError, GridError, ShapeError, UserError
from ..geometry import Window, fold
from .alike import check_alike
from .functions import View
from .layout import local_shape, shape_of
from .transfer import Range, Transfer, Want, clipped
from .wires import Channel, Wires


def halo(x: torch.Tensor, window: Window, grid: ProcessGrid, global_shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return what a window sees of an image, of which each rank has a tile: the tile with the cells around it.

    Each rank sees what it needs for its part of the window's output, which is cut evenly too: a convolution without
    padding over the views gives the tiles of the output. Padding is filled in. Backward adds the gradients of a
    cell over all ranks that have seen it. Collective over all ranks, forward and backward.

    Parameters
    ----------
    x : torch.Tensor (N, C, *spatial)
        This rank's tile, `image[..., *grid.tile_box(extent).slices]`: a rank's part of the batch if there are replicas.
    window : Window
        Of as many axes as there are spatial ones.
    grid : ProcessGrid
    global_shape : sequence of int, optional
        (N, C, *spatial) of the whole; default: the ranks ask each other, in one small message each time.

    Returns
    -------
    torch.Tensor (N, C, *spatial)
        The view.

    Raises
    ------
    ShapeError
        On all ranks, if the tiles are not those of an image that is cut evenly.
    """
    hand = _hand(grid, window.ndim if isinstance(window, Window) else 2)
    extent = hand.extent_of(x, window, None if global_shape is None else tuple(global_shape)[2:])
    view = hand.view(window, extent)
    return View.apply(x, view.channel, view.pads, window.fill)


def reduce(x: torch.Tensor, op: str, grid: ProcessGrid, group: str = "tiles") -> torch.Tensor:
    """Return the sum or maximum over ranks, element by element, whole on each of them; collective.

    Backward takes the loss to be the sum of what the ranks call `backward` on, as `halo` does. So call it on this
    rank's share of the loss, not on a sum that all ranks have: that would count once for each rank.

    Parameters
    ----------
    x : torch.Tensor
        Of the same shape on all ranks.
    op : 'sum' or 'max'
        The gradient of a maximum is shared among all elements that are equal to it.
    grid : ProcessGrid
    group : 'tiles', 'replicas' or 'world'
        The ranks of one replica, those with the same tile, or all.

    Returns
    -------
    torch.Tensor
        Of the shape of x.
    """
    if op not in ("sum", "max"):
        raise ConfigError(f"op: {op!r} is unknown; choose 'sum' or 'max'")
    if group not in ("tiles", "replicas", "world"):
        raise ConfigError(f"group: {group!r} is unknown; choose 'tiles', 'replicas' or 'world'")
    hand, error = _hand(grid, 2), None
    every = hand.wires.mesh.axes
    axes = {"tiles": every - {0}, "replicas": every & {0}, "world": every}[group]
    if not isinstance(x, torch.Tensor):
        error = ShapeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    facts: dict[str, Any] = {"the call": f"reduce {op} over {group}"}
    if error is None:
        facts |= {"the shape of x": tuple(x.shape), "its dtype": x.dtype, "x.requires_grad": x.requires_grad}
    check_alike(grid.world, facts, error)
    return _Reduce.apply(x, op, hand.wires, axes)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, wires: Wires, axes: frozenset[int]) -> torch.Tensor:
        found = wires.reduce("reduce", "forward", x, axes, op)
        ctx.how = op, wires, axes
        ctx.save_for_backward(*((x, found) if op == "max" else ()))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, wires, axes = ctx.how
        gradient = wires.reduce("reduce", "backward", gradients[0], axes)
        if op == "max":
            x, found = ctx.saved_tensors
            here = (x == found).to(gradient.dtype)
            gradient = gradient * here / wires.reduce("reduce", "backward", here, axes).clamp(min=1)
        return gradient, None, None, None


class _View(NamedTuple):
    channel: Channel
    pads: tuple[tuple[int, int, int], ...]


class _Hand:
    """What a grid keeps for images of so many axes: communicators, planned messages, and extents it has seen."""

    def __init__(self, grid: ProcessGrid, spatial: int) -> None:
        self.wires = Wires(grid, spatial)
        self._views: dict[tuple[Window, tuple[int, ...]], _View] = {}
        self._extents: dict[tuple[int, ...], tuple[int, ...]] = {}

    def extent_of(self, x: Any, window: Any, extent: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the extent of the whole image, agreed; collective."""
        world, error = self.wires.grid.world, None
        try:
            _check(x, window)
            if extent is not None:
                self._check_tile(x, extent)
                window.check(extent)
        except UserError as problem:
            error = problem
        known = extent
        if error is None and known is None:
            known = self._extents.get(tuple(x.shape))
        facts: dict[str, Any] = {"the call": "halo"}
        if error is None:
            facts |= {"window": window, "x.requires_grad": x.requires_grad, "its dtype": x.dtype}
            facts |= {"global_shape": extent}
        # a rank may have seen its tile's shape before and others not: whether all know the same is found out here
        same = check_alike(world, facts, error, (-1,) if known is None else known)
        if same and known is not None:
            return known
        found = self._asked(tuple(x.shape))
        self._extents[tuple(x.shape)] = found
        window.check(found)
        return found

    def _asked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        mesh, world = self.wires.mesh, self.wires.grid.world
        shapes = world.allgather(shape)
        lines = range(1, mesh.spatial + 1)
        extent = tuple(
            sum(
                shapes[mesh.rank([at if line == axis else 0 for line in range(len(mesh.parts))])][axis + 1]
                for at in range(mesh.parts[axis])
            )
            for axis in lines
        )
        error = None
        try:
            self._check_shape(shape, extent)
        except ShapeError as problem:
            error = problem
        agree(world, error)
        return extent

    def _check_tile(self, x: torch.Tensor, extent: tuple[int, ...]) -> None:
        if len(extent) != self.wires.mesh.spatial:
            raise ShapeError(f"global_shape: expected (N, C, *spatial) of {x.dim()} numbers, got {len(extent) + 2}")
        self._check_shape(tuple(x.shape), extent)

    def _check_shape(self, shape: tuple[int, ...], extent: tuple[int, ...]) -> None:
        mesh = self.wires.mesh
        layout = tuple((mesh.atom(n, axis + 1),) for axis, n in enumerate(extent))
        expected = local_shape(layout, self.wires.place)
        if shape[2:] != expected:
            raise ShapeError(
                f"rank {self.wires.grid.rank}: a tile of {shape_of(layout)} cells has {expected} of them, as"
                f" grid.tile_box says, but x has {shape[2:]}"
            )

    def view(self, window: Window, extent: tuple[int, ...]) -> _View:
        """Return the messages for a window over an image, planned once."""
        key = window, extent
        if key not in self._views:
            self._views[key] = self._planned(window, extent)
        return self._views[key]

    def _planned(self, window: Window, extent: tuple[int, ...]) -> _View:
        mesh, wants, pads = self.wires.mesh, [], []
        for axis, (n, out) in enumerate(zip(extent, window.output_extent(extent), strict=True)):
            own = mesh.atom(n, axis + 1)
            seen = [_seen(window, axis, n, lo, hi) for lo, hi in mesh.atom(out, axis + 1).ranges]
            wants.append(Want(axis + 2, own, own.axis, tuple(ranges for ranges, _ in seen)))
            _, (before, after) = seen[0 if own.axis is None else self.wires.place[own.axis]]
            pads.append((axis + 2, before, after))
        around = {dim for dim, before, after in pads if before or after}
        transfer = Transfer(mesh, tuple(want for want in wants if want.dim in around or not want.own))
        return _View(Channel(self.wires, "halo", transfer, "halo"), tuple(pad for pad in pads if pad[0] in around))


def _seen(window: Window, axis: int, n: int, lo: int, hi: int) -> tuple[tuple[Range, ...], tuple[int, int]]:
    """Return the ranges that outputs [lo, hi) see of an axis of n cells, and how many there are before and after."""
    if lo >= hi:
        return (), (0, 0)
    start = lo * window.stride[axis] - window.padding[axis][0]
    end = (hi - 1) * window.stride[axis] - window.padding[axis][0] + window.span[axis]
    if window.mode == "zeros":
        inside, around = clipped(start, end, n)
        return (inside,), around
    return tuple(_runs(fold(i, n, window.mode) for i in range(start, end))), (0, 0)


def _runs(indices: Iterator[int]) -> Iterator[Range]:
    """Yield ranges of indices that follow each other."""
    start = end = None
    for i in indices:
        if i != end:
            if start is not None and end is not None:
                yield start, end
            start = i
        end = i + 1
    if start is not None and end is not None:
        yield start, end


def _hand(grid: Any, spatial: int) -> _Hand:
    if not isinstance(grid, ProcessGrid):
        raise ConfigError(f"grid: expected a ProcessGrid, got {grid!r}")
    if grid.closed:
        raise GridError("grid: is closed; use halo and reduce inside of its `with` block")
    key = _Hand, spatial
    if key not in grid.kept:
        grid.kept[key] = _Hand(grid, spatial)
    return grid.kept[key]


def _check(x: Any, window: Any) -> None:
    if not isinstance(window, Window):
        raise ConfigError(f"window: expected an nd.Window, got {window!r}")
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dim() != window.ndim + 2:
        expected = f"(N, C, *spatial) of {window.ndim + 2} numbers"
        raise ShapeError(f"x: a window of {window.ndim} axes needs the shape {expected}, got {tuple(x.shape)}")
