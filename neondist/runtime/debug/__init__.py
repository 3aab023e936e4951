"""Effects of `--debug-halo` on the layers of a model.

mark: a NaN that tells where it came from. shadow: what a layer is given instead of a buffer. guard: a layer's task that
looks for mistakes. Messages are watched by comm.DebugTransport.
"""

from .guard import guarded, mark_buffer
from .mark import unfilled

__all__ = ["guarded", "mark_buffer", "unfilled"]
