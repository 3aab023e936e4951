"""Pure geometry, on which all distributed tests depend."""

from fractions import Fraction
from itertools import product
from math import floor

import numpy as np
import pytest
from common_checks import list_window_cells, slice_padded_image, window_fits
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from window_strategies import windows

from neondist.errors import ConfigError, GridError, ShapeError
from neondist.geometry import (
    Box,
    DimRequest,
    GradientWindow,
    GridShape,
    HaloPlan,
    Partition,
    RepartitionPlan,
    Upsampling,
    Window,
    clip_ranges,
    fold_index,
    grid_shape,
    group_into_ranges,
    part_range,
    same_padding,
    total_halo_volume,
)

partitions_3d = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


@given(st.integers(0, 200), st.integers(1, 20))
def test_parts_are_balanced(n, parts):
    ranges = [part_range(n, parts, i) for i in range(parts)]
    assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
    assert ranges[-1][1] == n
    sizes = [hi - lo for lo, hi in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(-10, 70), st.integers(-10, 70))
def test_owners_are_the_parts_overlapping_a_range(n, parts, lo, hi):
    lo, hi = max(lo, 0), min(hi, n)
    ranges = ((part, *part_range(n, parts, part)) for part in range(parts))
    expected = [(part, max(a, lo), min(b, hi)) for part, a, b in ranges if max(a, lo) < min(b, hi)]
    request = DimRequest(0, Partition((n,), (parts,)).atom(0), None, (((lo, hi),),))
    overlaps = list(request.overlaps(0))
    assert [(part, cells.start, cells.stop) for part, cells, _ in overlaps] == expected
    assert all(offset == -lo for *_, offset in overlaps)


box_strategy = st.tuples(*[st.integers(-5, 5)] * 4).map(lambda v: Box((v[0], v[1]), (v[0] + v[2], v[1] + v[3])))


def list_cells(box):
    return set(product(*(range(lo, hi) for lo, hi in box.axes())))


@given(box_strategy, box_strategy)
def test_box_operations_match_cell_sets(a, b):
    assert list_cells(a.intersect(b)) == list_cells(a) & list_cells(b)
    assert list_cells(a) | list_cells(b) <= list_cells(a.hull(b))
    assert a.size == len(list_cells(a))
    assert a.empty == (not list_cells(a))
    assert list_cells(a.shift((1, -2))) == {(i + 1, j - 2) for i, j in list_cells(a)}


@given(windows(ndim=1))
def test_window_needs_match_convolution_reads(case):
    (n,), window = case
    assume(window_fits((n,), window))
    (k,), (s,), ((p, q),), (d,) = window.kernel, window.stride, window.padding, window.dilation
    reads = [[o * s + d * i - p for i in range(k)] for o in range(1000) if o * s + d * (k - 1) < n + p + q]
    assert window.output_extent(n) == len(reads)
    need = window.needs(Box((0,), (len(reads),)))
    assert (need.lo[0], need.hi[0]) == (reads[0][0], reads[-1][-1] + 1)


@example(((7, 6), Window((1, 3), stride=(2, 1), padding=0)), (1, 2, 2))
@given(windows(), partitions_3d)
@settings(max_examples=200)
@pytest.mark.long
def test_plans_deliver_every_needed_cell_once(case, parts):
    """Execute all plans on numbered cells; check the views, and that senders and receivers agree."""
    extent, window = case
    assume(window_fits(extent, window))
    partition = GridShape(1, *parts).partition(extent)
    image = np.arange(1, 1 + int(np.prod(extent)), dtype=float).reshape(1, *extent, 1)
    plans = [HaloPlan.of(partition, window, tile) for tile in range(partition.tiles)]
    outputs = Partition(window.output_extent(extent), partition.parts, partition.num_copies_of_vector)
    for tile, plan in enumerate(plans):
        reads = list_window_cells(window, outputs.box(tile))
        axes = zip(reads, extent, window.modes, strict=True)
        sources = [{source_cell(i, n, mode) for i in axis} - {None} for axis, n, mode in axes]
        needed, own = set(product(*sources)), list_cells(plan.own)
        received = [cell for piece in plan.receives for cell in product(*piece.source.ranges)]
        if "wrap" not in window.modes:  # a wrapped image may receive a cell twice
            assert len(received) == len(set(received))
        assert set(received) == needed - own  # and nothing else is sent
        buffer = np.full(plan.buffer.shape, window.fill)
        for piece in (*plan.receives, *plan.local):
            assert set(product(*piece.source.ranges)) <= list_cells(plans[piece.peer].own)
            target = piece.target.relative_to(plan.buffer).slices
            buffer[target] = image[(0, *piece.source.slices, 0)]
        for peer, other in enumerate(plans):
            sent = [p.source for p in plan.sends if p.peer == peer]
            assert sent == [p.source for p in other.receives if p.peer == tile]
        if set(window.modes) <= {"zeros", "wrap"}:
            need = plan.need.relative_to(plan.buffer).slices
            expected = slice_padded_image(image, window, plan.need)[0, ..., 0]
            read_index = np.ix_(*([i - lo for i in axis] for axis, lo in zip(reads, plan.need.lo, strict=True)))
            np.testing.assert_array_equal(buffer[need][read_index], expected[read_index])
    assert sum(p.sent_cells for p in plans) == sum(p.halo_volume for p in plans)
    assert total_halo_volume(partition, window) == sum(p.halo_volume for p in plans)


def source_cell(i, n, mode):
    """Return the source cell of cell i on an axis of n cells, or None for constant padding."""
    return i if 0 <= i < n else None if mode == "zeros" else fold_index(i, n, mode)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), partitions_3d, partitions_3d, st.integers(1, 3))
def test_repartition_moves_every_cell_to_its_new_owner(extent, before, after, spare):
    old, new = GridShape(1, *before).partition(extent).boxes(), GridShape(1, *after).partition(extent).boxes()
    ranks = max(len(old), len(new)) + spare
    empty_box = Box((0, 0), (0, 0))
    old, new = old + [empty_box] * (ranks - len(old)), new + [empty_box] * (ranks - len(new))
    plans = [RepartitionPlan.of(old, new, rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        received = [cell for p in (*plan.receives, *plan.local) for cell in product(*p.source.ranges)]
        assert sorted(received) == sorted(list_cells(new[rank]))
        for piece in plan.receives:
            assert piece.source in [p.source for p in plans[piece.peer].sends if p.peer == rank]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("reflect", "3 2 1 0 1 2 3 2 1"), ("replicate", "0 0 0 0 1 2 3 3 3"), ("wrap", "1 2 3 0 1 2 3 0 1")],
)
def test_fold(mode, expected):
    assert [fold_index(i, 4, mode) for i in range(-3, 6)] == [int(c) for c in expected.split()]


def test_window_fields_broadcast():
    window = Window(kernel=5, stride=(1, 2), padding=((1, 2), (3, 4)))
    assert window.kernel == (5, 5)
    assert window.stride == (1, 2)
    assert window.padding == ((1, 2), (3, 4))
    assert Window() == Window((3, 3), (1, 1), ((1, 1), (1, 1)), dilation=(1, 1), fill=0.0, mode="zeros")
    assert Window(np.int64(2), padding=0).kernel == (2, 2)
    assert Window(1, padding=0).pointwise
    assert not Window(1).pointwise


def test_nearest_upsampling_is_not_pointwise():
    assert Upsampling((1, 1), linear=False).pointwise
    assert not Upsampling((1, 2), linear=False).pointwise
    assert not Upsampling((1, 1), linear=True).pointwise
    assert GradientWindow(Window(1, padding=0), (5, 4)).pointwise
    assert not GradientWindow(Window(3), (5, 4)).pointwise


@given(*(st.integers(1, 5),) * 3, st.integers(0, 6), st.integers(0, 12), st.integers(0, 5))
@example(2, 2, 2, 0, 1, 1)
@example(3, 2, 2, 0, 3, 1)
def test_used_cells_and_gradient_windows(kernel, stride, dilation, padding, lo, length):
    """Include strides larger than the kernel and dilated windows that skip cells."""
    window, hi = Window(kernel, stride=stride, padding=padding, dilation=dilation, ndim=1), lo + length
    reads = {o: [o * stride - padding + dilation * tap for tap in range(kernel)] for o in range(-30, 40)}
    readers = [o for o, cells in reads.items() if any(lo <= cell < hi for cell in cells)]
    gradient_window = GradientWindow(window, (40,))
    assert expand_ranges(gradient_window.used_cells(lo, hi)) == readers
    assert expand_ranges(window.used_cells(lo, hi)) == sorted({cell for o in range(lo, hi) for cell in reads[o]})
    needed = gradient_window.needs(Box((lo,), (hi,)))
    assert (needed.lo[0], needed.hi[0]) == (readers[0], readers[-1] + 1) if readers else needed.lo == needed.hi


def expand_ranges(ranges):
    """Return the sorted cells of disjoint ranges."""
    indices = [cell for cells in ranges for cell in cells]
    assert len(indices) == len(set(indices))
    return sorted(indices)


@given(st.sets(st.integers(-20, 40)), st.integers(-25, 40), st.integers(0, 20))
def test_cell_ranges_and_clipping(indices, lo, length):
    ranges = group_into_ranges(sorted(indices))
    assert expand_ranges(ranges) == sorted(indices)
    assert expand_ranges(clip_ranges(ranges, lo, lo + length)) == sorted(i for i in indices if lo <= i < lo + length)


@pytest.mark.parametrize(
    ("cells", "ranges"),
    [(range(0, 999, 3), 1), (range(5, 99), 1), ([i for i in range(60) if i % 3], 2), ([0, 1, 10, 11, 20, 21], 2)],
)
def test_cell_ranges_are_merged(cells, ranges):
    assert len(group_into_ranges([*cells])) == ranges


@pytest.mark.parametrize("extent", [(7, 8), (6, 5), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
def test_same_padding_output_is_ceil_of_extent_over_stride(extent, stride, kernel):
    window = Window(kernel, stride, same_padding(extent, kernel, stride, (1, 1)))
    assert window.output_extent(extent) == tuple(-(-n // s) for n, s in zip(extent, stride, strict=True))


def test_same_padding_puts_the_odd_cell_at_the_end():
    """Match TensorFlow, and PyTorch where it supports padding."""
    assert same_padding((5, 6), (4, 3), (1, 2), (1, 1)) == ((1, 2), (0, 1))
    assert same_padding((7,), (2,), (1,), (3,)) == ((1, 2),)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 8])
def test_upsampling_reads_cells_around_the_centre(factor, linear):
    window = Upsampling((factor,), linear)
    for lo in range(3 * factor):
        for hi in range(lo + 1, 3 * factor + 1):
            centres = [Fraction(2 * o + 1, 2 * factor) for o in range(lo, hi)]
            first, last = (floor(c - Fraction(1, 2) if linear else c) for c in (centres[0], centres[-1]))
            assert window.needs(Box((lo,), (hi,))) == Box((first,), (last + 1 + linear,))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Window(0), ConfigError, "kernel_size"),
        (lambda: Window(3, padding=-1), ConfigError, "only a kernel of 1 may crop"),
        (lambda: Window((3, 3), stride=(1, 1, 1)), ConfigError, "differ in length"),
        (lambda: Window(mode=("zeros", "wrp")), ConfigError, "padding_mode 'wrp'.*did you mean 'wrap'"),
        (lambda: Window(mode=("zeros", "wrap", "wrap"), ndim=2), ConfigError, "padding_mode .*differ in length"),
        (lambda: Window(mode="reflec"), ConfigError, "padding_mode 'reflec'.*did you mean 'reflect'"),
        (lambda: Window(9, padding=1).check((5, 5)), ShapeError, "spans 9 cells on axis 0"),
        (lambda: Window(3, padding=2, mode="reflect").check((2, 9)), ConfigError, "'reflect' must be less"),
        (lambda: grid_shape(6, rows=4), GridError, "1 x 6, 2 x 3, 3 x 2, 6 x 1"),
        (lambda: grid_shape(4, 2, 1, 1), GridError, "rows x cols can be 1 x 2, 2 x 1, or replicas 4"),
        (lambda: grid_shape(6, replicas=4), GridError, "must divide 6: 1, 2, 3, 6"),
        (lambda: grid_shape(6, rows=-1), GridError, "rows -1"),
    ],
)
def test_error_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("ranks", "rows", "cols"), [(1, 1, 1), (4, 2, 2), (6, 3, 2), (7, 7, 1), (9, 3, 3), (12, 4, 3)])
def test_default_grid_is_most_square(ranks, rows, cols):
    assert grid_shape(ranks) == GridShape(1, rows, cols)
