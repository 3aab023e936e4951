"""Execution of a network.

executor: passes through a network. replay: CUDA graphs of passes. section: passes through some nodes. stream: passes
through leading nodes in strips. strips: execution of segments strip by strip. blocks: block-wise inference. tasks:
steps of a pass. layer_task: steps of layers. workspace: memory and state of a pass. arena: arrays that share memory.
reduce: combination of partial results. observers: events of passes. debug: checks of `--debug-halo`.
"""

from .arena import Arena
from .executor import Executor, Pass
from .layer_task import LayerTask
from .replay import PassGraphs

__all__ = ["Arena", "Executor", "LayerTask", "Pass", "PassGraphs"]
