"""Parameter servers over real gRPC: updates equal to serial ones, rounds, staleness, and exactly-once."""

import copy
import itertools
import os
import random
import threading
from collections import Counter

import numpy as np
import pytest
from parameter_servers import SHAPES, Servers, arrays
from random_messages import change_value, check_hostile_requests

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.message import Message, MessageError
from neondist.services.placement import TableSpec
from neondist.services.progress import Credit
from neondist.services.server import ParameterServer
from neondist.services.state import PushedGradient, ServerState, UpdateRule
from neondist.services.updates import describe_optimizer

pytestmark = pytest.mark.filterwarnings("error")


def serial(optimizer, values, gradients):
    """Return the values after steps of one process."""
    flat = np.concatenate([values[name].reshape(-1) for name in SHAPES])
    slots = optimizer.slots(flat)
    ends = list(itertools.accumulate(values[name].size for name in SHAPES))
    decays = [values[name].ndim > 1 for name in SHAPES]
    layout = nd.FlatLayout(tuple(zip([0, *ends], ends)), tuple(decays), len(ends))  # noqa: B905
    for step, gradient in enumerate(gradients):
        grads = np.concatenate([gradient[name].reshape(-1) for name in SHAPES])
        optimizer.update(flat, grads, slots, step, layout=layout)
    return flat


def flat(values):
    return np.concatenate([values[name].reshape(-1) for name in SHAPES])


def weighted(gradients, samples):
    total = sum(samples)
    return {name: sum(n * one[name] for n, one in zip(samples, gradients, strict=True)) / total for name in SHAPES}


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
    """Three workers with uneven batches, whose gradients arrive in any order."""
    samples = {"0": 5, "1": 3, "2": 8}
    first, steps = arrays(0), 4
    gradients = {worker: [arrays(100 * (1 + int(worker)) + step) for step in range(steps)] for worker in samples}
    with Servers(servers) as job:
        layouts = job.layouts(strategy)
        found = {}

        def work(worker):
            client = job.client(worker, layouts)
            client.initialize(first, optimizer, UpdateRule(grads_to_wait=3))
            started.wait()
            values = arrays(9)
            client.pull(values)
            for step in range(steps):
                assert not client.push(gradients[worker][step], samples[worker]).stale
                client.pull(values)
            found[worker] = values

        started = threading.Barrier(3)
        threads = [threading.Thread(target=work, args=(worker,)) for worker in samples]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    means = [weighted([gradients[worker][step] for worker in samples], list(samples.values())) for step in range(steps)]
    expected = serial(optimizer, first, means)
    for values in found.values():
        np.testing.assert_allclose(flat(values), expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(flat(values), flat(found["0"]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
        ("NAdam", {}),
        ("Adagrad", {}),
    ],
)
def test_optimisers_of_torch_update_as_in_one_process(name, arguments):
    import torch

    first, gradients = arrays(0), [arrays(1 + step) for step in range(3)]
    tensors = {key: torch.nn.Parameter(torch.from_numpy(value.copy())) for key, value in first.items()}
    optimizer = getattr(torch.optim, name)(tensors.values(), **arguments)
    with Servers(2) as job:
        client = job.client(layouts=job.layouts("PartitionedPS"))
        client.initialize(first, optimizer)
        values = arrays(9)
        client.pull(values)
        for gradient in gradients:
            client.push(gradient)
            client.pull(values)
            for key, tensor in tensors.items():
                tensor.grad = torch.from_numpy(gradient[key].copy())
            optimizer.step()
    for key, tensor in tensors.items():
        np.testing.assert_allclose(values[key], tensor.detach().numpy(), rtol=0, atol=1e-12)


def test_modulation_divides_the_rate_by_staleness():
    """Learning rate 0.1 at staleness 0, 1 and 4: 0.1, 0.1 and 0.025."""
    shapes = {"w": (2,)}
    with Servers(1) as job:
        layouts = job.layouts(shapes=shapes)
        fresh, late = job.client("0", layouts), job.client("1", layouts)
        for client in (fresh, late):
            client.initialize({"w": np.zeros(2)}, nd.SGD(0.1), UpdateRule(sync=False, modulate=True))
        values, gradient = {"w": np.zeros(2)}, {"w": np.ones(2)}
        for staleness, rate in ((0, 0.1), (1, 0.1), (4, 0.025)):
            late.pull(values)
            for _ in range(staleness):
                fresh.pull(values)
                fresh.push(gradient)
            fresh.pull(values)
            before = values["w"].copy()
            result = late.push(gradient)
            assert (result.staleness, result.stale) == (staleness, False)
            fresh.pull(values)
            np.testing.assert_allclose(before - values["w"], rate, rtol=0, atol=1e-15)


def test_gradients_beyond_the_tolerance_are_refused():
    with Servers(2) as job:
        layouts = job.layouts()
        one, other = job.client("0", layouts), job.client("1", layouts)
        for client in (one, other):
            client.initialize(arrays(0), nd.SGD(0.1), UpdateRule(grads_to_wait=1, version_tolerance=1))
            client.pull(arrays(9))
        assert [one.push(arrays(1)).stale for _ in range(1)] == [False]
        assert not other.push(arrays(2)).stale  # one version old
        assert one.push(arrays(3)).stale  # two
        before = arrays(9)
        other.pull(before)
        one.pull(arrays(9))
        assert not one.push(arrays(3)).stale
        assert [status["refused"] for status in one.status()] == [1, 1]


def test_a_minibatch_is_applied_once_by_each_server():
    """A worker is lost between two servers; another one computes its minibatch again."""
    with Servers(2) as job:
        layouts = job.layouts()
        lost, other = job.client("0", layouts), job.client("1", layouts)
        first, credit = arrays(0), Credit(0, 4, 2)
        for client in (lost, other):
            client.initialize(first, nd.SGD(1.0), UpdateRule(sync=False))
            client.pull(arrays(9))
        job.hosts[1].stop(0)
        with pytest.raises(ServiceError):
            lost.push(arrays(1), credit=credit)
        job.hosts[1] = job.stack.enter_context(type(job.hosts[1])([job.servers[1]], job.hosts[1].address, job.token))
        assert credit not in other.credits()
        assert not other.push(arrays(2), credit=credit).duplicate
        assert credit in other.credits()
        assert other.push(arrays(3), credit=credit).duplicate
        values = arrays(9)
        other.pull(values)
        for layout, gradient in zip(layouts, (arrays(1), arrays(2)), strict=True):
            for piece in layout.pieces:
                np.testing.assert_allclose(values[piece.name], first[piece.name] - gradient[piece.name], atol=1e-15)
        other.finish_epoch(0)
        assert other.push(arrays(3), credit=Credit(0, 7, 0)).duplicate


def test_values_are_pulled_only_if_newer():
    with Servers(2) as job:
        client = job.client()
        client.initialize(arrays(0), nd.SGD(0.1))
        values = arrays(9)
        assert client.pull(values)
        assert not client.pull(values)
        client.push(arrays(1))
        assert client.pull(values)


def test_rounds_end_without_workers_that_left():
    """Two of three arrive; the third leaves, and later one round is ended early."""
    with Servers(2) as job:
        clients = [job.client(str(at)) for at in range(3)]
        values = arrays(0)
        for client in clients:
            client.initialize(values, nd.SGD(0.5), UpdateRule(grads_to_wait=3))
            client.pull(arrays(9))
        for at in (1, 0):
            clients[at].push(arrays(1 + at))
        waiting = clients[0].pull_later()
        clients[1].lose("2")
        waiting.result().copy_to(values)
        expected = flat(arrays(0)) - 0.25 * (flat(arrays(1)) + flat(arrays(2)))
        np.testing.assert_allclose(flat(values), expected, atol=1e-14)
        clients[0].push(arrays(3))
        clients[0].finish_round()
        clients[0].pull(values)
        np.testing.assert_allclose(flat(values), expected - 0.5 * flat(arrays(3)), atol=1e-14)


def test_the_staleness_bound_holds_over_calls():
    with Servers(2) as job:
        fast, slow = job.client("fast"), job.client("slow")
        for client in (fast, slow):
            client.initialize(arrays(0), nd.SGD(0.1), UpdateRule(sync=False, staleness=1))
            client.pull(arrays(9))
        fast.push(arrays(1))
        fast.wait_turn()
        fast.push(arrays(1))
        waiting = threading.Thread(target=fast.wait_turn)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        slow.push(arrays(1))
        waiting.join(10)
        assert not waiting.is_alive()


def test_another_model_is_refused_and_the_first_stays():
    with Servers(1) as job:
        client = job.client()
        client.initialize(arrays(0), nd.SGD(0.1))
        with pytest.raises(ServiceError, match="has a model with another optimizer"):
            job.client("1").initialize(arrays(1), nd.SGD(0.2))
        other = job.client("1", job.layouts(shapes={"w": (3,)}))
        with pytest.raises(ServiceError, match="has a model with another layout"):
            other.initialize({"w": np.zeros(3)}, nd.SGD(0.1))
        values = arrays(9)
        client.pull(values)
        np.testing.assert_array_equal(flat(values), flat(arrays(0)))


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [(nd.SGD(0.1, clip_norm=1.0), "clip_norm: needs a norm over all servers"), (nd.LAMB(0.1), "LAMB updates whole")],
)
def test_optimisers_that_need_whole_parameters_are_refused(optimizer, problem):
    with Servers(2) as job, pytest.raises(ServiceError, match=problem):
        job.client(layouts=job.layouts("PartitionedPS")).initialize(arrays(0), optimizer)


def test_mistakes_are_named():
    with Servers(2) as job:
        client = job.client()
        with pytest.raises(ServiceError, match="has no model yet"):
            client.pull(arrays(9))
        with pytest.raises(ServiceError, match="2 servers, but the parameters are placed on 1"):
            job.client(layouts=job.layouts()[:1])
        with pytest.raises(nd.ConfigError, match="'conv/weights' has no owner"):
            job.layouts("AllReduce")
        cycle = nd.SGD(0.1, momentum=0.5, schedule=nd.OneCycle(3, momentum=(0.8, 0.9)))
        with pytest.raises(nd.ConfigError, match="the momentum"):
            client.initialize(arrays(0), cycle)
        client.initialize(arrays(0), nd.SGD(0.1))
        with pytest.raises(ServiceError, match="no checkpoint folder"):
            client.save("first")


def test_hostile_requests_change_nothing(capfd):
    """A sample; tools/hostile_messages.py sends 10,000."""
    assert check_hostile_requests(150, int(os.environ["NEONDIST_SEED"])) > 75
    assert "Traceback" not in capfd.readouterr().err


def test_hostile_models_are_refused(tmp_path):
    """Requests for a model with one value changed, to servers that hold none: taken, or refused in words."""
    draw, outcomes = random.Random(int(os.environ["NEONDIST_SEED"])), Counter()
    table, shapes = TableSpec("table", 10, 2, "float64"), {"w": (4, 3), "b": ()}
    with Servers(1) as job:
        layout = job.layouts("PS", shapes, [table])[0].to_json()
    fields = {
        "layout": layout,
        "optimizer": describe_optimizer(nd.Adam(0.1, weight_decay=0.1)),
        "rule": UpdateRule().to_json(),
        "values": True,
        "name": "absent",
    }
    sent = {"dense/float64": np.zeros(13), "rows/table": np.zeros((2, 2)), "ids/table": np.arange(2)}
    for _ in range(1500):
        name = draw.choice(list(fields))
        changed = fields | {name: change_value(draw, copy.deepcopy(fields[name]))}
        method = draw.choice(["push_model", "push_model", "load_checkpoint"])
        try:
            ParameterServer(tmp_path).methods()[method](Message(changed, sent))
            outcomes["taken"] += 1
        except (MessageError, nd.UserError):
            outcomes["refused"] += 1
    assert outcomes["refused"] > 1000
    assert outcomes["taken"] > 50


def test_the_order_of_arrival_changes_no_bit():
    draw = np.random.default_rng(0)
    given = [(str(worker), draw.normal(size=50), float(draw.integers(1, 9))) for worker in range(4)]
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        with Servers(1) as job:
            layout = job.layouts("PS", {"w": (50,)})[0]
        state = ServerState(layout.to_json(), describe_optimizer(nd.SGD(0.1)))
        pushed = [given[at] for at in order]
        state.apply(
            [PushedGradient(name, name, 0, 0, n, 1.0, None, {"float64": g.copy()}, {}) for name, g, n in pushed]
        )
        found.append(state.dense.values["float64"])
    np.testing.assert_array_equal(*found)
