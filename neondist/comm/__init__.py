"""Ranks and what travels between them.

transport: what a communicator must offer. single, loopback (with turns), mpi: one process, P threads, MPI. grid: who
holds which tile. reductions: sums over ranks, recorded. redistribution: the same values, cut differently. agree:
errors. effects: what grids change in their process. debug: looks for mistakes. segments: MPI's own files. Importing
this package does not start MPI.
"""

from . import loopback
from .agree import CALL, agree, all_or_none, check_alike
from .debug import DebugTransport
from .effects import end_job
from .grid import ProcessGrid
from .redistribution import Redistribution
from .reductions import GROUPS, Reductions, group_of
from .single import SingleTransport
from .transport import Done, Exchange, Message, ReduceOp, Request, Transport

__all__ = [
    "CALL",
    "GROUPS",
    "DebugTransport",
    "Done",
    "Exchange",
    "Message",
    "ProcessGrid",
    "Redistribution",
    "ReduceOp",
    "Reductions",
    "Request",
    "SingleTransport",
    "Transport",
    "agree",
    "all_or_none",
    "check_alike",
    "end_job",
    "group_of",
    "loopback",
]
