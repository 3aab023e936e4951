"""What `--debug-halo` does to the layers of a model.

mark: a NaN that tells where it came from. shadow: what a layer is given instead of a buffer. array_guard, layer_guard:
decorators of one array, and of one layer. Messages are watched by comm.DebugTransport.
"""

from .layer_guard import guard_layer

__all__ = ["guard_layer"]
