"""Option `--trace` of `bench step`: events of all ranks on one clock."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.runtime.observers.trace import align_clocks, write_trace


def trace_steps(path, replicas, ranks=4, steps=2):
    """Return the complete events of some training steps, by rank."""

    def train(transport):
        grid = nd.ProcessGrid(transport, replicas=replicas)
        layers = [nd.ConvLayerDist(2, 3, padding=1, name="conv"), nd.BatchNormLayerDist(name="bn")]
        model = nd.ConvnetDist([*layers, nd.FCLayerDist(3, name="out")], backend="numpy")
        model.build((6, 5, 2), 2, grid)
        x = model.scatter(np.ones((2, 6, 5, 2)))
        write_trace(path, grid, lambda: [model.train_batch(x, np.array([0, 1]), 2) for _ in range(steps)])

    loopback.run(ranks, train)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {f"rank {rank}" for rank in range(ranks)}
    return [[e for e in events if e["ph"] == "X" and e["pid"] == rank] for rank in range(ranks)]


def span(event):
    return round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_events_of_all_ranks_nest(tmp_path, replicas):
    for events in trace_steps(tmp_path / "t.json", replicas):
        assert len([e for e in events if e["name"] == "step"]) == 2
        steps = [span(e) for e in events if e["name"] == "step"]
        open_ends: list = []
        for event in sorted(events, key=lambda e: (span(e)[0], -span(e)[1])):
            begin, end = span(event)
            assert 0 <= begin <= end
            control = event["name"] == "wait: world" and not event.get("args", {}).get("direction")  # before a step
            assert control or event["name"] == "step" or any(a <= begin and end <= b for a, b in steps)
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
        names = {e["name"] for e in events}
        assert names >= {"conv", "bn", "out", "halo", "reduce", "cost", "sum of gradients", "update", "wait: messages"}
        assert names & {"wait: world", "wait: tiles"}
        layers = {(e["name"], e["args"]["direction"]) for e in events if e["cat"] == "layer"}
        assert layers == {(name, direction) for name in ("conv", "bn", "out") for direction in ("forward", "backward")}
        message_args = [e["args"] for e in events if e["name"] == "wait: messages"]
        assert all(args["bytes_sent"] > 0 and args["messages"] > 0 for args in message_args)


def test_clocks_are_aligned():
    """Align a clock that is 1 ms ahead, with a sum that arrived late."""
    first = {"name": "a", "ph": "X", "pid": 0, "ts": 5_000_000, "dur": 2_000}
    second = {"name": "b", "ph": "X", "pid": 1, "ts": 6_001_000, "dur": 500}
    events = align_clocks([([first], [10, 20, 30]), ([second], [1_000_010, 1_000_020, 1_900_030])])
    assert [(e["ts"], e["dur"]) for e in events[2:]] == [(0.0, 2.0), (1.0, 0.5)]
    assert [e["args"]["name"] for e in events[:2]] == ["rank 0", "rank 1"]


def test_trace_of_one_rank(tmp_path):
    (events,) = trace_steps(tmp_path / "t.json", 1, ranks=1, steps=1)
    assert min(e["ts"] for e in events) == 0.0
