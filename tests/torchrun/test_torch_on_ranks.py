"""The transport over torch.distributed, at whatever rank count torch_ranks.py gives."""

import gc
import os
from functools import reduce

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from invariance import train
from many_grids import use_grids
from support import check_collectives, check_messages, check_redistribution, check_views, grids, worst

import neondist as nd
from neondist.comm import DebugTransport, Message, agree, loopback
from neondist.errors import DataError, GridError, LaunchError, RemoteError
from neondist.torch.exchange.transport import TorchTransport, world

SIZE = int(os.environ["WORLD_SIZE"])
DTYPES = ["float32", "float64", "int64", "int32", "int16", "uint8", "bool", "float16", "complex128"]


def parts():
    """The whole, and parts with other tags, which gloo knows nothing of."""
    tiles = 1 if SIZE % 2 else SIZE // 2
    return [world(), *world().cut(tiles), world().split(world().rank % 2, -world().rank)]


def test_collectives_of_arrays():
    for comm in parts():
        check_collectives(comm)
    check_collectives(DebugTransport(world()))


@pytest.mark.parametrize("most", [2, 3, 2**30])
def test_what_is_larger_than_a_count_goes_in_parts(most):
    comm = world(most=most)
    for part in (comm, *comm.cut(1 if SIZE % 2 else SIZE // 2)):
        assert part.most == most
        check_collectives(part)
        check_messages(part)
    tensor = torch.arange(8.0).view(2, 4) * (comm.rank + 1)
    comm.allreduce(tensor)
    assert torch.equal(tensor, torch.arange(8.0).view(2, 4) * (SIZE * (SIZE + 1) // 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_maxima_of_all_dtypes(dtype):
    """In the whole, where gloo adds what it can, and in parts; bool is added as NumPy does."""
    for comm in parts():
        for n in (1, 7):
            given = [(np.arange(n) * (peer + 1) % 5).astype(dtype) for peer in range(comm.size)]
            for op, combine in (("sum", np.add), ("max", np.maximum)):
                array = given[comm.rank].copy()
                comm.allreduce(array, op)
                np.testing.assert_array_equal(array, combine.reduce(given, axis=0, dtype=dtype))
                assert array.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.int16], ids=str)
def test_sums_and_messages_of_tensors(dtype):
    """As those of a GPU go: not through NumPy's arrays."""
    for comm in parts():
        assert "cpu" in comm.tensors
        for op, combine in (("sum", torch.add), ("max", torch.maximum)):
            given = [(torch.arange(14) * (peer + 1) % 5).to(dtype).view(2, 7) for peer in range(comm.size)]
            tensor = given[comm.rank].clone()
            comm.allreduce(tensor, op)
            assert torch.equal(tensor, reduce(combine, given))
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        if comm.size > 1:
            source, target, box = torch.full((9,), comm.rank, dtype=dtype), torch.zeros(9, dtype=dtype), (slice(2, 8),)
            comm.exchange([Message(right, source, box)], [Message(left, target, box)]).run()
            assert target.tolist() == [0, 0, *[left] * 6, 0]


def test_values():
    comm = world()
    for part in parts():
        assert part.allgather({"rank": part.rank, "long": "x" * part.rank}) == [
            {"rank": rank, "long": "x" * rank} for rank in range(part.size)
        ]
        root = part.size - 1
        mine = [part.rank]
        found = part.bcast(mine, root)
        assert found == [root]
        assert found is not mine
    backwards = comm.split(0, -comm.rank)
    assert backwards.rank == SIZE - 1 - comm.rank
    assert backwards.allgather(comm.rank) == list(range(SIZE))[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_match_in_the_order_listed(dtype):
    """Two to each rank, of boxes with and without gaps in memory, from two exchanges under way, and a sum."""
    if SIZE == 1:
        return
    for comm in (world(), world().split(0, -world().rank)):
        left, right = (comm.rank - 1) % SIZE, (comm.rank + 1) % SIZE
        sources = [np.arange(20).reshape(4, 5) + 20 * k + 2 * comm.rank for k in range(2)]
        expected = [np.arange(20).reshape(4, 5) + 20 * k + 2 * left for k in range(2)]
        boxes = [(slice(0, 2), slice(0, 5)), (slice(1, 4), slice(1, 3)), (slice(0, 0), slice(0, 2))]
        arrays = [source.astype(dtype) for source in sources]
        targets = [np.zeros((4, 5), dtype) for _ in arrays]
        exchanges = [
            comm.exchange([Message(right, a, box) for box in boxes], [Message(left, t, box) for box in boxes])
            for a, t in zip(arrays, targets, strict=True)
        ]
        for _ in range(2):
            for target in targets:
                target[...] = 0
            for exchange in exchanges:
                exchange.start()
            total = np.full(3, 1.0)
            request = comm.iallreduce(total)
            for exchange in exchanges[::-1]:
                exchange.finish()
            request.wait()
            np.testing.assert_array_equal(total, SIZE)
            for target, given in zip(targets, expected, strict=True):
                wanted = np.zeros((4, 5), dtype)
                for box in boxes:
                    wanted[box] = given.astype(dtype)[box]
                np.testing.assert_array_equal(target, wanted)


def test_sums_under_way_in_groups_that_share_ranks():
    """They are waited for after other sums and values have passed between the same ranks."""
    groups = parts()
    arrays = [np.arange(5.0) + comm.rank for comm in groups for _ in range(2)]
    requests = [comm.iallreduce(arrays[2 * k + i]) for k, comm in enumerate(groups) for i in range(2)]
    for comm in groups:
        assert comm.allgather(comm.rank) == list(range(comm.size))
        small = np.array([1], np.int16)
        comm.allreduce(small)
        assert small[0] == comm.size
    for request in requests:
        request.wait()
    for k, comm in enumerate(groups):
        expected = sum(np.arange(5.0) + rank for rank in range(comm.size))
        np.testing.assert_array_equal(arrays[2 * k : 2 * k + 2], [expected] * 2)


def test_sums_of_arrays_with_gaps_are_refused():
    if SIZE > 1:
        with pytest.raises(ValueError, match="expected a contiguous one"):
            world().allreduce(np.zeros((4, 4))[:, :2])


def test_arrays_that_may_not_be_written_are_sent(recwarn):
    comm = world()
    array = np.broadcast_to(np.float32(comm.rank), (2, 3))
    np.testing.assert_array_equal(comm.allgather_array(array)[:, 1, 1], np.arange(SIZE))
    found = comm.all_to_all([array] * SIZE, [(2, 3)] * SIZE)
    np.testing.assert_array_equal(found, comm.allgather_array(array))
    assert not recwarn.list


def test_redistribution():
    for cut in (SIZE, 1), (1, SIZE), "whole":
        check_redistribution(nd.ProcessGrid(world()), (7, 5), cut, (1, SIZE), (3,))
    check_redistribution(nd.ProcessGrid(world()), (2, 4), "first", (SIZE, 1))


def test_views_and_dot_test():
    for shape in grids(SIZE):
        grid = nd.ProcessGrid(world(), rows=shape.rows, cols=shape.cols)
        for mode in ("zeros", "wrap"):
            check_views(grid, (9, 8), nd.Window((3, 4), (2, 1), ((1, 2), (0, 3)), mode=mode))


@pytest.mark.parametrize(
    ("kind", "backend", "bound"),
    [("fully convolutional", "numpy", 1e-12), ("fully convolutional", "torch", 1e-12), ("everything", "numpy", 1e-10)],
)
def test_a_model_learns_what_it_does_over_virtual_ranks(kind, backend, bound):
    def learned(comm):
        return train(kind, nd.ProcessGrid(comm, replicas=2 if SIZE == 4 else 1), backend=backend)

    expected = loopback.run(SIZE, learned)
    for comm in (world(), DebugTransport(world())) if SIZE == 3 else (world(),):
        found = learned(comm)
        assert worst(found, expected[comm.rank]) < bound
    for name, array in found.items():
        for other in comm.allgather_array(array):
            np.testing.assert_array_equal(array, other, err_msg=name)


def test_a_process_group_of_the_caller_serves_as_a_grid():
    half = list(range(world().rank % 2, SIZE, 2))
    groups = [dist.new_group(list(range(first, SIZE, 2))) for first in range(min(2, SIZE))]
    comm = TorchTransport(groups[world().rank % 2])
    assert comm.size == len(half)
    check_collectives(comm)
    check_collectives(nd.ProcessGrid(comm, replicas=comm.size).replica_comm)
    assert worst(train("perceptron", nd.ProcessGrid(comm)), train("perceptron")) < 1e-10
    dist.destroy_process_group(groups[world().rank % 2])


def test_errors_are_agreed_on():
    comm = world()
    with pytest.raises(DataError, match="broken file"):
        agree(comm, DataError("broken file") if comm.rank == SIZE - 1 else None)
    agree(comm, None)
    with pytest.raises(OSError if comm.rank == 0 else RemoteError, match="disk"):
        agree(comm, OSError("disk") if comm.rank == 0 else None)
    with pytest.raises(GridError, match="does not match"):
        nd.ProcessGrid(comm, rows=SIZE + 1)


def test_a_group_that_is_closed():
    grid = nd.ProcessGrid(world())
    whole, part = grid.world, grid.tile_comm
    array = np.zeros((2, 2))
    messages = [Message((part.rank + 1) % SIZE, array, (slice(0, 1),))] if SIZE > 1 else []
    exchange = part.exchange(messages, messages)
    grid.close()
    for use in (exchange.run, lambda: part.allgather(0), lambda: part.split(0, 0)):
        with pytest.raises(GridError, match="this process grid is closed"):
            use()
    if SIZE > 1:
        with pytest.raises(GridError, match="closed"):
            part.allreduce(array)
    assert whole.allgather(1) == [1] * SIZE  # it is the caller's


def test_many_grids_leave_nothing():
    """No process group, thread or connection, whether they are closed or not."""
    process = psutil.Process()
    use_grids(world(), 3, True)
    gc.collect()  # what tests before have left closes its files now, not among what is counted
    groups, threads, files = dist.get_pg_count(), process.num_threads(), process.num_fds()
    for n in range(1000 if SIZE == 3 else 50):
        grid = nd.ProcessGrid(world(), replicas=SIZE if n % 2 else 1)
        assert grid.tile_comm.size * grid.replica_comm.size == SIZE
        if n % 3:
            grid.close()
    use_grids(world(), 3, False)
    gc.collect()
    assert dist.get_pg_count() == groups
    # A file of an earlier test, which a thread or another process still held, may be closed meanwhile.
    assert process.num_fds() <= files
    assert process.num_threads() <= threads


@pytest.mark.parametrize(
    ("backends", "tensors"),
    [
        ("cpu:gloo,cuda:gloo", ("cpu",)),
        ("cpu:gloo,cuda:nccl", ("cpu", "cuda")),
        ("cuda:nccl,cpu:gloo", ("cuda", "cpu")),
    ],
)
def test_tensors_of_a_gpu_go_by_nccl_alone(backends, tensors, monkeypatch):
    world()  # there is a process group
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert TorchTransport().tensors == tensors


def test_a_process_group_without_gloo_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(LaunchError, match=r"got one with cuda:nccl; create one with torch.distributed.new_group"):
        world()
