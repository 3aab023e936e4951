"""Cells that windows of modules look at, and that reach them where they are transposed: by trying each."""

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from neondist.torch.rules.window import Sliding

SLIDINGS = st.builds(
    Sliding, kernel=st.integers(1, 4), stride=st.integers(1, 4), padding=st.integers(0, 6), dilation=st.integers(1, 5)
)


def ends(cells):
    return (min(cells), max(cells) + 1) if cells else (0, 0)


@given(SLIDINGS, st.integers(0, 6), st.integers(1, 5))
def test_cells_that_windows_look_at(slide, lo, length):
    offsets = [slide.dilation * at - slide.padding for at in range(slide.kernel)]
    looked = {out * slide.stride + offset for out in range(lo, lo + length) for offset in offsets}
    assert slide.sees(lo, lo + length) == ends(looked)


@given(SLIDINGS, st.integers(0, 12), st.integers(1, 5), st.integers(0, 12))
def test_cells_that_reach_results_of_transposed_windows(slide, lo, length, n):
    offsets = [slide.dilation * at - slide.padding for at in range(slide.kernel)]
    reaching = {cell for cell in range(n) if any(lo <= cell * slide.stride + o < lo + length for o in offsets)}
    assert slide.reached(lo, lo + length, n) == ends(reaching)
