"""The steps that random modules are made of, by name, with how often each is drawn.

What a number draws depends on their order: that of the imports here.
"""

from .registry import STEPS  # isort: skip
from . import cells  # noqa: F401  # isort: skip
from . import numbers  # noqa: F401  # isort: skip
from . import products  # noqa: F401  # isort: skip
from . import reads  # noqa: F401  # isort: skip

__all__ = ["STEPS"]
