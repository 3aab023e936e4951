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
