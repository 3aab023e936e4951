"""Strategy builders as configuration strings, and generated strategies."""

from itertools import pairwise

import neondist as nd
from neondist.strategies import ParameterStrategy

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


def draw_strategy(random, specs, owners):
    """Return a strategy as in a file edited by hand: any partition and any owners for each parameter."""
    entries = {}
    for spec in specs:
        axis = random.randrange(len(spec.shape))
        inner_cuts = [random.randint(0, spec.shape[axis]) for _ in range(random.randrange(4))]
        sizes = [stop - start for start, stop in pairwise([0, *sorted(inner_cuts), spec.shape[axis]])]
        kind = random.choice(["allreduce", "server"])
        entries[spec.name] = random.choice([
            ParameterStrategy("allreduce", group=random.randrange(3)),
            ParameterStrategy(kind, owners=random.sample(range(owners), random.randint(1, owners))),
            ParameterStrategy(kind, (axis, sizes), [random.randrange(owners) for _ in sizes]),
        ])  # fmt: skip
    return nd.Strategy("edited", owners, owners, {spec.name: spec for spec in specs}, entries)
