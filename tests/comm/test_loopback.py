"""Virtual ranks, and agreement on errors."""

import random
import signal
import threading
import time

import numpy as np
import pytest
from common_checks import check_collectives, check_messages, make_block
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import DebugTransport, Message, loopback, raise_if_any_failed
from neondist.comm.single import SingleTransport
from neondist.errors import ConfigError, DataError, RemoteError


def test_collectives():
    def run_rank(comm):
        array = np.full(3, comm.rank + 1.0)
        comm.allreduce(array)
        odd = comm.split(comm.rank % 2, -comm.rank)
        return array[0], comm.allgather(comm.rank), comm.bcast(comm.rank, 2), odd.allgather(comm.rank), odd.rank

    results = loopback.run(4, run_rank)
    assert [r[:3] for r in results] == [(10.0, [0, 1, 2, 3], 2)] * 4
    assert [r[3] for r in results] == [[2, 0], [3, 1], [2, 0], [3, 1]]
    assert [r[4] for r in results] == [1, 1, 0, 0]


def test_collectives_of_arrays():
    check_collectives(SingleTransport())
    check_collectives(DebugTransport(SingleTransport()))
    for ranks in (1, 2, 3, 5):
        loopback.run(ranks, check_collectives)
        loopback.run(ranks, check_messages)
    loopback.run(3, lambda comm: check_collectives(DebugTransport(comm)))


def test_mismatched_shapes():
    def run_rank(comm):
        shapes = [make_block(0, comm.rank).shape, make_block(comm.rank, comm.rank).shape]  # invalid on rank 0
        comm.all_to_all([make_block(comm.rank, peer) for peer in range(2)], shapes)

    with pytest.raises(ValueError, match=r"rank 1 sent an array of shape \(4, 3, 1\); expected \(4, 3, 0\)"):
        loopback.run(2, run_rank)


def test_values_are_copied_for_each_rank():
    """Isolate ranks like processes: later changes to sent or received arrays are not visible elsewhere."""

    def run_rank(comm):
        array = np.full(3, float(comm.rank))
        peer = comm.size - 1 - comm.rank
        received = [comm.allgather(array), comm.allgather({"a": [array]}), comm.bcast(array, comm.size - 1)]
        if comm.size > 1:
            comm.send(peer, array)
        array[...] = -1
        message = comm.receive(peer)[0] if comm.size > 1 else 0
        if comm.rank == 0:
            received[0][-1] += 10
        comm.allreduce(np.zeros(1))  # all ranks have changed their arrays
        gathered, nested, last = received
        return [a[0] for a in gathered], [d["a"][0][0] for d in nested], last[0], message

    assert loopback.run(2, run_rank) == [([0, 11], [0, 1], 1, 1), ([0, 1], [0, 1], 1, 0)]
    assert run_rank(SingleTransport()) == ([10], [0], 0, 0)


@pytest.mark.parametrize("at_once", [1, 2])
def test_number_of_concurrent_ranks(at_once):
    busy, counts, lock = [], [], threading.Lock()

    def run_rank(comm):
        for _ in range(3):
            with lock:
                busy.append(comm.rank)
                counts.append(len(busy))
            time.sleep(0.001)
            with lock:
                busy.remove(comm.rank)
            assert comm.allgather(comm.rank) == list(range(5))

    loopback.run(5, run_rank, at_once=at_once)
    assert max(counts) == at_once


def test_signals_are_handled_without_waking_the_caller():
    """Send signals to the thread of a rank, as if they arrived just before the caller waits for its ranks."""
    handled = threading.Semaphore(0)

    def run_rank(comm):
        for _ in range(4):  # the first may arrive while the caller starts the threads
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            if not handled.acquire(timeout=10):
                return False
        return True

    previous = signal.signal(signal.SIGUSR1, lambda *_: handled.release())
    try:
        assert loopback.run(1, run_rank) == [True]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_error_of_one_rank_ends_all():
    def run_rank(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("rank 1")
        comm.allgather(0)

    with pytest.raises(ZeroDivisionError):
        loopback.run(3, run_rank)


def test_deadlock_is_reported():
    with pytest.raises(TimeoutError, match="wait for each other"):
        loopback.run(2, lambda comm: comm.receive(1 - comm.rank), timeout=0.2)


@pytest.mark.parametrize(("error", "elsewhere"), [(DataError("bad file"), DataError), (OSError("disk"), RemoteError)])
def test_agreement_raises_everywhere(error, elsewhere):
    def run_rank(comm):
        try:
            raise_if_any_failed(comm, error if comm.rank == 2 else None)
        except Exception as raised:
            return raised

    results = loopback.run(3, run_rank)
    assert results[2] is error
    assert all(type(r) is elsewhere and str(error) in str(r) for r in results[:2])


def test_agreement_without_errors():
    assert loopback.run(3, lambda comm: raise_if_any_failed(comm, None)) == [None] * 3


def test_grid_numbers_ranks_row_major_with_replicas_slowest():
    def run_rank(comm):
        grid = nd.ProcessGrid(comm, replicas=2, rows=1, cols=3)
        return grid.size, grid.rank, grid.replica, grid.row, grid.col, grid.tile_comm.size, grid.replica_comm.size

    assert loopback.run(6, run_rank) == [(6, r, r // 3, 0, r % 3, 3, 2) for r in range(6)]


def test_sent_arrays_may_change_before_they_are_received():
    def run_rank(transport):
        array, all_cells = np.full(3, 1.0 + transport.rank), (slice(0, 3),)
        message = [Message(1 - transport.rank, array, all_cells)]
        if transport.rank == 0:
            transport.create_exchange(message, []).run()
            array[...] = 7
            transport.send(1, "changed")
        else:
            exchange = transport.create_exchange([], message)
            transport.receive(0)
            exchange.run()
        return array

    np.testing.assert_array_equal(loopback.run(2, run_rank)[1], [1, 1, 1])


@given(
    ranks=st.integers(1, 4),
    steps=st.lists(
        st.lists(st.sampled_from([random.random, np.random.rand, np.random.randn, "seed"]), max_size=3), max_size=6
    ),
)
@settings(max_examples=25, deadline=None)
def test_virtual_ranks_draw_like_processes(ranks, steps):
    def draw_numbers(rank, synchronise):
        numbers = []
        for number, step in enumerate(steps):
            for draw in step * (1 + (rank + number) % 3):  # a different number of draws on every rank
                if draw == "seed":
                    random.seed(number), np.random.seed(number)
                else:
                    numbers.append(draw())
            synchronise(0)
        return numbers

    def read_states():
        return random.getstate(), np.random.get_state(legacy=False)

    def restore(initial):
        random.setstate(initial[0]), np.random.set_state(initial[1])

    initial, expected, after = read_states(), [], None
    for rank in range(ranks):
        restore(initial)
        expected.append(draw_numbers(rank, lambda _: None))
        after = after or repr(read_states())
    restore(initial)
    assert loopback.run(ranks, lambda comm: draw_numbers(comm.rank, comm.allgather)) == expected
    assert repr(read_states()) == after  # the states of rank 0
    restore(initial)


def test_invalid_at_once():
    with pytest.raises(ConfigError, match="at_once: 0; expected a number of ranks > 0"):
        loopback.run(2, print, at_once=0)
