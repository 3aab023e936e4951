"""Time is charged to the innermost piece of work."""

import time

import numpy as np
import pytest

import neondist as nd
from neondist.bench.clock import REST, Clock
from neondist.comm import Exchange, SingleTransport, loopback


class Work:
    def outer(self):
        time.now += 1
        self.inner()
        time.now += 2

    def inner(self):
        time.now += 4


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(time, "now", 0.0, raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: time.now)
    return Clock()


def test_innermost(clock):
    work = Work()
    clock._wrap(work, "outer", "conv1", "forward")
    clock._wrap(work, "inner", None, "wait")
    work.outer()
    assert not clock.seconds
    clock.running = True
    work.outer()
    time.now += 8  # nobody's
    work.inner()
    assert clock.seconds == {("conv1", "forward"): 3, ("conv1", "wait"): 4, (REST, "wait"): 4}


class SlowExchange(Exchange):
    def _start(self):
        time.now += 1

    def _finish(self):
        time.now += 4


class SlowTransport(SingleTransport):
    def exchange(self, sends, receives):
        return SlowExchange(self, sends, receives)


def test_messages_are_waited_for_however_they_are_sent(clock):
    transport = SlowTransport()
    clock._watch_transport(transport)
    exchange = transport.exchange([], [])

    class Halo:
        def fetch(self):
            time.now += 8
            exchange.run()

        def send_home(self):
            exchange.start()
            time.now += 16
            exchange.finish()

    halo, clock.running = Halo(), True
    for method in ("fetch", "send_home"):
        clock._wrap(halo, method, method, "exchange")
        getattr(halo, method)()
        assert clock.seconds.pop((method, "wait")) == 5
    assert clock.seconds == {("fetch", "exchange"): 8, ("send_home", "exchange"): 16}


def test_an_error_passes_and_the_clock_goes_on(clock):
    work = Work()
    work.inner = lambda: 1 / 0
    clock._wrap(work, "outer", "conv1", "forward")
    clock.running = True
    with pytest.raises(ZeroDivisionError):
        work.outer()
    assert clock.seconds == {("conv1", "forward"): 1}
    assert not clock._stack


def test_every_layer_of_a_model_is_watched():
    def rows(transport):
        grid, clock = nd.ProcessGrid(transport), Clock()
        clock.watch_messages(grid)
        conv = nd.ConvLayerDist(2, 3, padding=1, name="conv")
        model = nd.ConvnetDist([nd.Sum([[conv], []]), nd.FCLayerDist(3)], backend="numpy")
        model.build((6, 5, 2), 2, grid)
        clock.watch_model(model)
        clock.running = True
        model.train_batch(model.scatter(np.ones((2, 6, 5, 2))), np.array([0, 1]))
        return {key for key, seconds in clock.seconds.items() if seconds > 0}

    for found in loopback.run(2, rows):
        assert found >= {("conv", kind) for kind in ("forward", "backward", "exchange", "wait")}
        assert found >= {("fc1", "forward"), ("fc1", "wait"), ("update", "backward"), ("sum of gradients", "wait")}
