"""Pure geometry; if these fail, no distributed test can pass."""

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from drawn import windows
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support import expected_view, slides

from neondist.errors import ConfigError, GridError, ShapeError
from neondist.geometry import (
    Box,
    GradientWindow,
    GridShape,
    HaloPlan,
    Partition,
    RepartitionPlan,
    Upsampling,
    Window,
    fold,
    grid_shape,
    same_padding,
    split,
)

parts_3d = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


@given(st.integers(0, 200), st.integers(1, 20))
def test_split_is_a_balanced_partition(n, parts):
    ranges = [split(n, parts, i) for i in range(parts)]
    assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
    assert ranges[-1][1] == n
    sizes = [hi - lo for lo, hi in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(-10, 70), st.integers(-10, 70))
def test_owners_are_all_parts_that_hold_a_cell(n, parts, lo, hi):
    cut = ((part, *split(n, parts, part)) for part in range(parts))
    expected = [(part, max(a, lo), min(b, hi)) for part, a, b in cut if max(a, lo) < min(b, hi)]
    assert Partition((n,), (parts,)).owners(0, lo, hi) == expected


boxes = st.tuples(*[st.integers(-5, 5)] * 4).map(lambda v: Box((v[0], v[1]), (v[0] + v[2], v[1] + v[3])))


def cells(box):
    return {(i, j) for i in range(box.lo[0], box.hi[0]) for j in range(box.lo[1], box.hi[1])}


@given(boxes, boxes)
def test_boxes_are_sets_of_cells(a, b):
    assert cells(a.intersect(b)) == cells(a) & cells(b)
    assert cells(a) | cells(b) <= cells(a.hull(b))
    assert a.size == len(cells(a))
    assert a.empty == (not cells(a))
    assert cells(a.shift((1, -2))) == {(i + 1, j - 2) for i, j in cells(a)}


@given(windows(ndim=1))
def test_windows_need_what_a_convolution_reads(drawn):
    (n,), window = drawn
    assume(slides((n,), window))
    (k,), (s,), ((p, q),), (d,) = window.kernel, window.stride, window.padding, window.dilation
    reads = [[o * s + d * i - p for i in range(k)] for o in range(1000) if o * s + d * (k - 1) < n + p + q]
    assert window.output_extent(n) == len(reads)
    need = window.needs(Box((0,), (len(reads),)))
    assert (need.lo[0], need.hi[0]) == (reads[0][0], reads[-1][-1] + 1)


@example(((7, 6), Window((1, 3), stride=(2, 1), padding=0)), (1, 2, 2))
@given(windows(), parts_3d)
@settings(max_examples=200)
@pytest.mark.long
def test_plans_deliver_every_needed_cell_once(drawn, parts):
    """Play all plans by hand on numbered cells: each view is right, and both ends of each message agree."""
    extent, window = drawn
    assume(slides(extent, window))
    partition = GridShape(1, *parts).partition(extent)
    image = np.arange(1, 1 + int(np.prod(extent)), dtype=float).reshape(1, *extent, 1)
    plans = [HaloPlan.of(partition, window, tile) for tile in range(partition.tiles)]
    outputs = Partition(window.output_extent(extent), partition.parts, partition.copies)
    for tile, plan in enumerate(plans):
        if window.mode == "zeros":  # nothing travels but what the windows span
            spanned = window.needs(outputs.box(tile)).intersect(Box.of(extent))
            assert all(piece.source.intersect(spanned) == piece.source for piece in plan.receives)
        buffer = np.full(plan.buffer.shape, window.fill)
        for piece in (*plan.receives, *plan.local):
            assert piece.source.intersect(plans[piece.peer].own) == piece.source
            at = piece.target.relative_to(plan.buffer).slices
            buffer[at] = image[(0, *piece.source.slices, 0)]
        for peer, other in enumerate(plans):
            sent = [p.source for p in plan.sends if p.peer == peer]
            assert sent == [p.source for p in other.receives if p.peer == tile]
        if set(window.modes) <= {"zeros", "wrap"}:
            need = plan.need.relative_to(plan.buffer).slices
            expected = expected_view(image, window, plan.need)[0, ..., 0]
            np.testing.assert_array_equal(buffer[need], expected)
    assert sum(p.sent_cells for p in plans) == sum(p.halo_volume for p in plans)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), parts_3d, parts_3d, st.integers(1, 3))
def test_repartition_moves_every_cell_to_its_new_owner(extent, before, after, spare):
    old, new = GridShape(1, *before).partition(extent).boxes(), GridShape(1, *after).partition(extent).boxes()
    ranks = max(len(old), len(new)) + spare
    nothing = Box((0, 0), (0, 0))
    old, new = old + [nothing] * (ranks - len(old)), new + [nothing] * (ranks - len(new))
    plans = [RepartitionPlan.of(old, new, rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        arrived = [c for p in (*plan.receives, *plan.local) for c in sorted(cells(p.source))]
        assert sorted(arrived) == sorted(cells(new[rank]))
        for piece in plan.receives:
            assert piece.source in [p.source for p in plans[piece.peer].sends if p.peer == rank]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("reflect", "3 2 1 0 1 2 3 2 1"), ("replicate", "0 0 0 0 1 2 3 3 3"), ("wrap", "1 2 3 0 1 2 3 0 1")],
)
def test_fold(mode, expected):
    assert [fold(i, 4, mode) for i in range(-3, 6)] == [int(c) for c in expected.split()]


def test_window_fields_broadcast():
    window = Window(kernel=5, stride=(1, 2), padding=((1, 2), (3, 4)))
    assert window.kernel == (5, 5)
    assert window.stride == (1, 2)
    assert window.padding == ((1, 2), (3, 4))
    assert Window() == Window((3, 3), (1, 1), ((1, 1), (1, 1)), dilation=(1, 1), fill=0.0, mode="zeros")
    assert Window(np.int64(2), padding=0).kernel == (2, 2)
    assert Window(1, padding=0).pointwise
    assert not Window(1).pointwise


def test_nearest_upsampling_is_not_pointwise_although_each_cell_sees_one():
    assert Upsampling((1, 1), linear=False).pointwise
    assert not Upsampling((1, 2), linear=False).pointwise
    assert not Upsampling((1, 1), linear=True).pointwise
    assert GradientWindow(Window(1, padding=0), (5, 4)).pointwise
    assert not GradientWindow(Window(3), (5, 4)).pointwise


@given(*(st.integers(1, 4),) * 3, st.integers(0, 6), st.integers(0, 12), st.integers(1, 5))
@example(2, 2, 2, 0, 1, 1)
def test_outputs_that_look_at_cells(kernel, stride, dilation, padding, lo, length):
    """Exactly from the first to the last one that does, where dilated windows jump over some."""
    window = GradientWindow(Window(kernel, stride=stride, padding=padding, dilation=dilation, ndim=1), (40,))
    looking = [
        o
        for o in range(-20, 40)
        if any(lo <= o * stride - padding + dilation * at < lo + length for at in range(kernel))
    ]
    found = window.needs(Box((lo,), (lo + length,)))
    assert (found.lo[0], found.hi[0]) == (looking[0], looking[-1] + 1) if looking else found.lo == found.hi


@pytest.mark.parametrize("extent", [(7, 8), (6, 5), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
def test_same_padding_gives_the_rounded_up_quotient(extent, stride, kernel):
    window = Window(kernel, stride, same_padding(extent, kernel, stride, (1, 1)))
    assert window.output_extent(extent) == tuple(-(-n // s) for n, s in zip(extent, stride, strict=True))


def test_same_padding_puts_the_odd_cell_at_the_end():
    """As TensorFlow, and PyTorch where it pads at all."""
    assert same_padding((5, 6), (4, 3), (1, 2), (1, 1)) == ((1, 2), (0, 1))
    assert same_padding((7,), (2,), (1,), (3,)) == ((1, 2),)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 8])
def test_an_enlarged_cell_looks_at_those_around_its_centre(factor, linear):
    window = Upsampling((factor,), linear)
    for lo in range(3 * factor):
        for hi in range(lo + 1, 3 * factor + 1):
            centres = [Fraction(2 * o + 1, 2 * factor) for o in range(lo, hi)]
            first, last = (floor(c - Fraction(1, 2) if linear else c) for c in (centres[0], centres[-1]))
            assert window.needs(Box((lo,), (hi,))) == Box((first,), (last + 1 + linear,))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
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
        (lambda: grid_shape(6, replicas=4), GridError, "must divide 6: 1, 2, 3, 6"),
        (lambda: grid_shape(6, rows=-1), GridError, "rows -1"),
    ],
)
def test_mistakes_are_explained(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize(("ranks", "rows", "cols"), [(1, 1, 1), (4, 2, 2), (6, 3, 2), (7, 7, 1), (9, 3, 3), (12, 4, 3)])
def test_default_grid_is_the_most_square(ranks, rows, cols):
    assert grid_shape(ranks) == GridShape(1, rows, cols)
