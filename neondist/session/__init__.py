"""Training and evaluation by roles: a script's own loop with hooks, checkpoints and a common end.

distributed_session: what a script uses. state: what hooks look at. training, evaluation: the two roles. data_position:
batches from where a checkpoint was. servers: parameter servers that update the model. hooks: stopping, first weights.
logs: lines and numbers of steps. follow: each checkpoint of a job once, in order. autodist: a script of one process,
distributed.
"""

from .autodist import AutoDist, scope
from .distributed_session import DistributedSession
from .follow import follow_checkpoints
from .hooks import LoadCheckpoint, StopAtStepHook, StopAtTimeHook

__all__ = [
    "AutoDist",
    "DistributedSession",
    "LoadCheckpoint",
    "StopAtStepHook",
    "StopAtTimeHook",
    "follow_checkpoints",
    "scope",
]
