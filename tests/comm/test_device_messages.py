"""Messages and sums of device arrays: direct if MPI accepts device memory, otherwise through the host."""

import gc

import numpy as np
import pytest
from device import Device
from mpi4py import MPI

import neondist as nd
from neondist.arrays.namespace import HostStagingBuffer
from neondist.comm import loopback
from neondist.comm.cuda import reports_cuda_support, verify_device_messages
from neondist.comm.mpi import MPITransport
from neondist.comm.reductions import Reductions
from neondist.comm.transport import Message


@pytest.mark.parametrize("aware", [False, True])
def test_messages_to_the_same_rank(monkeypatch, aware):
    """Count one copy each way for any number of messages, or none if MPI accepts device memory."""
    monkeypatch.setattr("neondist.comm.mpi.reports_cuda_support", lambda mpi: aware)
    device, transport = Device(), MPITransport(MPI.COMM_SELF)
    source, target = device.xp.array(np.arange(12.0)), device.xp.array(np.zeros(12))
    cuts = [(slice(0, 5),), (slice(5, 12),)]
    assert transport.accepts_array(source) == aware
    exchange = transport.create_exchange(*([Message(0, array, cut) for cut in cuts] for array in (source, target)))
    for shift in (0, 1, 2):
        source += shift
        before = device.synchronisations
        exchange.run()
        assert device.synchronisations - before == (not aware)
        np.testing.assert_array_equal(device.xp.asnumpy(target), device.xp.asnumpy(source))
    copied = device.synchronisations
    assert isinstance(exchange.sends[0].array, np.ndarray) != aware
    assert device.synchronisations == copied


@pytest.mark.parametrize("array", [np.zeros(4), np.zeros(4, object)])
def test_failed_exchange_is_released(monkeypatch, array):
    """Raise only the first error, although requests and datatypes created before it are released."""
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    messages = [Message(peer, array, (slice(0, 2),)) for peer in (0, 7)]
    with pytest.raises((MPI.Exception, ValueError)):
        MPITransport(MPI.COMM_SELF).create_exchange(messages, messages[:1])
    gc.collect()
    assert not unraisable


def test_messages_leave_other_cells_unchanged():
    device, transport = Device(), MPITransport(MPI.COMM_SELF)
    source, target = device.xp.array(np.arange(12.0)), device.xp.array(np.zeros(12))
    exchange = transport.create_exchange([Message(0, source, (slice(2, 4),))], [Message(0, target, (slice(6, 8),))])
    target += 7
    exchange.run()
    np.testing.assert_array_equal(device.xp.asnumpy(target), [7, 7, 7, 7, 7, 7, 2, 3, 7, 7, 7, 7])


def test_support_of_the_library_is_verified():
    """Detect libraries without support for device memory, as the installed one may be."""
    assert reports_cuda_support(MPI) in (False, True, None)
    device = Device()
    assert verify_device_messages(MPI.COMM_SELF, device.xp.array(np.zeros(64, "f4")))

    class BrokenMPI:
        def Get_rank(self):
            return 0

        def Sendrecv(self, *_):
            """Drop the message."""

    assert not verify_device_messages(BrokenMPI(), device.xp.array(np.zeros(64, "f4")))
    BrokenMPI.Sendrecv = lambda *_: 1 / 0
    assert not verify_device_messages(BrokenMPI(), device.xp.array(np.zeros(64, "f4")))


def test_sums_wait_for_the_device():
    def sum_over_ranks(comm):
        device = Device()
        sums, array = Reductions(nd.ProcessGrid(comm)), device.xp.array(np.arange(3.0) + comm.rank)
        sums.allreduce("world", array)
        request = sums.iallreduce("world", array)
        request.wait()
        return device.xp.asnumpy(array)

    np.testing.assert_array_equal(loopback.run(2, sum_over_ranks), [[2, 6, 10]] * 2)


def test_staging_buffers_wait_for_pending_work():
    device = Device()
    array, current = device.xp.array(np.zeros(3)), device.xp.cuda.get_current_stream()
    twin = HostStagingBuffer(array)
    array.set(np.ones(3), stream=current)  # pending work
    np.testing.assert_array_equal(twin.copy_to_host(), 1)
    twin.host[...] = 5
    array.set(np.full(3, 2.0), stream=current)
    twin.copy_to_device()
    np.testing.assert_array_equal(array.memory, 5)


def test_host_memory_is_kept_until_it_is_copied():
    """Prevent another twin from writing into it while the copy waits for pending work of the device."""
    device = Device()
    array = device.xp.array(np.zeros(3))
    twin = HostStagingBuffer(array)
    twin.host[...] = 5
    array.set(twin.host, stream=twin._stream)  # the pending copy of `put`
    del twin
    np.testing.assert_array_equal(array.memory, 5)
