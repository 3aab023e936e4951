"""Running a network: executor (its passes), tasks (what a step does in them), arena (their memory)."""

from .arena import Arena
from .executor import Executor, Pass
from .tasks import LayerTask

__all__ = ["Arena", "Executor", "LayerTask", "Pass"]
