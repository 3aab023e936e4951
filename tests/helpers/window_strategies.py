"""Hypothesis strategies for windows."""

from common_checks import NUMPY_PAD_MODE
from hypothesis import strategies as st

import neondist as nd


@st.composite
def windows(draw, ndim=None, extent=9):
    """Draw an image extent and a window."""
    ndim = ndim or draw(st.integers(1, 3))
    size = st.integers(1, extent if ndim < 3 else 5)
    shape = tuple(draw(size) for _ in range(ndim))
    window = nd.Window(
        kernel=tuple(draw(st.integers(1, 5)) for _ in range(ndim)),
        stride=tuple(draw(st.integers(1, 3)) for _ in range(ndim)),
        padding=tuple((draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in range(ndim)),
        dilation=tuple(draw(st.integers(1, 2)) for _ in range(ndim)),
        fill=draw(st.sampled_from([0.0, -1.5])),
        mode=draw(
            st.one_of(
                st.sampled_from(sorted(NUMPY_PAD_MODE)), st.tuples(*[st.sampled_from(sorted(NUMPY_PAD_MODE))] * ndim)
            )
        ),
        ndim=ndim,
    )
    return shape, window
