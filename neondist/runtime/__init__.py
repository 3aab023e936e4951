"""Running a network: executor (its passes), section (those of some nodes), tasks (what a step does), arena (memory)."""

from .arena import Arena
from .executor import Executor, Pass
from .tasks import LayerTask

__all__ = ["Arena", "Executor", "LayerTask", "Pass"]
