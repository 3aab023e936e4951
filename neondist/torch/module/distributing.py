"""The function `distribute`, with validation of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ...comm import ProcessGrid
from ...errors import ConfigError
from ...registry.arguments import check_value
from ...registry.ranges import Count
from ...system.memory import count_local_ranks, model_bytes_per_rank, parse_bytes
from ..exchange.schemes import Schemes
from ..exchange.transport import world
from ..execution.segments import Strips
from .module import DistributedModule


def distribute(
    module: nn.Module,
    example_shape: Sequence[int] | Sequence[Sequence[int]],
    grid: ProcessGrid | None = None,
    gather_at: Sequence[str] = (),
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    transport: str = "mpi",
    *,
    recompute: bool = False,
    compile: bool | Literal["auto"] | Callable[..., Any] = False,
    scheme: Schemes = "halo",
    memory: int | str | None = None,
    strips: Strips = None,
    spatial: int | None = None,
) -> DistributedModule:
    """Distribute a PyTorch module: each rank computes one tile of the images, with the results of a single process.

    The module is captured with torch.export at the global shape, without allocating tensors of that size; each operator
    becomes local computation, a halo exchange, or a reduction over ranks. Gradients of parameters are summed over all
    ranks when `backward` returns. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the same weights on every rank; it is neither copied nor modified.
    example_shape : sequence of int
        Global shape (N, C, *spatial) of the whole batch and image. For several inputs, a sequence of shapes; inputs
        with a different number of dimensions from the first are split only along the batch. (N, features) has no
        spatial axes. Batches and images of other sizes can be passed to `scatter` later; the module is captured once
        for each size.
    grid : ProcessGrid, optional
        Grid of ranks. Default: all ranks.
    gather_at : sequence of str
        Paths of modules that every rank computes on whole arrays, because an operator in them cannot be distributed.
    dtype : torch.dtype, or one for each input, optional
        Dtype of the inputs. Default: that of the module's first floating-point parameter.
    transport : 'mpi' or 'torch'
        Transport if no grid is given: mpi4py, or torch.distributed (for `torchrun`).
    recompute : bool
        Store only the boundary tensors of about sqrt(n) segments of the module's n operators, and recompute the
        segments in the backward pass, including their messages. This saves memory at the cost of one more forward pass
        (Chen et al. 2016, "Training deep nets with sublinear memory cost").
    compile : bool, 'auto', or callable
        Compile the computation between messages, or on one rank the module, with torch.compile, or with this function.
        With 'auto', on several ranks, the slowest part of it is compiled and timed now, and the rest is compiled if
        that is expected to save time within 1,000 training steps; `is_compiled` is the decision.
    scheme : ExchangePolicy or str, or a dict of module path to scheme
        Border scheme for cells of other tiles. Default: exact, with one halo exchange per window. With
        'deep_halo(layers=3)', three consecutive windows share an exchange and recompute cells of other tiles; with
        'auto', a planner selects which windows do so. With 'overlap_tile', `scatter` returns tiles with all the cells
        that they need. Other schemes, such as 'tower' or 'stale(steps=2)', are approximate (docs/schemes.md). Modules
        that are not in the dict inherit the scheme of their parent. Only operators with a window are approximated.
    memory : int or str, optional
        Total memory limit of all ranks on a machine, such as '8GiB'. A pass that needs more is computed block by block
        up to the first operator that depends on the whole image, or has an approximate border scheme; in training,
        these blocks are computed twice. Default: no limit.
    strips : int or 'auto', optional
        Output rows per strip: windows and the operators after them, up to the next exchange or reduction over the
        image, are executed strip by strip, and recomputed in the backward pass instead of storing activations. 'auto':
        as many rows as have results of at most 1 MiB per sample.
    spatial : int, optional
        Number of spatial axes; 0 for inputs other than images, such as sequences (N, length, features). Replicas then
        share the batch, and every rank of a replica has all of its samples. Default: the number of axes after the
        channels of the first input.

    Returns
    -------
    DistributedModule
        The distributed module; call it with `model.scatter(image)`.

    Raises
    ------
    UnsupportedOperator
        If an operator cannot be distributed; the message names it, the module's path, and the user's file and line.
    ConfigError
        If an argument is invalid, or the module cannot be captured or differs between ranks.
    """
    check_value("strips", strips, Count | Literal["auto"] | None)
    check_value("transport", transport, Literal["mpi", "torch"])
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    shapes = _parse_shapes(example_shape)
    spatial_ndim = len(shapes[0]) - 2
    if spatial not in (None, 0, spatial_ndim) or (spatial == 0 and max(map(len, shapes)) > 4):
        raise ConfigError(f"spatial: {spatial!r}; expected {spatial_ndim}, or 0 for inputs with at most four axes")
    dtypes: list[Any] = list(dtype) if isinstance(dtype, (list, tuple)) else [dtype] * len(shapes)
    if len(dtypes) != len(shapes) or not all(item is None or isinstance(item, torch.dtype) for item in dtypes):
        raise ConfigError(f"dtype: expected a torch.dtype, or one per input ({len(shapes)}), got {dtype!r}")
    if not (grid is None or isinstance(grid, ProcessGrid)):
        raise ConfigError(f"grid: expected a ProcessGrid, got {grid!r}")
    if not (compile in (None, "auto") or isinstance(compile, bool) or callable(compile)):
        raise ConfigError(
            f"compile: {compile!r}; expected True for torch.compile, 'auto', or a function that compiles a function,"
            " such as functools.partial(torch.compile, mode='reduce-overhead')"
        )
    compiler = compile if callable(compile) else partial(torch.compile, dynamic=False) if compile else None
    if grid is None:
        grid = ProcessGrid() if transport == "mpi" else ProcessGrid(world())
    local_ranks = count_local_ranks(grid.size)
    memory_per_rank = None if memory is None else model_bytes_per_rank(parse_bytes("memory", memory), local_ranks)
    return DistributedModule(
        module, shapes, dtypes, grid, compiler, spatial, compile == "auto",
        gather_at=gather_at, recompute=recompute, scheme=scheme, strips=strips, memory=memory_per_rank,
    )  # fmt: skip


def _parse_shapes(example_shape: Any) -> list[tuple[int, ...]]:
    """Return the shape of each input, as a list of tuples."""
    if isinstance(example_shape, Mapping):
        raise ConfigError(
            f"example_shape: {example_shape!r}; inputs are tensors: wrap a module whose forward takes a dictionary"
            " in one that builds it from tensors, and give a list of their shapes"
        )
    try:
        shapes = [example_shape] if all(isinstance(n, int) for n in example_shape) else list(example_shape)
        result = [tuple(int(n) for n in shape) for shape in shapes]
    except (TypeError, ValueError):
        result = []
    if not result or len(result[0]) not in (2, 3, 4, 5) or any(n < 1 for n in result[0]):
        raise ConfigError(
            f"example_shape: {example_shape!r}; expected (N, C, *spatial) with at most three spatial axes, all > 0"
        )
    return result
