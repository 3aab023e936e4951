"""Synchronisation strategies: the partition, owners and gradient synchronisation of every parameter.

A builder creates a `Strategy` from the parameters and the number of replicas (or a resource spec), as a pure function
without MPI. A `Strategy` can be compared, printed, saved and loaded.

Modules: `parameter_spec`, `partition` (rules for dividing a parameter), `compressor` (names), `strategy`, `shares`
(what each rank owns), and the builders: `all_reduce`, `server`, `parallax`, `auto`.
"""

from .all_reduce import AllReduce, PartitionedAllReduce, RandomAxisPartitionAR, ShardedOptimizer
from .auto import AutoStrategy
from .builder import DeviceCounts, StrategyBuilder, as_builder, as_strategy
from .compressor import normalise_compressor
from .parallax import Parallax
from .parameter_spec import ParameterSpec
from .server import PS, PartitionedPS, PSLoadBalancing, UnevenPartitionedPS
from .strategy import ParameterStrategy, Strategy

Auto = AutoStrategy  # `Auto` also names a border scheme, hence the distinct class name

__all__ = [
    "PS",
    "AllReduce",
    "Auto",
    "AutoStrategy",
    "DeviceCounts",
    "PSLoadBalancing",
    "Parallax",
    "ParameterSpec",
    "ParameterStrategy",
    "PartitionedAllReduce",
    "PartitionedPS",
    "RandomAxisPartitionAR",
    "ShardedOptimizer",
    "Strategy",
    "StrategyBuilder",
    "UnevenPartitionedPS",
    "as_builder",
    "as_strategy",
    "normalise_compressor",
]
