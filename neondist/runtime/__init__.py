"""Running a network.

executor: its passes; replay: those that a device repeats. section: those of some nodes. strips: segments, a strip at a
time. tasks: what a step does; layer_task: a layer's. workspace: a pass's memory and state. arena: arrays that share
memory. reduce: partial results of ranks.
"""

from .arena import Arena
from .executor import Executor, Pass
from .layer_task import LayerTask
from .replay import PassGraphs

__all__ = ["Arena", "Executor", "LayerTask", "Pass", "PassGraphs"]
