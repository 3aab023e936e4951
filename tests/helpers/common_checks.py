"""Checks of halos, messages and redistribution against the results of one process."""

from __future__ import annotations

from functools import partial

import numpy as np

import neondist as nd
from neondist.comm import Message, Redistribution, Reductions
from neondist.errors import UserError
from neondist.geometry import Box, GridShape, Partition

NUMPY_PAD_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "wrap": "wrap"}


def pad_image(image, window):
    """Return the full image with its padding, computed by NumPy."""
    for axis, (sides, mode) in enumerate(zip(window.padding, window.modes, strict=True), start=1):
        options = {"constant_values": window.fill} if mode == "zeros" else {}
        padding = [sides if axis == other_axis else (0, 0) for other_axis in range(image.ndim)]
        image = np.pad(image, padding, mode=NUMPY_PAD_MODE[mode], **options)
    return image


def slice_padded_image(image, window, box):
    """Return the part of the padded image in a tile's input box."""
    before = [p for p, _ in window.padding]
    return pad_image(image, window)[(slice(None), *box.shift(before).slices, slice(None))]


def check_views(grid, extent, window, samples=2, channels=2):
    """Check on all ranks of a grid that views equal the padded image, and the dot-product test of the adjoint."""
    rng = np.random.default_rng(7)
    image = rng.normal(size=(samples, *extent, channels))
    ga = nd.GlobalArray(grid, image.shape, window, dtype="float64")
    for _ in range(2):  # a second pass detects stale data in reused buffers
        tile = ga.scatter(image)
        view = ga.get_fprop_view(tile)
        assert view.shape == ga.view_shape
        window_cells = index_window_cells(ga)
        np.testing.assert_array_equal(view[window_cells], slice_padded_image(image, window, ga.need)[window_cells])
        if set(window.modes) == {"zeros"}:  # cells that no window reads are defined too
            unused, own_box = np.ones(view.shape, bool), ga.own.intersect(ga.need)
            unused[window_cells] = False
            unused[(slice(None), *own_box.relative_to(ga.need).slices)] = False
            assert (view[unused] == window.fill).all()
        dview = np.zeros(view.shape)
        dview[window_cells] = np.random.default_rng(grid.rank).normal(size=view[window_cells].shape)
        dx = ga.get_bprop_view(dview)
        assert dx.shape == ga.local_shape
        forward_product = np.sum((view * dview)[mask_image_cells(ga, view)])
        sums = np.array([forward_product, np.sum(tile * dx), np.sum(np.abs(tile * dx))])
        grid.world.allreduce(sums)
        assert abs(sums[0] - sums[1]) <= 1e-12 * max(1.0, sums[2])
        np.testing.assert_array_equal(ga.gather(tile), image)
        image = -image
    return ga


def list_window_cells(window, out):
    """Return the cells that windows of some outputs read, sorted along each axis, including padding."""
    axes = zip(out.axes(), window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return [sorted({o * s - p + d * i for o in range(lo, hi) for i in range(k)}) for (lo, hi), k, s, (p, _), d in axes]


def index_window_cells(ga):
    """Return an index of the cells of a view that its outputs read."""
    outputs = Partition(ga.window.output_extent(ga.extent), ga.tiles.parts, 1).box(ga.grid.tile)
    axes = zip(list_window_cells(ga.window, outputs), ga.need.lo, strict=True)
    indices = [np.array([cell - start for cell in cells], int) for cells, start in axes]
    return np.ix_(range(ga.global_shape[0]), *indices, range(ga.channels))


def mask_image_cells(ga, view):
    """Return a mask of the cells of a view that depend on the image: all, unless padding is constant."""
    mask = np.ones(view.shape, bool)
    for axis, ((lo, hi), n) in enumerate(zip(ga.need.axes(), ga.extent, strict=True), start=1):
        if ga.window.modes[axis - 1] != "zeros":
            continue
        cells = np.arange(lo, max(lo, hi))
        shape = [1] * view.ndim
        shape[axis] = -1
        mask &= ((cells >= 0) & (cells < n)).reshape(shape)
    return mask


def window_fits(shape, window):
    """Return whether a window fits a shape."""
    try:
        window.check(shape)
    except UserError:
        return False
    return True


def list_grids(size):
    """Return all rows x cols grids of `size` ranks."""
    return [GridShape(1, r, size // r) for r in range(1, size + 1) if size % r == 0]


def max_relative_difference(actual, expected):
    """Return the largest relative difference of two dictionaries of arrays."""
    assert actual.keys() == expected.keys()
    return max(
        float(np.abs(actual[k] - expected[k]).max(initial=0) / max(np.abs(expected[k]).max(initial=0), 1e-300))
        for k in expected
    )


def check_collectives(comm):
    """Check the collectives of a transport, and that later changes of arrays do not affect other ranks."""
    rank, size = comm.rank, comm.size
    local = np.arange(6.0).reshape(2, 3) - 10 * rank
    stacked = np.stack([np.arange(6.0).reshape(2, 3) - 10 * r for r in range(size)])
    for op in ("sum", "max"):
        array = local.copy()
        comm.allreduce(array, op=op)
        np.testing.assert_array_equal(array, getattr(stacked, op)(axis=0))
    specials = [np.nan, np.inf, -np.inf, -1.5, -0.5, 0.0, -np.nan]
    for dtype in ("float64", "float32"):  # each value on each rank
        rolled = np.array([np.roll(specials, r) for r in range(size)], dtype)
        array = rolled[rank].copy()
        comm.allreduce(array, op="max")
        np.testing.assert_array_equal(array, rolled.max(axis=0))
    arrays = [local.copy(), 2 * local]
    for array, request in [(array, comm.iallreduce(array)) for array in arrays]:  # both are pending
        request.wait()
        np.testing.assert_array_equal(array, (1 + (array is arrays[1])) * stacked.sum(axis=0))
    pairs = (local.T, stacked.transpose(0, 2, 1)), (local[:0], stacked[:, :0]), (local[1, 1], stacked[:, 1, 1])
    for array, expected in pairs:
        gathered = comm.allgather_array(array)
        assert gathered.dtype == array.dtype
        np.testing.assert_array_equal(gathered, expected)
    for array in (local.T.copy(), local.copy().T, np.array(2.0 + rank), local[:0].copy()):
        initial = array.copy()
        comm.iallreduce(array).wait()
        np.testing.assert_array_equal(
            array, sum(initial + (r - rank) * (1 if initial.ndim == 0 else -10) for r in range(size))
        )
    for value in (None, "", {"a": [local, "text" * 20], "b": rank}, b"x" * (7 * rank)):
        objects = comm.allgather((rank, value))
        assert [item[0] for item in objects] == list(range(size))
        assert repr(objects[rank][1]) == repr(value)
        assert repr(comm.bcast((rank, value), size - 1)) == repr(objects[-1])
    for dtype in ("float32", "int64", "complex128", "bool"):
        sends = [make_block(rank, peer).astype(dtype) for peer in range(size)]
        received = comm.all_to_all(sends, [make_block(peer, rank).shape for peer in range(size)])
        for block in sends:
            block[...] = 77
        comm.allreduce(np.zeros(1))  # all ranks have changed their arrays
        assert len(received) == size
        for peer, array in enumerate(received):
            assert array.dtype == dtype
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, make_block(peer, rank).astype(dtype))


def check_messages(comm):
    """Check exchanges of boxes around a ring of ranks, for many dtypes and into arrays of other shapes, twice."""
    next_rank, previous_rank = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    for dtype in ("float32", "float64", "uint8", "int64", "complex128", "bool"):

        def make_array(rank, dtype=dtype):
            return (np.arange(7 * 5 * 4).reshape(7, 5, 4) + 50 * rank).astype(dtype)

        for box in (np.s_[1:6, 0:5, 1:3], np.s_[0:7, 2:3, 0:4], np.s_[2:3, 1:2, 3:4], np.s_[3:3, 0:5, 0:4]):
            array, padded = make_array(comm.rank), np.zeros((9, 5, 4), dtype)
            received = np.zeros(array[box].shape, dtype)
            shifted = tuple(slice(part.start + (axis == 0), part.stop + (axis == 0)) for axis, part in enumerate(box))
            exchange = comm.create_exchange(
                [Message(next_rank, array, box), Message(next_rank, array, box)],
                [
                    Message(previous_rank, received, tuple(slice(0, n) for n in received.shape)),
                    Message(previous_rank, padded, shifted),
                ],
            )
            for run in range(2):
                array[...] = make_array(comm.rank + run)
                exchange.run()
                expected = make_array(previous_rank + run)[box]
                np.testing.assert_array_equal(received, expected)
                np.testing.assert_array_equal(padded[shifted], expected)
                assert np.count_nonzero(padded) == np.count_nonzero(expected)


def make_block(source, target):
    """Return the block that a rank sends to another: not contiguous, of individual size, sometimes empty."""
    block = np.arange(60.0).reshape(3, 4, 5) + 100 * source + 1000 * target
    return block[:, ::-1, : (source + 2 * target) % 4].swapaxes(0, 1)


def make_boxes(shape, ranks, kind):
    """Return the box of each rank; `kind`: ranks along each axis, 'whole', 'first' (all on rank 0) or 'none'."""
    empty = Box((0,) * len(shape), (0,) * len(shape))
    if kind == "whole":
        return [Box.of(shape)] * ranks
    boxes = {"first": [Box.of(shape)], "none": []}.get(kind) if isinstance(kind, str) else None
    if boxes is None:
        boxes = Partition(tuple(shape), kind).boxes()
    return boxes + [empty] * (ranks - len(boxes))


def check_redistribution(grid, shape, source, target, lead=()):
    """Check a redistribution in both directions, the dot-product test of its adjoint and the recorded bytes."""
    ranks, rank = grid.size, grid.rank
    log = Reductions(grid)
    sources, targets = make_boxes(shape, ranks, source), make_boxes(shape, ranks, target)
    source_box, target_box = sources[rank], targets[rank]
    redistribution = Redistribution(partial(log.all_to_all, "world"), rank, sources, targets)
    inverse = Redistribution(grid.world.all_to_all, rank, targets, sources)
    array = np.random.default_rng(5).normal(size=(*lead, *shape))
    expected = array if source != "none" else 0 * array
    x = np.ascontiguousarray(array[(..., *source_box.slices)])
    y = redistribution.forward(x)
    np.testing.assert_array_equal(y, expected[(..., *target_box.slices)])
    sent = sum(nbytes * count for (*_, nbytes), count in log.redistribution_counts.items())
    assert sent == log.bytes_reduced == 8 * redistribution.plan.sent_cells * int(np.prod(lead))
    assert all(group == "world" and peer != rank for _, group, peer, _ in log.redistribution_counts)
    if target != "none":
        np.testing.assert_array_equal(inverse.forward(y), x)
    dy = np.random.default_rng(100 + rank).normal(size=y.shape)
    dx = redistribution.adjoint(dy)
    assert dx.shape == x.shape
    sums = np.array([np.sum(y * dy), np.sum(x * dx), np.sum(np.abs(x * dx)), x.size, y.size])
    grid.world.allreduce(sums)
    assert abs(sums[0] - sums[1]) <= 1e-12 * max(1.0, sums[2])
    if "whole" not in (source, target):  # every cell has one owner on both sides
        np.testing.assert_array_equal(redistribution.adjoint(y), x if target != "none" else 0 * x)
    return redistribution
