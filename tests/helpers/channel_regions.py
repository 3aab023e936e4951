"""Partitioning of arbitrary nodes by channels, regardless of its cost."""

import random
from contextlib import contextmanager

import pytest

from neondist.torch.capture.channel_regions import estimate_channel_partition
from neondist.torch.execution import options


@contextmanager
def partition_by_channels(share=1.0, seed=0):
    """Return a context in which a random share of the suitable nodes is partitioned by channels.

    Yields a list that receives the number of nodes of each program that is lowered.
    """
    counts = []

    def choose(program, mesh):
        rng = random.Random(seed)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        chosen = {node for node in nodes if rng.random() < share and estimate_channel_partition(node, mesh) is not None}
        counts.append(len(chosen))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "find_channel_regions", choose)
        yield counts
