"""Attribution of time to the innermost operation."""

import time

import numpy as np
import pytest

import neondist as nd
from neondist.comm import Exchange, SingleTransport, loopback
from neondist.observer import Observers
from neondist.runtime.observers.clock import REST_ROW, Clock


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(time, "now", 0.0, raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: time.now)
    return Clock()


def run_layer(observers):
    with observers.observe("layer", "conv1", "forward"):
        time.now += 1
        with observers.observe("wait"):
            time.now += 4
        time.now += 2


def test_innermost_operation(clock):
    observers = Observers()
    run_layer(observers)
    assert not clock.seconds
    with observers.add_temporarily(clock):
        run_layer(observers)
        time.now += 8  # outside any operation
        with observers.observe("wait"):
            time.now += 4
    run_layer(observers)
    assert clock.seconds == {("conv1", "forward"): 3, ("conv1", "wait"): 4, (REST_ROW, "wait"): 4}


class SlowExchange(Exchange):
    def _start(self):
        time.now += 1

    def _finish(self):
        time.now += 4


def test_waiting_time_of_exchanges(clock):
    exchange = SlowExchange(SingleTransport(), [], [])
    exchange.observers = observers = Observers()
    with observers.add_temporarily(clock):
        for direction in ("forward", "backward"):
            with observers.observe("halo", direction, direction):
                time.now += 8
                exchange.start()
                time.now += 16
                exchange.finish()
                exchange.finish()
            assert clock.seconds.pop((direction, "wait")) == 5
    assert clock.seconds == {("forward", "exchange"): 24, ("backward", "exchange"): 24}


def fail_in_layer(observers):
    with observers.observe("layer", "conv1", "forward"):
        time.now += 1
        raise ZeroDivisionError


def test_errors_keep_the_clock_consistent(clock):
    observers = Observers()
    with observers.add_temporarily(clock), pytest.raises(ZeroDivisionError):
        fail_in_layer(observers)
    assert clock.seconds == {("conv1", "forward"): 1}
    assert not clock._stack


def test_every_layer_of_a_model_is_timed():
    def list_timed(transport):
        grid, clock = nd.ProcessGrid(transport), Clock()
        conv = nd.ConvLayerDist(2, 3, padding=1, name="conv")
        model = nd.ConvnetDist([nd.Sum([[conv], []]), nd.FCLayerDist(3)], backend="numpy")
        model.build((6, 5, 2), 2, grid)
        with grid.observers.add_temporarily(clock):
            model.train_batch(model.scatter(np.ones((2, 6, 5, 2))), np.array([0, 1]))
        return {key for key, seconds in clock.seconds.items() if seconds > 0}

    for timed in loopback.run(2, list_timed):
        assert timed >= {("conv", kind) for kind in ("forward", "backward", "exchange", "wait")}
        assert timed >= {("fc1", "forward"), ("fc1", "wait"), ("update", "forward"), ("sum of gradients", "wait")}
