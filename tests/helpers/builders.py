"""A text for every strategy builder."""

BUILDERS = {
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

#: of each builder one that a job can execute, with its defaults; and another one
SYNCHRONOUS = [*sorted({text.partition("(")[0] for text in BUILDERS}), "RandomAxisPartitionAR(seed=5)"]
