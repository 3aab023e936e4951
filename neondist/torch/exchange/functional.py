"""Halo exchange and reductions as differentiable PyTorch operators, for code that tiles images itself.

A custom operator takes no Python objects: a grid is passed as its handle, and a window as its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from ...comm import ProcessGrid
from ...comm.agreement import CALL_KEY, check_equal_on_ranks, raise_if_any_failed
from ...errors import ConfigError, GridError, ShapeError, UserError
from ...geometry import ViewTransfer, Window
from ...terminal.console import counted
from ..ir.layout import local_shape, shape_of
from ..ir.reach import Reach, dim_request_of
from .channel import TransferChannel, memory_format_of
from .functions import save_recompute_trigger, trigger_recompute
from .mesh_comm import MeshComm

_HALO_ARGS = "int grid, int[] kernel, int[] stride, int[] padding, int[] dilation, float fill, str mode, int[] extent"


def halo(x: torch.Tensor, window: Window, grid: ProcessGrid, global_shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return the view of a window on a tiled image: this rank's tile plus its halo.

    Each view contains the cells needed for this rank's part of the window's output, which is also split evenly: a
    convolution without padding over the views yields the tiles of the output. Padding is filled in. Gradients are
    those of the sum, over all ranks, of the values on which `backward` is called. Collective, forward and backward.

    `halo` is implemented as the custom operator `torch.ops.neondist.halo`, whose shapes and gradient torch.compile
    knows: with `global_shape`, it compiles into a single graph.

    Parameters
    ----------
    x : torch.Tensor (N, C, *spatial)
        This rank's tile, `image[..., *grid.tile_box(extent).slices]`, of its replica's part of the batch.
    window : Window
        Window with one axis per spatial axis of x.
    grid : ProcessGrid
    global_shape : sequence of int, optional
        Global shape (N, C, *spatial). Default: determined with a small message in each call.

    Returns
    -------
    torch.Tensor (N, C, *spatial)
        This rank's view.

    Raises
    ------
    ShapeError
        On all ranks, if the tiles are not an even split of one image.
    """
    _check_grid(grid)
    try:
        _check_arguments(x, window, global_shape)
    except UserError as error:
        check_equal_on_ranks(grid.world, {}, error)
    find_extent = _uncompiled_global_extent_of if torch.compiler.is_compiling() else _global_extent_of
    extent = find_extent(x, window, grid) if global_shape is None else tuple(global_shape)[2:]
    padding = tuple(chain.from_iterable(window.padding))
    window_args = window.kernel, window.stride, padding, window.dilation, window.fill, ",".join(window.modes)
    return torch.ops.neondist.halo(x, grid.handle, *window_args, extent)


def _global_extent_of(x: torch.Tensor, window: Window, grid: ProcessGrid) -> tuple[int, ...]:
    return _grid_cache_of(grid, window.ndim).global_extent_of(x, window)


# torch.compiler.disable as a decorator would import the compiler, which takes 2 s, with neondist.torch
_uncompiled_global_extent_of = torch._disable_dynamo(_global_extent_of)


def reduce(x: torch.Tensor, op: str, grid: ProcessGrid, group: str = "tiles") -> torch.Tensor:
    """Return the elementwise sum or maximum over ranks, on every rank (an allreduce). Collective.

    As for `halo`, gradients are those of the sum of the values on which the ranks call `backward`. Therefore, call
    `backward` on this rank's share of the loss, not on a sum known to all ranks, which would count once per rank.

    It is implemented as the custom operator `torch.ops.neondist.reduce`, whose shapes and gradient torch.compile knows.

    Parameters
    ----------
    x : torch.Tensor
        Tensor of the same shape on all ranks.
    op : 'sum' or 'max'
        The gradient of a maximum is divided equally among all elements that attain it.
    grid : ProcessGrid
    group : 'tiles', 'replicas' or 'world'
        The ranks of one replica, the ranks with the same tile, or all ranks.

    Returns
    -------
    torch.Tensor
        Tensor of the shape of x.
    """
    if op not in ("sum", "max"):
        raise ConfigError(f"op: {op!r} is unknown; choose 'sum' or 'max'")
    if group not in ("tiles", "replicas", "world"):
        raise ConfigError(f"group: {group!r} is unknown; choose 'tiles', 'replicas' or 'world'")
    _check_grid(grid)
    if not isinstance(x, torch.Tensor):
        check_equal_on_ranks(grid.world, {}, ShapeError(f"x: expected a torch.Tensor, got {type(x).__name__}"))
    return torch.ops.neondist.reduce(x, op, grid.handle, group)


@custom_op("neondist::halo", mutates_args=(), schema=f"(Tensor x, {_HALO_ARGS}) -> Tensor")
def _halo(x: torch.Tensor, grid: int, *window_args: Any) -> torch.Tensor:
    grid_cache, window, extent = _decode_halo_arguments(grid, window_args)
    grid_cache.check_arguments_on_all_ranks(x, window, extent)
    view_plan = grid_cache.view_plan(window, extent)
    with view_plan.channel.observe("forward"):
        return view_plan.channel.view(x, view_plan.pads, window.fill)


@custom_op("neondist::halo_adjoint", mutates_args=(), schema=f"(Tensor gradient, int[] shape, {_HALO_ARGS}) -> Tensor")
def _halo_adjoint(gradient: torch.Tensor, shape: list[int], grid: int, *window_args: Any) -> torch.Tensor:
    grid_cache, window, extent = _decode_halo_arguments(grid, window_args)
    compared_values = {CALL_KEY: "backward of halo", "window": window, "global_shape": extent}
    check_equal_on_ranks(grid_cache.comm.grid.world, compared_values)
    view_plan = grid_cache.view_plan(window, extent)
    with view_plan.channel.observe("backward"):
        return view_plan.channel.adjoint(gradient, shape, view_plan.pads)


@_halo.register_fake
def _(x: torch.Tensor, grid: int, *window_args: Any) -> torch.Tensor:
    grid_cache, window, extent = _decode_halo_arguments(grid, window_args)
    grid_cache.check_tile_shape(x, window, extent)
    view_plan = grid_cache.view_plan(window, extent)
    return view_plan.channel.empty_like_view(x, view_plan.pads)


@_halo_adjoint.register_fake
def _(gradient: torch.Tensor, shape: list[int], grid: int, *window_args: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format_of(gradient))


def _save_halo_args(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, *ctx.window_args = inputs
    ctx.shape = x.shape
    save_recompute_trigger(ctx)


def _halo_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    trigger_recompute(ctx)
    return torch.ops.neondist.halo_adjoint(gradient, ctx.shape, *ctx.window_args), *[None] * len(ctx.window_args)


_halo.register_autograd(_halo_backward, setup_context=_save_halo_args)


@custom_op("neondist::reduce", mutates_args=(), schema="(Tensor x, str op, int grid, str group) -> Tensor")
def _reduce(x: torch.Tensor, op: str, grid: int, group: str) -> torch.Tensor:
    grid_cache = _grid_cache_of(ProcessGrid.from_handle(grid), 2)
    compared_values = {
        CALL_KEY: f"reduce {op} over {group}",
        "the shape of x": tuple(x.shape),
        "the dtype of x": x.dtype,
    }
    check_equal_on_ranks(grid_cache.comm.grid.world, compared_values | {"x.requires_grad": x.requires_grad})
    all_axes = grid_cache.comm.mesh.axes
    axes = {"tiles": all_axes - {0}, "replicas": all_axes & {0}, "world": all_axes}[group]
    return grid_cache.comm.reduce("reduce", "forward", x, axes, op)


@_reduce.register_fake
def _(x: torch.Tensor, op: str, grid: int, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _save_reduce_args(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, ctx.op, *ctx.group_args = inputs
    if ctx.op == "max":
        ctx.save_for_backward(x, output)
    else:
        save_recompute_trigger(ctx)


def _reduce_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    saved_tensors = trigger_recompute(ctx)
    gradient = torch.ops.neondist.reduce(gradient, "sum", *ctx.group_args)
    if ctx.op == "max":
        x, maximum = saved_tensors
        is_maximum = (x == maximum).to(gradient.dtype)
        gradient = gradient * is_maximum / torch.ops.neondist.reduce(is_maximum, "sum", *ctx.group_args).clamp(min=1)
    return gradient, None, None, None


_reduce.register_autograd(_reduce_backward, setup_context=_save_reduce_args)


class _HaloViewPlan(NamedTuple):
    channel: TransferChannel
    pads: tuple[tuple[int, int, int], ...]


class _GridCache:
    """Cache of a grid for images with a given number of axes: communicators, planned messages, known extents."""

    def __init__(self, grid: ProcessGrid, spatial_ndim: int) -> None:
        self.comm = MeshComm(grid, spatial_ndim)
        self._view_plans_by_window: dict[tuple[Window, tuple[int, ...]], _HaloViewPlan] = {}
        self._extent_by_tile_shape: dict[tuple[int, ...], tuple[int, ...]] = {}

    def global_extent_of(self, x: torch.Tensor, window: Window) -> tuple[int, ...]:
        """Return the extent of the whole image, gathered from the ranks. Collective."""
        shape = tuple(x.shape)
        extent = self._extent_by_tile_shape.get(shape)
        # only some ranks may have seen their tile's shape before: check whether all know the extent
        compared_values = {CALL_KEY: "halo", "window": window, "global_shape": None}
        known_extent = (-1,) if extent is None else extent
        if not check_equal_on_ranks(self.comm.grid.world, compared_values, versions=known_extent) or extent is None:
            extent = self._extent_by_tile_shape[shape] = self._gather_extent(shape)
        return extent

    def check_arguments_on_all_ranks(self, x: torch.Tensor, window: Window, extent: tuple[int, ...]) -> None:
        """Raise on all ranks if the arguments of any rank are invalid, or differ between ranks. Collective."""
        error = None
        try:
            self.check_tile_shape(x, window, extent)
        except UserError as problem:
            error = problem
        compared_values = {
            CALL_KEY: "halo",
            "window": window,
            "x.requires_grad": x.requires_grad,
            "the dtype of x": x.dtype,
        }
        num_samples = x.shape[0] if self.comm.grid.replicas == 1 else "any number"  # it may differ between replicas
        compared_values |= {"the number of samples of x": num_samples, "the number of channels of x": x.shape[1]}
        compared_values["global_shape"] = extent
        check_equal_on_ranks(self.comm.grid.world, compared_values, error)

    def _gather_extent(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        mesh, world = self.comm.mesh, self.comm.grid.world
        shapes = world.allgather(shape)
        extent = tuple(
            sum(
                shapes[mesh.rank([at if mesh_axis == axis else 0 for mesh_axis in range(len(mesh.parts))])][axis + 1]
                for at in range(mesh.parts[axis])
            )
            for axis in range(1, mesh.spatial_ndim + 1)
        )
        error = None
        try:
            self._check_shape(shape, extent)
        except ShapeError as problem:
            error = problem
        raise_if_any_failed(world, error)
        return extent

    def check_tile_shape(self, x: torch.Tensor, window: Window, extent: tuple[int, ...]) -> None:
        """Raise ShapeError if x is not this rank's tile of an image of this extent, or if the image is too small."""
        self._check_shape(tuple(x.shape), extent)
        window.check(extent)

    def _check_shape(self, shape: tuple[int, ...], extent: tuple[int, ...]) -> None:
        mesh = self.comm.mesh
        layout = tuple((mesh.even_atom(n, axis + 1),) for axis, n in enumerate(extent))
        expected_extent = local_shape(layout, self.comm.place)
        if shape[2:] != expected_extent:
            raise ShapeError(
                f"rank {self.comm.grid.rank}: x has spatial extents {shape[2:]}, but this rank's tile of"
                f" {shape_of(layout)} is {expected_extent}; cut the image with grid.tile_box"
            )

    def view_plan(self, window: Window, extent: tuple[int, ...]) -> _HaloViewPlan:
        """Return the plan of the view for a window over an image, computed once."""
        if (window, extent) in self._view_plans_by_window:
            return self._view_plans_by_window[window, extent]
        mesh, requests, pads = self.comm.mesh, [], []
        for axis, (n, out) in enumerate(zip(extent, window.output_extent(extent), strict=True)):
            image_atom = mesh.even_atom(n, axis + 1)
            reach = Reach(mesh.even_atom(out, axis + 1), window.axis_window(axis), with_padding=True)
            request, pads_by_part = dim_request_of(reach, axis + 2, image_atom)
            requests.append(replace(request, used=None))  # user code may read every cell
            pads.append((axis + 2, *pads_by_part[request.part(self.comm.place)]))
        padded_dims = {dim for dim, before, after in pads if before or after}
        exchange_requests = tuple(
            request for request in requests if request.dim in padded_dims or not request.requests_only_own_cells
        )
        channel = TransferChannel(self.comm, "halo", ViewTransfer(mesh.parts, exchange_requests), "halo")
        view_plan = _HaloViewPlan(channel, tuple(pad for pad in pads if pad[0] in padded_dims))
        self._view_plans_by_window[window, extent] = view_plan
        return view_plan


def _grid_cache_of(grid: ProcessGrid, spatial_ndim: int) -> _GridCache:
    key = _GridCache, spatial_ndim
    if key not in grid.cached_objects:
        grid.cached_objects[key] = _GridCache(grid, spatial_ndim)
    return grid.cached_objects[key]


def _decode_halo_arguments(grid: int, window_args: Sequence[Any]) -> tuple[_GridCache, Window, tuple[int, ...]]:
    """Return the grid's cache, window and extent encoded in an operator's arguments."""
    kernel, stride, padding, dilation, fill, mode, extent = window_args
    padding_sides = tuple(zip(padding[::2], padding[1::2], strict=True))
    window = Window(tuple(kernel), tuple(stride), padding_sides, tuple(dilation), fill=fill, mode=mode.split(","))
    return _grid_cache_of(ProcessGrid.from_handle(grid), window.ndim), window, tuple(extent)


def _check_grid(grid: Any) -> None:
    if not isinstance(grid, ProcessGrid):
        raise ConfigError(f"grid: expected a ProcessGrid, got {grid!r}")
    if grid.closed:
        raise GridError("grid: already closed; call halo and reduce inside its `with` block")


def _check_arguments(x: Any, window: Any, global_shape: Any) -> None:
    if not isinstance(window, Window):
        raise ConfigError(f"window: expected an nd.Window, got {window!r}")
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dim() != window.ndim + 2:
        raise ShapeError(
            f"x: a window with {counted(window.ndim, 'axis', 'axes')} needs a {window.ndim + 2}-D tensor"
            f" (N, C, *spatial), got shape {tuple(x.shape)}"
        )
    if global_shape is not None and len(global_shape) != x.dim():
        raise ShapeError(f"global_shape: expected {x.dim()} numbers (N, C, *spatial), got {len(global_shape)}")
