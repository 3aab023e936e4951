"""Oracles that several tests share: what one process would see, and sums over ranks."""

from __future__ import annotations

from functools import partial

import numpy as np

import neondist as nd
from neondist.comm import Message, Redistribution, Reductions
from neondist.errors import UserError
from neondist.geometry import Box, GridShape, Partition

PAD_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "wrap": "wrap"}


def padded_whole(whole, window):
    """The whole image with its padding, by NumPy."""
    for axis, (sides, mode) in enumerate(zip(window.padding, window.modes, strict=True), start=1):
        extra = {"constant_values": window.fill} if mode == "zeros" else {}
        alone = [sides if axis == at else (0, 0) for at in range(whole.ndim)]
        whole = np.pad(whole, alone, mode=PAD_MODE[mode], **extra)
    return whole


def expected_view(whole, window, need):
    """The part of the padded image that a tile needs."""
    before = [p for p, _ in window.padding]
    return padded_whole(whole, window)[(slice(None), *need.shift(before).slices, slice(None))]


def check_views(grid, extent, window, samples=2, channels=2):
    """Views equal the padded image; the adjoint passes the dot test; both, over all ranks of `grid`."""
    rng = np.random.default_rng(7)
    whole = rng.normal(size=(samples, *extent, channels))
    ga = nd.GlobalArray(grid, whole.shape, window, dtype="float64")
    for _ in range(2):  # a second round finds what a reused buffer left behind
        tile = ga.scatter(whole)
        view = ga.get_fprop_view(tile)
        assert view.shape == ga.view_shape
        looked = index_of_looks(ga)
        np.testing.assert_array_equal(view[looked], expected_view(whole, window, ga.need)[looked])
        if set(window.modes) == {"zeros"}:  # what nobody looks at is not left to chance
            between, own = np.ones(view.shape, bool), ga.own.intersect(ga.need)
            between[looked] = False
            between[(slice(None), *own.relative_to(ga.need).slices)] = False
            assert (view[between] == window.fill).all()
        dview = np.zeros(view.shape)
        dview[looked] = np.random.default_rng(grid.rank).normal(size=view[looked].shape)
        dx = ga.get_bprop_view(dview)
        assert dx.shape == ga.local_shape
        left = np.sum((view * dview)[inside(ga, view)])
        sums = np.array([left, np.sum(tile * dx), np.sum(np.abs(tile * dx))])
        grid.world.allreduce(sums)
        assert abs(sums[0] - sums[1]) <= 1e-12 * max(1.0, sums[2])
        np.testing.assert_array_equal(ga.gather(tile), whole)
        whole = -whole
    return ga


def looked_at(window, out):
    """Sorted, along every axis, the cells at which the windows of some outputs look; also outside of the image."""
    axes = zip(out.axes(), window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return [sorted({o * s - p + d * i for o in range(lo, hi) for i in range(k)}) for (lo, hi), k, s, (p, _), d in axes]


def index_of_looks(ga):
    """An index of the cells of a view at which its outputs look."""
    outputs = Partition(ga.window.output_extent(ga.extent), ga.tiles.parts, 1).box(ga.grid.tile)
    axes = zip(looked_at(ga.window, outputs), ga.need.lo, strict=True)
    found = [np.array([cell - start for cell in cells], int) for cells, start in axes]
    return np.ix_(range(ga.global_shape[0]), *found, range(ga.channels))


def inside(ga, view):
    """Cells of the view that depend on the image: all, unless padding is a constant."""
    mask = np.ones(view.shape, bool)
    for axis, ((lo, hi), n) in enumerate(zip(ga.need.axes(), ga.extent, strict=True), start=1):
        if ga.window.modes[axis - 1] != "zeros":
            continue
        cells = np.arange(lo, max(lo, hi))
        shape = [1] * view.ndim
        shape[axis] = -1
        mask &= ((cells >= 0) & (cells < n)).reshape(shape)
    return mask


def slides(shape, window):
    """Whether the window can slide over the shape."""
    try:
        window.check(shape)
    except UserError:
        return False
    return True


def grids(size):
    """Every rows x cols of `size` ranks."""
    return [GridShape(1, r, size // r) for r in range(1, size + 1) if size % r == 0]


def worst(found, expected):
    """The largest relative difference of two dicts of arrays."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[k] - expected[k]).max(initial=0) / max(np.abs(expected[k]).max(initial=0), 1e-300))
        for k in expected
    )


def check_collectives(comm):
    """What a transport computes of arrays, and that nobody sees what a rank does with its arrays later."""
    rank, size = comm.rank, comm.size
    one = np.arange(6.0).reshape(2, 3) - 10 * rank
    ones = np.stack([np.arange(6.0).reshape(2, 3) - 10 * r for r in range(size)])
    for op in ("sum", "max"):
        array = one.copy()
        comm.allreduce(array, op=op)
        np.testing.assert_array_equal(array, getattr(ones, op)(axis=0))
    arrays = [one.copy(), 2 * one]
    for array, request in [(array, comm.iallreduce(array)) for array in arrays]:  # both under way
        request.wait()
        np.testing.assert_array_equal(array, (1 + (array is arrays[1])) * ones.sum(axis=0))
    for given, expected in ((one.T, ones.transpose(0, 2, 1)), (one[:0], ones[:, :0]), (one[1, 1], ones[:, 1, 1])):
        gathered = comm.allgather_array(given)
        assert gathered.dtype == given.dtype
        np.testing.assert_array_equal(gathered, expected)
    for array in (one.T.copy(), one.copy().T, np.array(2.0 + rank), one[:0].copy()):
        given = array.copy()
        comm.iallreduce(array).wait()
        np.testing.assert_array_equal(
            array, sum(given + (r - rank) * (1 if given.ndim == 0 else -10) for r in range(size))
        )
    for value in (None, "", {"a": [one, "text" * 20], "b": rank}, b"x" * (7 * rank)):
        found = comm.allgather((rank, value))
        assert [each[0] for each in found] == list(range(size))
        assert repr(found[rank][1]) == repr(value)
        assert repr(comm.bcast((rank, value), size - 1)) == repr(found[-1])
    for dtype in ("float32", "int64", "complex128", "bool"):
        sends = [piece(rank, peer).astype(dtype) for peer in range(size)]
        received = comm.all_to_all(sends, [piece(peer, rank).shape for peer in range(size)])
        for mine in sends:
            mine[...] = 77
        comm.allreduce(np.zeros(1))  # all have changed theirs
        assert len(received) == size
        for peer, array in enumerate(received):
            assert array.dtype == dtype
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, piece(peer, rank).astype(dtype))


def check_messages(comm):
    """Boxes of arrays of many dtypes that go around all ranks, into arrays of other shapes, twice."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    for dtype in ("float32", "float64", "uint8", "int64", "complex128", "bool"):

        def made(rank, dtype=dtype):
            return (np.arange(7 * 5 * 4).reshape(7, 5, 4) + 50 * rank).astype(dtype)

        for box in (np.s_[1:6, 0:5, 1:3], np.s_[0:7, 2:3, 0:4], np.s_[2:3, 1:2, 3:4], np.s_[3:3, 0:5, 0:4]):
            array, kept = made(comm.rank), np.zeros((9, 5, 4), dtype)
            whole = np.zeros(array[box].shape, dtype)
            same = tuple(slice(at.start + (axis == 0), at.stop + (axis == 0)) for axis, at in enumerate(box))
            exchange = comm.exchange(
                [Message(after, array, box), Message(after, array, box)],
                [Message(before, whole, tuple(slice(0, n) for n in whole.shape)), Message(before, kept, same)],
            )
            for run in range(2):
                array[...] = made(comm.rank + run)
                exchange.run()
                expected = made(before + run)[box]
                np.testing.assert_array_equal(whole, expected)
                np.testing.assert_array_equal(kept[same], expected)
                assert np.count_nonzero(kept) == np.count_nonzero(expected)


def piece(source, target):
    """What rank `source` sends to rank `target`: neither contiguous nor as large as any other, sometimes empty."""
    whole = np.arange(60.0).reshape(3, 4, 5) + 100 * source + 1000 * target
    return whole[:, ::-1, : (source + 2 * target) % 4].swapaxes(0, 1)


def boxes_of(shape, ranks, kind):
    """The box of each rank: `kind` is a number of ranks on each axis, 'whole', 'first' (all on rank 0) or 'none'."""
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    if kind == "whole":
        return [Box.of(shape)] * ranks
    found = {"first": [Box.of(shape)], "none": []}.get(kind) if isinstance(kind, str) else None
    if found is None:
        found = Partition(tuple(shape), kind).boxes()
    return found + [nothing] * (ranks - len(found))


def check_redistribution(grid, shape, source, target, lead=()):
    """Each cell arrives, and comes back; the adjoint passes the dot test; what was sent is recorded."""
    ranks, rank = grid.size, grid.rank
    log = Reductions(grid)
    sources, targets = boxes_of(shape, ranks, source), boxes_of(shape, ranks, target)
    mine, wanted = sources[rank], targets[rank]
    there = Redistribution(partial(log.all_to_all, "world"), rank, sources, targets)
    back = Redistribution(grid.world.all_to_all, rank, targets, sources)
    whole = np.random.default_rng(5).normal(size=(*lead, *shape))
    known = whole if source != "none" else 0 * whole
    x = np.ascontiguousarray(whole[(..., *mine.slices)])
    y = there.forward(x)
    np.testing.assert_array_equal(y, known[(..., *wanted.slices)])
    sent = sum(nbytes * count for (*_, nbytes), count in log.moved.items())
    assert sent == log.bytes_reduced == 8 * there.plan.sent_cells * int(np.prod(lead))
    assert all(group == "world" and peer != rank for _, group, peer, _ in log.moved)
    if target != "none":
        np.testing.assert_array_equal(back.forward(y), x)
    dy = np.random.default_rng(100 + rank).normal(size=y.shape)
    dx = there.adjoint(dy)
    assert dx.shape == x.shape
    sums = np.array([np.sum(y * dy), np.sum(x * dx), np.sum(np.abs(x * dx)), x.size, y.size])
    grid.world.allreduce(sums)
    assert abs(sums[0] - sums[1]) <= 1e-12 * max(1.0, sums[2])
    if "whole" not in (source, target):  # each cell once on both sides
        np.testing.assert_array_equal(there.adjoint(y), x if target != "none" else 0 * x)
    return there
