"""Progress of workers: the staleness bound on a simulated clock, and credits."""

import heapq
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neondist.services.message import MessageError
from neondist.services.progress import AppliedMinibatches, MinibatchId, StalenessBound, learning_rate_factor


def simulate(bound, durations, steps):
    """Return the completion times of the steps of each worker, on a simulated clock.

    `durations[worker](step)` is the duration of a step; the next one starts when it is complete.
    """
    workers = list(durations)
    ends = {worker: [] for worker in workers}
    arrivals = [(durations[worker](1), index, worker) for index, worker in enumerate(workers)]
    heapq.heapify(arrivals)
    blocked = set()
    for worker in workers:
        bound.add_worker(worker)
    while arrivals:
        now, index, worker = heapq.heappop(arrivals)
        bound.finish_step(worker)
        blocked.add((index, worker))
        for arrival in sorted(blocked):
            if bound.may_continue(arrival[1]):
                blocked.remove(arrival)
                ends[arrival[1]].append(now)
                counts = {name: len(times) for name, times in ends.items()}
                assert max(counts.values()) - min(bound.steps_by_worker.values()) <= bound.staleness
                if counts[arrival[1]] < steps:
                    heapq.heappush(arrivals, (now + durations[arrival[1]](counts[arrival[1]] + 1), *arrival))
    assert not blocked
    return ends


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_fast_worker_waits_for_a_slow_one(staleness):
    """Reproduce case c9 of AutoDist: the slow worker sleeps for 5 s after every third of 1,000 steps."""
    steps = 1000
    durations = {"fast": lambda step: 0.0, "slow": lambda step: 5.0 * (step > 1 and step % 3 == 1)}
    ends = simulate(StalenessBound(staleness), durations, steps)
    slow = [5.0 * ((step - 1) // 3) for step in range(1, steps + 1)]
    assert ends["slow"] == slow
    assert ends["fast"] == [slow[step - staleness - 1] if step > staleness else 0.0 for step in range(1, steps + 1)]
    expected = {0: [0] * 3 + [5] * 3 + [10] * 3 + [15], 1: [0] * 4 + [5] * 3 + [10] * 3, 3: [0] * 6 + [5] * 3 + [10]}
    assert ends["fast"][:10] == expected[staleness]


@given(
    staleness=st.integers(0, 4),
    events=st.lists(st.tuples(st.sampled_from(["join", "leave", "arrive"]), st.integers(0, 3)), max_size=60),
)
def test_bound_is_never_exceeded(staleness, events):
    """Let workers join, leave and arrive in any order: none may run too far ahead, and one may always continue."""
    bound, waiting = StalenessBound(staleness), set()
    for kind, worker in events:
        name = str(worker)
        if kind == "arrive" and name not in waiting:
            bound.finish_step(name)
            waiting.add(name)
        elif kind == "join":
            bound.add_worker(name)
        elif kind == "leave":
            bound.remove_worker(name)
            waiting.discard(name)
        waiting -= {candidate for candidate in waiting if bound.may_continue(candidate)}
        steps = bound.steps_by_worker
        for candidate in steps.keys() - waiting:
            assert steps[candidate] - min(steps.values()) <= staleness
        assert not steps or waiting != steps.keys()


def test_workers_continue_without_a_bound():
    bound = StalenessBound(None)
    for _ in range(100):
        bound.finish_step("fast")
    bound.add_worker("slow")
    assert bound.may_continue("fast")


def test_rates_by_staleness():
    assert [0.1 * learning_rate_factor(staleness, True) for staleness in (0, 1, 4)] == [0.1, 0.1, 0.025]
    assert learning_rate_factor(4, False) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 70)), max_size=30), st.integers(-1, 3))
def test_credits_are_a_set(given_credits, finished):
    credits, expected = AppliedMinibatches(), set(given_credits)
    for credit in given_credits:
        credits.add(MinibatchId(*credit))
    assert set(credits.to_list()) == expected
    if finished >= 0:
        credits.drop_through_epoch(finished)
    parsed = AppliedMinibatches.parse(credits.to_json())
    for epoch in range(4):
        for task in range(6):
            for minibatch in (0, 1, 64, 70):
                credit = MinibatchId(epoch, task, minibatch)
                assert (credit in parsed) == (credit in expected or epoch <= finished)
    union = parsed.union(AppliedMinibatches())
    assert union.to_json() == credits.to_json()


CREDITS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))


@given(st.lists(st.tuples(st.sets(CREDITS), st.integers(-1, 2)), min_size=1, max_size=3))
def test_unions_and_intersections(servers):
    """Compare with Python's sets; servers may have dropped different numbers of epochs."""
    everything = {MinibatchId(epoch, task, n) for epoch in range(3) for task in range(2) for n in range(3)}
    credits, expected = [], []
    for applied, finished in servers:
        credits.append(AppliedMinibatches())
        for minibatch in applied:
            credits[-1].add(MinibatchId(*minibatch))
        credits[-1].drop_through_epoch(finished)
        expected.append(applied | {minibatch for minibatch in everything if minibatch.epoch <= finished})
    common, union = AppliedMinibatches.intersection(credits), reduce(AppliedMinibatches.union, credits)
    assert {minibatch for minibatch in everything if minibatch in common} == set.intersection(*expected)
    assert {minibatch for minibatch in everything if minibatch in union} == set.union(*expected)


@pytest.mark.parametrize("value", [None, [1, 2], [1, 2, -3], [1, 2, True], [0, 0, 1 << 40], "123"])
def test_invalid_credits_are_rejected(value):
    with pytest.raises(MessageError):
        MinibatchId.parse(value)


@pytest.mark.parametrize(
    "value", [{}, {"first_tracked_epoch": 0, "applied": [[1, 2]]}, {"first_tracked_epoch": "x", "applied": []}]
)
def test_invalid_descriptions_are_rejected(value):
    with pytest.raises(MessageError):
        AppliedMinibatches.parse(value)
