"""Training and evaluation sessions: a script's own loop with hooks, checkpoints and a coordinated stop.

distributed_session: the session. state: its state, for hooks. training, evaluation: the two roles. data_position:
batches from the position of a checkpoint. servers: parameter servers that update the model. hooks: stopping, initial
weights. logs: step logs and summaries. checkpoint_follower: evaluation of each checkpoint of a job. autodist:
distribution of single-process scripts.
"""

from .autodist import AutoDist, scope
from .checkpoint_follower import follow_checkpoints
from .distributed_session import DistributedSession
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
