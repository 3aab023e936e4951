"""Modules in reduced precision on any number of ranks: losses of autocast and GradScaler in one process."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import FunctionModule, run_distributed, run_serial  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.arrays.precision import ComputePrecision, LossScaler  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.geometry import grid_shape  # noqa: E402
from neondist.torch.training.train_step import compute_in_precision  # noqa: E402

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SHAPE, BATCH, STEPS = (12, 8, 3), 4, 3


pytestmark = pytest.mark.usefixtures("shared_captures")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3)))


def draw_batch(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(BATCH, *SHAPE)).astype("f4"), rng.integers(0, 5, BATCH)


def build_model(transport, precision, **options):
    grid = nd.ProcessGrid(transport, replicas=options.pop("replicas", 1))
    model = ndt.TorchModel(
        Net, precision=precision, optimizer=ndt.TorchOptimizer("SGD", {"lr": 0.1, "momentum": 0.9}), **options
    )
    model.build(SHAPE, BATCH, grid)
    return model


def run_step(model, number):
    x, labels = draw_batch(number)
    return model.train_batch(model.input.scatter(x), labels[slice(*model.grid.sample_range(BATCH))], BATCH)


def train_single_process(precision):
    """Train with autocast and GradScaler as PyTorch's documentation does."""
    net = ndt.TorchModel(Net).module
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler, losses = torch.amp.GradScaler("cpu", enabled=precision == "float16"), []
    for number in range(STEPS):
        x, labels = map(torch.from_numpy, draw_batch(number))
        optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, precision)):
            loss = nn.functional.cross_entropy(net(x.movedim(-1, 1).contiguous()), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


CASES = {
    "bfloat16": [(1, {}), (2, {"sync": "bucketed"}), (6, {})],
    "float16": [(1, {}), (4, {"replicas": 2, "strategy": "ShardedOptimizer"})],
}


@pytest.mark.parametrize("name", CASES)
def test_losses_match_autocast(name):
    expected = train_single_process(name)
    for ranks, options in CASES[name]:

        def body(transport, options=options):
            model = build_model(transport, name, **options)
            losses = [run_step(model, number) for number in range(STEPS)]
            assert model.bytes_sent == STEPS * model.compiled.bytes(model.grid.rank)
            assert model.loss_scaler == (LossScaler(finite_steps=STEPS) if name == "float16" else None)
            return losses

        for losses in loopback.run(ranks, body):
            assert losses == pytest.approx(expected, rel=1e-6 if ranks == 1 else EPSILON[name])


def test_tf32_does_not_affect_the_cpu():
    def body(transport, precision):
        model = build_model(transport, precision)
        return [run_step(model, number) for number in range(2)]

    assert loopback.run(2, lambda t: body(t, "tf32")) == loopback.run(2, lambda t: body(t, "float32"))


def test_all_ranks_skip_an_overflow_on_one():
    """Other steps match a model that never overflows."""

    def body(transport):
        options = {"replicas": 2, "strategy": "ShardedOptimizer", "sync": "bucketed"}
        model, other = (build_model(transport, "float16", **options) for _ in range(2))
        run_step(model, 0), run_step(other, 0)
        if model.grid.rank == 1:
            weight = next(model.module.parameters())
            hook = weight.register_hook(lambda gradient: gradient + float("inf"))
        before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        assert np.isnan(run_step(model, 1))
        for name, tensor in model.module.state_dict().items():
            assert torch.equal(tensor, before[name])
        if model.grid.rank == 1:
            hook.remove()
        assert model.loss_scaler == LossScaler(2.0**15, skipped_steps=1)
        other.step, other.loss_scaler.scale = 2, 2.0**15
        assert run_step(model, 2) == run_step(other, 2)
        assert (model.step, model.steps_without_optimizer) == (3, 1)

    loopback.run(4, body)


@pytest.mark.long
def test_loss_scale_is_logged_and_resumed(tmp_path):
    def run(folder, epochs, resume=False):
        def body(transport):
            model = ndt.TorchModel(Net, shape=(3, 12, 8), optimizer=ndt.TorchOptimizer("Adam"))
            data = nd.Synthetic(SHAPE, classes=5, train=8, test=4)
            experiment = nd.FitExperiment(data, model, batch_size=4, epochs=epochs, precision="float16")
            experiment.run(nd.ProcessGrid(transport), output=tmp_path / folder, resume=resume, hooks=[])
            return model.module.state_dict(), model.loss_scaler

        return loopback.run(2, body)[0]

    (uninterrupted, scaler), _, (resumed_state, resumed) = (
        run("whole", 3),
        run("parts", 1),
        run("parts", 3, resume=True),
    )
    assert scaler == resumed == LossScaler(finite_steps=6)
    assert all(torch.equal(tensor, resumed_state[name]) for name, tensor in uninterrupted.items())
    records = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert [(record["loss_scale"], record["skipped_steps"]) for record in records] == [(2.0**16, 0)] * 3


def test_plans_in_reduced_precision():
    plans = {}
    for name in ("float32", "bfloat16"):
        model = ndt.TorchModel(Net, precision=name)
        plans[name] = model.plan((48, 32, 3), grid_shape(2), BATCH)
    flops = [sum(cost.flops for cost in plan.costs().values()) for plan in plans.values()]
    assert flops[0] == flops[1] > 0
    assert plans["bfloat16"].max_training_memory < 0.65 * plans["float32"].max_training_memory


class OnGPU(nn.Module):
    """Module whose parameters claim to be on a GPU."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda"))])


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_tf32_is_enabled_during_a_pass():
    """The switches exist without a GPU too."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for name, expected in (("tf32", True), ("float32", False)):
        with compute_in_precision(ComputePrecision(name), OnGPU()):
            assert [switch.allow_tf32 for switch in switches] == [expected] * 2
        assert [switch.allow_tf32 for switch in switches] == before


@pytest.mark.parametrize("strategy", ["AllReduce", "ShardedOptimizer", "PS", "PartitionedPS"])
def test_gradscaler_skips_on_all_ranks(strategy):
    """In a user's training loop, where each rank checks only the gradients it owns: under PS, most own none."""
    labels = torch.tensor([0, 1, 2, 3])

    def body(transport):
        with nd.ProcessGrid(transport) as grid:
            torch.manual_seed(0)
            model = ndt.distribute(Net(), (4, 3, 12, 8), grid)
            optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, strategy, lr=0.1)
            scaler, results = torch.amp.GradScaler("cpu"), []
            for number in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    output = model(model.scatter(torch.from_numpy(draw_batch(number)[0]).movedim(-1, 1)))
                    loss = model.loss(nn.functional.cross_entropy, output, labels)
                bad = torch.inf if number == grid.rank == 1 else 0
                hook = model.module.first.bias.register_hook(lambda gradient, bad=bad: gradient + bad)
                scaler.scale(loss).backward()
                hook.remove()
                scaler.step(optimizer)
                scaler.update()
                results.append((scaler.get_scale(), model.module.first.weight.detach().clone()))
        scales, weights = zip(*results, strict=True)
        assert scales == (2.0**16, 2.0**15, 2.0**15)
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])
        return weights

    weights = loopback.run(2, body)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _reduce_to_means(x):
    mse, ties = nn.functional.mse_loss(x, torch.zeros_like(x)), (x[:, 0] * 0).amax((1, 2))
    return x.mean((2, 3)), mse, nn.functional.cross_entropy(x, x[:, 0].long(), x.new_ones(2)), ties


def test_means_are_finite_where_sums_overflow():
    """As in one process, whose kernels accumulate 16-bit numbers in float32."""
    module, x = FunctionModule(_reduce_to_means), torch.ones(2, 2, 260, 300, dtype=torch.float16)
    gradients = [torch.full((2, 2), 1000.0), torch.tensor(1000.0), torch.tensor(1000.0), torch.full((2,), 1000.0)]
    expected = run_serial(module.double(), [x.double()], [g.double() for g in gradients])
    for result in run_distributed(module, [x], [g.half() for g in gradients], (1, 2, 2)):
        for kind in ("outputs", "inputs"):
            for y, reference in zip(result[kind], expected[kind], strict=True):
                torch.testing.assert_close(y.double(), reference, rtol=0.01, atol=1e-6)
