"""TorchTransport over torch.distributed, on the number of ranks that torch_ranks.py starts."""

import gc
import os
from functools import reduce

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from common_checks import (
    check_collectives,
    check_messages,
    check_redistribution,
    check_views,
    list_grids,
    max_relative_difference,
)
from invariance import train
from many_grids import train_on_grids

import neondist as nd
from neondist.comm import DebugTransport, Message, loopback, raise_if_any_failed
from neondist.errors import DataError, GridError, LaunchError, RemoteError
from neondist.torch.exchange.transport import TorchTransport, world

SIZE = int(os.environ["WORLD_SIZE"])
DTYPES = ["float32", "float64", "int64", "int32", "int16", "uint8", "bool", "float16", "complex128"]


def list_communicators():
    """Return the world, and sub-communicators, whose tags differ and are unknown to gloo."""
    tiles = 1 if SIZE % 2 else SIZE // 2
    return [world(), *world().split_tiles_and_replicas(tiles), world().split(world().rank % 2, -world().rank)]


def test_collectives_of_arrays():
    for comm in list_communicators():
        check_collectives(comm)
    check_collectives(DebugTransport(world()))


@pytest.mark.parametrize("max_count", [2, 3, 2**30])
def test_large_messages_are_split(max_count):
    world_comm = world(max_count=max_count)
    for comm in (world_comm, *world_comm.split_tiles_and_replicas(1 if SIZE % 2 else SIZE // 2)):
        assert comm.max_count == max_count
        check_collectives(comm)
        check_messages(comm)
    tensor = torch.arange(8.0).view(2, 4) * (world_comm.rank + 1)
    world_comm.allreduce(tensor)
    assert torch.equal(tensor, torch.arange(8.0).view(2, 4) * (SIZE * (SIZE + 1) // 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_maxima_of_all_dtypes(dtype):
    """In the world, where gloo reduces the dtypes it supports, and in sub-communicators; bool is added as in NumPy."""
    for comm in list_communicators():
        for n in (1, 7):
            inputs = [(np.arange(n) * (peer + 1) % 5).astype(dtype) for peer in range(comm.size)]
            for op, combine in (("sum", np.add), ("max", np.maximum)):
                array = inputs[comm.rank].copy()
                comm.allreduce(array, op)
                np.testing.assert_array_equal(array, combine.reduce(inputs, axis=0, dtype=dtype))
                assert array.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.int16], ids=str)
def test_sums_and_messages_of_tensors(dtype):
    """Without NumPy arrays, as for tensors on a GPU."""
    for comm in list_communicators():
        assert "cpu" in comm.tensor_device_types
        for op, combine in (("sum", torch.add), ("max", torch.maximum)):
            inputs = [(torch.arange(14) * (peer + 1) % 5).to(dtype).view(2, 7) for peer in range(comm.size)]
            tensor = inputs[comm.rank].clone()
            comm.allreduce(tensor, op)
            assert torch.equal(tensor, reduce(combine, inputs))
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        if comm.size > 1:
            source, target, box = torch.full((9,), comm.rank, dtype=dtype), torch.zeros(9, dtype=dtype), (slice(2, 8),)
            comm.create_exchange([Message(right, source, box)], [Message(left, target, box)]).run()
            assert target.tolist() == [0, 0, *[left] * 6, 0]


def test_python_objects():
    comm = world()
    for group in list_communicators():
        assert group.allgather({"rank": group.rank, "long": "x" * group.rank}) == [
            {"rank": rank, "long": "x" * rank} for rank in range(group.size)
        ]
        root = group.size - 1
        value = [group.rank]
        result = group.bcast(value, root)
        assert result == [root]
        assert result is not value
    backwards = comm.split(0, -comm.rank)
    assert backwards.rank == SIZE - 1 - comm.rank
    assert backwards.allgather(comm.rank) == list(range(SIZE))[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_match_in_order(dtype):
    """Two concurrent exchanges of contiguous and strided boxes, together with a sum."""
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
            comm.create_exchange([Message(right, a, box) for box in boxes], [Message(left, t, box) for box in boxes])
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
            for target, expected_source in zip(targets, expected, strict=True):
                expected_target = np.zeros((4, 5), dtype)
                for box in boxes:
                    expected_target[box] = expected_source.astype(dtype)[box]
                np.testing.assert_array_equal(target, expected_target)


def test_concurrent_sums_in_overlapping_groups():
    """They are awaited after other collectives between the same ranks."""
    groups = list_communicators()
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


def test_non_contiguous_sums_are_rejected():
    if SIZE > 1:
        with pytest.raises(ValueError, match="expected a contiguous array"):
            world().allreduce(np.zeros((4, 4))[:, :2])


def test_read_only_arrays_are_sent(recwarn):
    comm = world()
    array = np.broadcast_to(np.float32(comm.rank), (2, 3))
    np.testing.assert_array_equal(comm.allgather_array(array)[:, 1, 1], np.arange(SIZE))
    result = comm.all_to_all([array] * SIZE, [(2, 3)] * SIZE)
    np.testing.assert_array_equal(result, comm.allgather_array(array))
    assert not recwarn.list


def test_redistribution():
    for cut in (SIZE, 1), (1, SIZE), "whole":
        check_redistribution(nd.ProcessGrid(world()), (7, 5), cut, (1, SIZE), (3,))
    check_redistribution(nd.ProcessGrid(world()), (2, 4), "first", (SIZE, 1))


def test_views_and_dot_test():
    for shape in list_grids(SIZE):
        grid = nd.ProcessGrid(world(), rows=shape.rows, cols=shape.cols)
        for mode in ("zeros", "wrap"):
            check_views(grid, (9, 8), nd.Window((3, 4), (2, 1), ((1, 2), (0, 3)), mode=mode))


@pytest.mark.parametrize(
    ("kind", "backend", "bound"),
    [("fully convolutional", "numpy", 1e-12), ("fully convolutional", "torch", 1e-12), ("everything", "numpy", 1e-10)],
)
def test_training_matches_virtual_ranks(kind, backend, bound):
    def train_on(comm):
        return train(kind, nd.ProcessGrid(comm, replicas=2 if SIZE == 4 else 1), backend=backend)

    expected = loopback.run(SIZE, train_on)
    for comm in (world(), DebugTransport(world())) if SIZE == 3 else (world(),):
        actual = train_on(comm)
        assert max_relative_difference(actual, expected[comm.rank]) < bound
    for name, array in actual.items():
        for other_array in comm.allgather_array(array):
            np.testing.assert_array_equal(array, other_array, err_msg=name)


def test_process_group_of_the_caller():
    half = list(range(world().rank % 2, SIZE, 2))
    groups = [dist.new_group(list(range(first, SIZE, 2))) for first in range(min(2, SIZE))]
    comm = TorchTransport(groups[world().rank % 2])
    assert comm.size == len(half)
    check_collectives(comm)
    check_collectives(nd.ProcessGrid(comm, replicas=comm.size).replica_comm)
    assert max_relative_difference(train("perceptron", nd.ProcessGrid(comm)), train("perceptron")) < 1e-10
    dist.destroy_process_group(groups[world().rank % 2])


def test_errors_are_raised_on_all_ranks():
    comm = world()
    with pytest.raises(DataError, match="broken file"):
        raise_if_any_failed(comm, DataError("broken file") if comm.rank == SIZE - 1 else None)
    raise_if_any_failed(comm, None)
    with pytest.raises(OSError if comm.rank == 0 else RemoteError, match="disk"):
        raise_if_any_failed(comm, OSError("disk") if comm.rank == 0 else None)
    with pytest.raises(GridError, match="does not match"):
        nd.ProcessGrid(comm, rows=SIZE + 1)


def test_closed_group():
    grid = nd.ProcessGrid(world())
    world_comm, tile_comm = grid.world, grid.tile_comm
    array = np.zeros((2, 2))
    messages = [Message((tile_comm.rank + 1) % SIZE, array, (slice(0, 1),))] if SIZE > 1 else []
    exchange = tile_comm.create_exchange(messages, messages)
    grid.close()
    for call in (exchange.run, lambda: tile_comm.allgather(0), lambda: tile_comm.split(0, 0)):
        with pytest.raises(GridError, match="this process grid is closed"):
            call()
    if SIZE > 1:
        with pytest.raises(GridError, match="closed"):
            tile_comm.allreduce(array)
    assert world_comm.allgather(1) == [1] * SIZE  # owned by the caller


def test_many_grids_leak_nothing():
    """No process group, thread or connection is left, whether the grids are closed or not."""
    process = psutil.Process()
    train_on_grids(world(), 3, True)
    gc.collect()  # close files of earlier tests before counting
    groups, threads, files = dist.get_pg_count(), process.num_threads(), process.num_fds()
    for n in range(1000 if SIZE == 3 else 50):
        grid = nd.ProcessGrid(world(), replicas=SIZE if n % 2 else 1)
        assert grid.tile_comm.size * grid.replica_comm.size == SIZE
        if n % 3:
            grid.close()
    train_on_grids(world(), 3, False)
    gc.collect()
    assert dist.get_pg_count() == groups
    # a file of an earlier test may be closed meanwhile by a thread or another process
    assert process.num_fds() <= files
    assert process.num_threads() <= threads


@pytest.mark.parametrize(
    ("backends", "tensor_device_types"),
    [
        ("cpu:gloo,cuda:gloo", ("cpu",)),
        ("cpu:gloo,cuda:nccl", ("cpu", "cuda")),
        ("cuda:nccl,cpu:gloo", ("cuda", "cpu")),
    ],
)
def test_gpu_tensors_require_nccl(backends, tensor_device_types, monkeypatch):
    world()  # initialise the process group
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert TorchTransport().tensor_device_types == tensor_device_types


def test_process_group_without_gloo_is_rejected(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(LaunchError, match=r"got one with cuda:nccl; create one with torch.distributed.new_group"):
        world()
