"""Communication between ranks.

transport: interface of a communicator. single, loopback (with turns), mpi (with large_counts, cuda): transports of one
process, P threads, and MPI. grid: assignment of ranks to tiles. reductions: recorded reductions over ranks.
redistribution: change of partition. agreement: cross-rank agreement on errors and calls. process_hooks: process-wide
effects of grids. debug: transport that checks for misuse. shared_memory: Open MPI's shared-memory files. argument_text:
arguments as text. Importing this package does not start MPI.
"""

from . import loopback
from .agreement import CALL_KEY, all_or_none, check_equal_on_ranks, raise_if_any_failed
from .debug import DebugTransport
from .grid import ProcessGrid
from .process_hooks import abort_with_error
from .redistribution import Redistribution
from .reductions import GROUP_NAMES, Reductions, reduction_group
from .single import SingleTransport
from .transport import CompletedRequest, Exchange, Message, ReduceOp, Request, Transport

__all__ = [
    "CALL_KEY",
    "GROUP_NAMES",
    "CompletedRequest",
    "DebugTransport",
    "Exchange",
    "Message",
    "ProcessGrid",
    "Redistribution",
    "ReduceOp",
    "Reductions",
    "Request",
    "SingleTransport",
    "Transport",
    "abort_with_error",
    "all_or_none",
    "check_equal_on_ranks",
    "loopback",
    "raise_if_any_failed",
    "reduction_group",
]
