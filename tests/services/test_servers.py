"""Parameter servers over gRPC: updates equal to serial ones, rounds, staleness, and exactly-once semantics."""

import copy
import itertools
import os
import random
import threading
from collections import Counter

import numpy as np
import pytest
from parameter_servers import SHAPES, Servers, draw_arrays
from random_messages import change_value, check_hostile_requests

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.message import Message, MessageError
from neondist.services.placement import EmbeddingTableSpec
from neondist.services.progress import MinibatchId
from neondist.services.server import ParameterServer
from neondist.services.state import PushedGradient, ServerState, StartingState, SyncPolicy
from neondist.services.updates import describe_optimizer

pytestmark = pytest.mark.filterwarnings("error")


def train_serially(optimizer, values, gradients):
    """Return the values after steps in one process."""
    flat = np.concatenate([values[name].reshape(-1) for name in SHAPES])
    slots = optimizer.create_slots(flat)
    ends = list(itertools.accumulate(values[name].size for name in SHAPES))
    decays = [values[name].ndim > 1 for name in SHAPES]
    layout = nd.FlatLayout(tuple(zip([0, *ends], ends)), tuple(decays), len(ends))  # noqa: B905
    for step, gradient in enumerate(gradients):
        grads = np.concatenate([gradient[name].reshape(-1) for name in SHAPES])
        optimizer.update(flat, grads, slots, step, layout=layout)
    return flat


def flatten(values):
    return np.concatenate([values[name].reshape(-1) for name in SHAPES])


def average(gradients, samples):
    total = sum(samples)
    return {
        name: sum(n * gradient[name] for n, gradient in zip(samples, gradients, strict=True)) / total for name in SHAPES
    }


@pytest.mark.parametrize(
    ("strategy", "optimizer", "servers"),
    [
        ("PS", nd.SGD(0.1), 1),
        ("PSLoadBalancing", nd.Adam(0.01, weight_decay=0.01, decay_all=False), 2),
        ("PartitionedPS", nd.SGD(0.1, momentum=0.9, nesterov=True), 3),
        ("UnevenPartitionedPS", nd.RMSprop(0.01, centered=True), 2),
        ("ShardedOptimizer", nd.AdamW(0.01, ema=0.9), 3),
        ("PSLoadBalancing", nd.LAMB(0.01), 2),
    ],
    ids=["sgd", "adam", "nesterov", "rmsprop", "adamw", "lamb"],
)
@pytest.mark.long
def test_synchronous_rounds_equal_serial_steps(strategy, optimizer, servers):
    """Push gradients of three workers with uneven batches, in any order."""
    samples = {"0": 5, "1": 3, "2": 8}
    initial, steps = draw_arrays(0), 4
    gradients = {worker: [draw_arrays(100 * (1 + int(worker)) + step) for step in range(steps)] for worker in samples}
    with Servers(servers) as job:
        layouts = job.layouts(strategy)
        results = {}

        def run_worker(worker):
            client = job.client(worker, layouts)
            client.push_initial_values(initial, optimizer, SyncPolicy(grads_to_wait=3))
            barrier.wait()
            values = draw_arrays(9)
            client.pull(values)
            for step in range(steps):
                assert not client.push(gradients[worker][step], samples[worker]).stale
                client.pull(values)
            results[worker] = values

        barrier = threading.Barrier(3)
        threads = [threading.Thread(target=run_worker, args=(worker,)) for worker in samples]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    means = [average([gradients[worker][step] for worker in samples], list(samples.values())) for step in range(steps)]
    expected = train_serially(optimizer, initial, means)
    for values in results.values():
        np.testing.assert_allclose(flatten(values), expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(flatten(values), flatten(results["0"]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
        ("NAdam", {}),
        ("Adagrad", {}),
    ],
)
def test_torch_optimisers_match_one_process(name, arguments):
    import torch

    initial, gradients = draw_arrays(0), [draw_arrays(1 + step) for step in range(3)]
    tensors = {key: torch.nn.Parameter(torch.from_numpy(value.copy())) for key, value in initial.items()}
    optimizer = getattr(torch.optim, name)(tensors.values(), **arguments)
    with Servers(2) as job:
        client = job.client(layouts=job.layouts("PartitionedPS"))
        client.push_initial_values(initial, optimizer)
        values = draw_arrays(9)
        client.pull(values)
        for gradient in gradients:
            client.push(gradient)
            client.pull(values)
            for key, tensor in tensors.items():
                tensor.grad = torch.from_numpy(gradient[key].copy())
            optimizer.step()
    for key, tensor in tensors.items():
        np.testing.assert_allclose(values[key], tensor.detach().numpy(), rtol=0, atol=1e-12)


def test_modulation_divides_rates_by_staleness():
    """Expect rates of 0.1, 0.1 and 0.025 at staleness 0, 1 and 4."""
    shapes = {"w": (2,)}
    with Servers(1) as job:
        layouts = job.layouts(shapes=shapes)
        fast, slow = job.client("0", layouts), job.client("1", layouts)
        for client in (fast, slow):
            client.push_initial_values({"w": np.zeros(2)}, nd.SGD(0.1), SyncPolicy(sync=False, modulate=True))
        values, gradient = {"w": np.zeros(2)}, {"w": np.ones(2)}
        for staleness, rate in ((0, 0.1), (1, 0.1), (4, 0.025)):
            slow.pull(values)
            for _ in range(staleness):
                fast.pull(values)
                fast.push(gradient)
            fast.pull(values)
            before = values["w"].copy()
            result = slow.push(gradient)
            assert (result.staleness, result.stale) == (staleness, False)
            fast.pull(values)
            np.testing.assert_allclose(before - values["w"], rate, rtol=0, atol=1e-15)


def test_gradients_beyond_the_tolerance_are_rejected():
    with Servers(2) as job:
        layouts = job.layouts()
        first, second = job.client("0", layouts), job.client("1", layouts)
        for client in (first, second):
            client.push_initial_values(draw_arrays(0), nd.SGD(0.1), SyncPolicy(grads_to_wait=1, version_tolerance=1))
            client.pull(draw_arrays(9))
        assert [first.push(draw_arrays(1)).stale for _ in range(1)] == [False]
        assert not second.push(draw_arrays(2)).stale  # one version old
        assert first.push(draw_arrays(3)).stale  # two versions old
        before = draw_arrays(9)
        second.pull(before)
        first.pull(draw_arrays(9))
        assert not first.push(draw_arrays(3)).stale
        assert [status["rejected"] for status in first.status()] == [1, 1]


def test_minibatch_is_applied_once_by_each_server():
    """Lose a worker between pushes to two servers; another one recomputes its minibatch."""
    with Servers(2) as job:
        layouts = job.layouts()
        first_worker, second_worker = job.client("0", layouts), job.client("1", layouts)
        first, minibatch = draw_arrays(0), MinibatchId(0, 4, 2)
        for client in (first_worker, second_worker):
            client.push_initial_values(first, nd.SGD(1.0), SyncPolicy(sync=False))
            client.pull(draw_arrays(9))
        job.hosts[1].stop(0)
        with pytest.raises(ServiceError):
            first_worker.push(draw_arrays(1), minibatch=minibatch)
        job.hosts[1] = job.stack.enter_context(type(job.hosts[1])([job.servers[1]], job.hosts[1].address, job.token))
        assert minibatch not in second_worker.applied_minibatches()
        assert not second_worker.push(draw_arrays(2), minibatch=minibatch).duplicate
        assert minibatch in second_worker.applied_minibatches()
        assert second_worker.push(draw_arrays(3), minibatch=minibatch).duplicate
        values = draw_arrays(9)
        second_worker.pull(values)
        for layout, gradient in zip(layouts, (draw_arrays(1), draw_arrays(2)), strict=True):
            for piece in layout.pieces:
                np.testing.assert_allclose(values[piece.name], first[piece.name] - gradient[piece.name], atol=1e-15)
        second_worker.finish_epoch(0)
        assert second_worker.push(draw_arrays(3), minibatch=MinibatchId(0, 7, 0)).duplicate


def test_values_are_pulled_only_if_newer():
    with Servers(2) as job:
        client = job.client()
        client.push_initial_values(draw_arrays(0), nd.SGD(0.1))
        values = draw_arrays(9)
        assert client.pull(values)
        assert not client.pull(values)
        client.push(draw_arrays(1))
        assert client.pull(values)


def test_rounds_end_without_lost_workers():
    """Lose one of three workers during a round, then end a later round early."""
    with Servers(2) as job:
        clients = [job.client(str(i)) for i in range(3)]
        values = draw_arrays(0)
        for client in clients:
            client.push_initial_values(values, nd.SGD(0.5), SyncPolicy(grads_to_wait=3))
            client.pull(draw_arrays(9))
        for i in (1, 0):
            clients[i].push(draw_arrays(1 + i))
        waiting = clients[0].pull_async()
        clients[1].remove_lost_worker("2")
        waiting.result().copy_to(values)
        expected = flatten(draw_arrays(0)) - 0.25 * (flatten(draw_arrays(1)) + flatten(draw_arrays(2)))
        np.testing.assert_allclose(flatten(values), expected, atol=1e-14)
        clients[0].push(draw_arrays(3))
        clients[0].finish_round()
        clients[0].pull(values)
        np.testing.assert_allclose(flatten(values), expected - 0.5 * flatten(draw_arrays(3)), atol=1e-14)


def test_staleness_bound_holds_across_calls():
    with Servers(2) as job:
        fast, slow = job.client("fast"), job.client("slow")
        for client in (fast, slow):
            client.push_initial_values(draw_arrays(0), nd.SGD(0.1), SyncPolicy(sync=False, staleness=1))
            client.pull(draw_arrays(9))
        fast.push(draw_arrays(1))
        fast.wait_for_staleness_bound()
        fast.push(draw_arrays(1))
        waiting = threading.Thread(target=fast.wait_for_staleness_bound)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        slow.push(draw_arrays(1))
        waiting.join(10)
        assert not waiting.is_alive()


def test_other_models_are_rejected():
    with Servers(1) as job:
        client = job.client()
        client.push_initial_values(draw_arrays(0), nd.SGD(0.1))
        with pytest.raises(ServiceError, match="has a model with a different optimizer"):
            job.client("1").push_initial_values(draw_arrays(1), nd.SGD(0.2))
        other = job.client("1", job.layouts(shapes={"w": (3,)}))
        with pytest.raises(ServiceError, match="has a model with a different layout"):
            other.push_initial_values({"w": np.zeros(3)}, nd.SGD(0.1))
        values = draw_arrays(9)
        client.pull(values)
        np.testing.assert_array_equal(flatten(values), flatten(draw_arrays(0)))


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [(nd.SGD(0.1, clip_norm=1.0), "clip_norm: needs a norm over all servers"), (nd.LAMB(0.1), "LAMB updates whole")],
)
def test_optimisers_of_whole_parameters_are_rejected(optimizer, problem):
    with Servers(2) as job, pytest.raises(ServiceError, match=problem):
        job.client(layouts=job.layouts("PartitionedPS")).push_initial_values(draw_arrays(0), optimizer)


def test_error_messages():
    with Servers(2) as job:
        client = job.client()
        with pytest.raises(ServiceError, match="has no model yet"):
            client.pull(draw_arrays(9))
        with pytest.raises(ServiceError, match="2 servers given, but the parameters are on 1; give"):
            job.client(layouts=job.layouts()[:1])
        with pytest.raises(nd.ConfigError, match="'conv/weights' has no owner"):
            job.layouts("AllReduce")
        cycle = nd.SGD(0.1, momentum=0.5, schedule=nd.OneCycle(3, momentum=(0.8, 0.9)))
        with pytest.raises(nd.ConfigError, match="the momentum"):
            client.push_initial_values(draw_arrays(0), cycle)
        client.push_initial_values(draw_arrays(0), nd.SGD(0.1))
        with pytest.raises(ServiceError, match="no checkpoint folder"):
            client.save("first")


def test_hostile_requests_change_nothing(capfd):
    """Send a sample; tools/hostile_messages.py sends 10,000."""
    assert check_hostile_requests(150, int(os.environ["NEONDIST_SEED"])) > 75
    assert "Traceback" not in capfd.readouterr().err


def test_hostile_models_are_rejected(tmp_path):
    """Change one value in requests to servers without a model: accept them, or reject them with a message."""
    rng, outcomes = random.Random(int(os.environ["NEONDIST_SEED"])), Counter()
    table, shapes = EmbeddingTableSpec("table", 10, 2, "float64"), {"words": (5, 2), "w": (4, 3), "b": ()}
    with Servers(1) as job:
        layout = job.layouts("PS", shapes, [table], sparse=["words"])[0].to_json()
    fields = {
        "layout": layout,
        "optimizer": describe_optimizer(nd.Adam(0.1, weight_decay=0.1)),
        "policy": SyncPolicy().to_json(),
        "values": True,
        "start": StartingState(updates=3, samples=12).to_json(),
        "name": "absent",
    }
    contents = {"dense/float64": np.zeros(13), "rows/table": np.zeros((2, 2)), "ids/table": np.arange(2)}
    contents |= {"rows/words": np.zeros((2, 2)), "ids/words": np.arange(2)}
    contents |= {f"slots/float64/{slot}": np.zeros(23) for slot in ("mean", "square")}
    for _ in range(1500):
        name = rng.choice(list(fields))
        changed = fields | {name: change_value(rng, copy.deepcopy(fields[name]))}
        method = rng.choice(["push_model", "push_model", "load_checkpoint"])
        try:
            ParameterServer(tmp_path).methods()[method](Message(changed, contents))
            outcomes["accepted"] += 1
        except (MessageError, nd.UserError):
            outcomes["rejected"] += 1
    assert outcomes["rejected"] > 1000
    assert outcomes["accepted"] > 50


def test_results_do_not_depend_on_the_order_of_arrival():
    rng = np.random.default_rng(0)
    gradients = [(str(worker), rng.normal(size=50), float(rng.integers(1, 9))) for worker in range(4)]
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        with Servers(1) as job:
            layout = job.layouts("PS", {"w": (50,)})[0]
        state = ServerState(layout.to_json(), describe_optimizer(nd.SGD(0.1)))
        pushed = [gradients[i] for i in order]
        state.apply_gradients(
            [PushedGradient(name, name, 0, 0, n, 1.0, None, {"float64": g.copy()}, {}) for name, g, n in pushed]
        )
        results.append(state.dense_parameters.values["float64"])
    np.testing.assert_array_equal(*results)
