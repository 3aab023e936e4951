"""Bookkeeping of servers: the staleness bound on a simulated clock, and credits."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neondist.services.message import MessageError
from neondist.services.progress import Credit, Credits, StalenessBound, rate_factor


def timeline(bound, durations, steps):
    """Return the times at which each worker's steps are complete, on a simulated clock.

    `durations(worker, step)` is how long a step takes; a worker begins the next one when its last is complete.
    """
    workers = list(durations)
    ends = {worker: [] for worker in workers}
    arrivals = [(durations[worker](1), at, worker) for at, worker in enumerate(workers)]
    heapq.heapify(arrivals)
    blocked = set()
    for worker in workers:
        bound.join(worker)
    while arrivals:
        now, at, worker = heapq.heappop(arrivals)
        bound.arrive(worker)
        blocked.add((at, worker))
        for one in sorted(blocked):
            if bound.may_continue(one[1]):
                blocked.remove(one)
                ends[one[1]].append(now)
                done = {name: len(each) for name, each in ends.items()}
                assert max(done.values()) - min(bound.steps.values()) <= bound.staleness
                if done[one[1]] < steps:
                    heapq.heappush(arrivals, (now + durations[one[1]](done[one[1]] + 1), *one))
    assert not blocked
    return ends


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_follows_a_slow_one(staleness):
    """AutoDist's case c9: the slow worker sleeps 5 s after every third step; 1,000 steps."""
    steps = 1000
    durations = {"fast": lambda step: 0.0, "slow": lambda step: 5.0 * (step > 1 and step % 3 == 1)}
    ends = timeline(StalenessBound(staleness), durations, steps)
    slow = [5.0 * ((step - 1) // 3) for step in range(1, steps + 1)]
    assert ends["slow"] == slow
    assert ends["fast"] == [slow[step - staleness - 1] if step > staleness else 0.0 for step in range(1, steps + 1)]
    expected = {0: [0] * 3 + [5] * 3 + [10] * 3 + [15], 1: [0] * 4 + [5] * 3 + [10] * 3, 3: [0] * 6 + [5] * 3 + [10]}
    assert ends["fast"][:10] == expected[staleness]


@given(
    staleness=st.integers(0, 4),
    events=st.lists(st.tuples(st.sampled_from(["join", "leave", "arrive"]), st.integers(0, 3)), max_size=60),
)
def test_the_bound_is_never_exceeded(staleness, events):
    """Workers that come, go and arrive in any order: none that may go on is too far ahead, and one always may."""
    bound, waiting = StalenessBound(staleness), set()
    for kind, worker in events:
        name = str(worker)
        if kind == "arrive" and name not in waiting:
            bound.arrive(name)
            waiting.add(name)
        elif kind == "join":
            bound.join(name)
        elif kind == "leave":
            bound.leave(name)
            waiting.discard(name)
        waiting -= {one for one in waiting if bound.may_continue(one)}
        steps = bound.steps
        for one in steps.keys() - waiting:
            assert steps[one] - min(steps.values()) <= staleness
        assert not steps or waiting != steps.keys()


def test_without_a_bound_everybody_goes_on():
    bound = StalenessBound(None)
    for _ in range(100):
        bound.arrive("fast")
    bound.join("slow")
    assert bound.may_continue("fast")


def test_rates_by_staleness():
    assert [0.1 * rate_factor(staleness, True) for staleness in (0, 1, 4)] == [0.1, 0.1, 0.025]
    assert rate_factor(4, False) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 70)), max_size=30), st.integers(-1, 3))
def test_credits_are_a_set(given_credits, finished):
    credits, expected = Credits(), set(given_credits)
    for one in given_credits:
        credits.add(Credit(*one))
    assert set(credits.to_list()) == expected
    if finished >= 0:
        credits.finish(finished)
    again = Credits.parse(credits.to_json())
    for epoch in range(4):
        for task in range(6):
            for minibatch in (0, 1, 64, 70):
                one = Credit(epoch, task, minibatch)
                assert (one in again) == (one in expected or epoch <= finished)
    both = again.union(Credits())
    assert both.to_json() == credits.to_json()


@pytest.mark.parametrize("value", [None, [1, 2], [1, 2, -3], [1, 2, True], [0, 0, 1 << 40], "123"])
def test_credits_that_are_none_are_refused(value):
    with pytest.raises(MessageError):
        Credit.parse(value)


@pytest.mark.parametrize("value", [{}, {"first_epoch": 0, "applied": [[1, 2]]}, {"first_epoch": "x", "applied": []}])
def test_descriptions_that_are_none_are_refused(value):
    with pytest.raises(MessageError):
        Credits.parse(value)
