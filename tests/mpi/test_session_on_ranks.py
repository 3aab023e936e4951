"""Sessions over MPI, on any number of ranks."""

import numpy as np
from mpi4py import MPI

import neondist as nd

world = MPI.COMM_WORLD


def train(folder, last, stop_request=None):
    grid = nd.ProcessGrid(world)
    dataset = nd.Synthetic((9, 8, 1), train=8, test=2)
    dataset.open(grid)
    model = nd.ConvnetDist([nd.ConvLayerDist(2, 3), nd.FCLayerDist(4)], optimizer=nd.Adam(0.01), dtype="float64")
    model.build(dataset.sample_shape, 4, grid)
    session = nd.DistributedSession(None, model, folder, [nd.StopAtStepHook(last)], log_step_count_steps=None)
    with session:
        for x, y in session.batches(dataset, 4):
            if session.global_step + 1 == stop_request and grid.rank == grid.size - 1:
                session.request_stop()
            session.run(model.train_batch, x, y)
    return session.global_step, model.state()


def test_all_ranks_stop_together_and_resume(tmp_path):
    folder = world.bcast(tmp_path)
    assert set(world.allgather(train(folder, 9, stop_request=3)[0])) == {3}
    step, state = train(folder, 6)
    expected = train(None, 6)[1]
    assert step == 6
    assert all(np.array_equal(state[name], expected[name]) for name in expected)
