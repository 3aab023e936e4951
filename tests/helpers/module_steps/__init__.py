"""Steps of random modules by name, with their weights.

The order of the imports determines which modules are drawn.
"""

from .registry import STEPS  # isort: skip
from . import cells  # noqa: F401  # isort: skip
from . import numbers  # noqa: F401  # isort: skip
from . import products  # noqa: F401  # isort: skip
from . import reads  # noqa: F401  # isort: skip

__all__ = ["STEPS"]
