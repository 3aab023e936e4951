"""Strategy builders as configuration strings."""

STRATEGY_BUILDERS = {
    "AllReduce(chunk_size=2, compressor='topk(0.01)')",
    "PartitionedAllReduce",
    "RandomAxisPartitionAR(seed=3)",
    "ShardedOptimizer",
    "PS(staleness=2)",
    "PSLoadBalancing(sync=False)",
    "PartitionedPS(local_proxy_variable=True)",
    "UnevenPartitionedPS",
    "Parallax(chunk_size=1)",
}

#: synchronous strategies: each builder with its defaults, and another seed
SYNCHRONOUS_STRATEGIES = [
    *sorted({text.partition("(")[0] for text in STRATEGY_BUILDERS}),
    "RandomAxisPartitionAR(seed=5)",
]
