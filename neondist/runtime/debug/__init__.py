"""Effects of `--debug-halo` on the layers of a model.

mark: a distinctive NaN for uninitialised cells. shadow: the copy of a buffer that a layer receives. guard: the layer
task that checks for mistakes. Messages are checked by comm.DebugTransport.
"""

from .guard import guard_executor, mark_buffer
from .mark import unfilled

__all__ = ["guard_executor", "mark_buffer", "unfilled"]
