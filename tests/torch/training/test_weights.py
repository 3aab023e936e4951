"""Weights files: written and read on any number of ranks, and by plain safetensors."""

import struct
import sys

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402
from torch_training import CELLS, IMAGES, Net, build_seeded, draw_labels, draw_tensor  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.02),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.02),
}

EXCLUDED_PARAMETER = "first.bias"  # its gradient is rounding noise


def train_steps(world, make_optimizer, path, first, last):
    """Train from step `first`, starting with the file's state, to step `last`; return the losses."""
    with nd.ProcessGrid(world) as grid:
        model = ndt.distribute(build_seeded(Net), IMAGES, grid)
        optimizer, losses = (
            make_optimizer([p for name, p in model.named_parameters() if name != EXCLUDED_PARAMETER]),
            [],
        )
        if first:
            assert ndt.load_weights(model, path, optimizer) == {"step": first, "of": "a test"}
        for step in range(first, last):
            optimizer.zero_grad()
            x, target = (
                model.scatter(draw_tensor(*IMAGES, step=step)),
                model.scatter_target(draw_labels(*CELLS, step=step)),
            )
            loss = model.loss(nn.functional.cross_entropy, model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ndt.save_weights(model, path, optimizer, step=last, of="a test")
        return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.long
def test_training_resumes_on_another_number_of_ranks(tmp_path, name):
    make_optimizer, path = OPTIMIZERS[name], tmp_path / "model.safetensors"
    with share_captures():
        (expected,) = loopback.run(
            1, lambda world: train_steps(world, make_optimizer, tmp_path / "other.safetensors", 0, 4)
        )
        first_losses = loopback.run(3, lambda world: train_steps(world, make_optimizer, path, 0, 2))
        last_losses = loopback.run(2, lambda world: train_steps(world, make_optimizer, path, 2, 4))
    for losses in first_losses:
        assert losses == pytest.approx(expected[:2], rel=1e-10)
    for losses in last_losses:
        assert losses == pytest.approx(expected[2:], rel=1e-10)
    states = [safetensors.load_file(file) for file in (path, tmp_path / "other.safetensors")]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "strategies", [("PartitionedPS", None, "PS"), ("ShardedOptimizer", "AllReduce", "RandomAxisPartitionAR")]
)
@pytest.mark.long
def test_partitioned_optimizer_state_is_written_whole(tmp_path, strategies):
    def create_optimizer(model, strategy):
        if strategy is None:
            return torch.optim.AdamW(model.parameters(), lr=0.05)
        return ndt.DistributedOptimizer(model, torch.optim.AdamW, strategy, lr=0.05)

    def train(world, strategy, path, first, last):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(
                nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3)).double(), IMAGES, grid
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.linspace(-0.5, 0.4, parameter.numel()).reshape(parameter.shape))
            optimizer = create_optimizer(model, strategy)
            if first:
                assert ndt.load_weights(model, path, optimizer) == {"step": first}
            for step in range(first, last):
                optimizer.zero_grad()
                x = model.scatter(draw_tensor(*IMAGES, step=step))
                model.loss(lambda y, x: y.square().mean(), model(x), x).backward()
                optimizer.step()
            ndt.save_weights(model, path, optimizer, step=last)

    path, expected = tmp_path / "model.safetensors", tmp_path / "expected.safetensors"
    with share_captures():
        loopback.run(1, lambda world: train(world, None, expected, 0, 3))
        for step, (strategy, ranks) in enumerate(zip(strategies, (3, 1, 2), strict=True)):
            loopback.run(ranks, lambda world, s=strategy, i=step: train(world, s, path, i, i + 1))
    torch.testing.assert_close(*(safetensors.load_file(file) for file in (path, expected)), rtol=1e-9, atol=1e-12)


class UnusualTensors(nn.Module):
    """Tied weights, and tensors of many dtypes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("bits16", torch.ones(2, 3, dtype=torch.bfloat16).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.zeros(0, 4))


def test_state_dict_round_trip(tmp_path):
    path, module, other = tmp_path / "odd.safetensors", UnusualTensors(), UnusualTensors()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor * 1.5)
    ndt.save_weights(module, path)
    assert ndt.load_weights(other, path) == {}
    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    other.load_state_dict(safetensors.load_file(path))
    safetensors.save_file({"weight": torch.ones(2, 3).double(), "bias": torch.zeros(2)}, path, {"by": "another"})
    linear = nn.Linear(3, 2)
    assert ndt.load_weights(linear, path) == {"by": "another"}
    assert torch.equal(linear.weight, torch.ones(2, 3))


def write_net(**changes):
    return lambda path: safetensors.save_file(
        {name: t for name, t in {**build_seeded(Net).state_dict(), **changes}.items() if t is not None}, path
    )


BAD_FILES = {
    "missing": (lambda path: None, "no such file; check the path"),
    "text": (lambda path: path.write_text("weights"), "is not a safetensors file ("),
    "header": (lambda path: path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "is not a safetensors file ("),
    "a folder": (lambda path: path.mkdir(), "is not a safetensors file ("),
    "others": (
        write_net(**{"last.bias": None, "lost": torch.zeros(2), "first.weight": torch.zeros(4, 3, 3, 2)}),
        "does not fit the module: not in the file: last.bias; not in the model: lost; shape mismatch:"
        " first.weight (file [4, 3, 3, 2], model [4, 3, 3, 3]); specify a file with this module's state_dict",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.long
def test_bad_files_raise_one_error_on_all_ranks(tmp_path, name):
    path = tmp_path / "bad.safetensors"
    write, message = BAD_FILES[name]
    write(path)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(build_seeded(Net), IMAGES, grid)
            before = [tensor.clone() for tensor in model.state_dict().values()]
            with pytest.raises(nd.DataError) as caught:
                ndt.load_weights(model, path)
            assert all(map(torch.equal, before, model.state_dict().values()))
            return str(caught.value), caught.value.raised_on_all_ranks

    errors = loopback.run(2, body, timeout=20.0)
    assert errors[0] == errors[1]
    assert errors[0][0].startswith(f"{path}: {message}")
    assert errors[0][1]


def test_write_errors(tmp_path):
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(build_seeded(Net), IMAGES, grid)
            with pytest.raises(nd.OutputError, match="cannot be written"):
                ndt.save_weights(model, tmp_path / "none" / "model.safetensors")
            other = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.Adam([other])
            other.grad = torch.ones(1)
            optimizer.step()
            with pytest.raises(nd.ConfigError, match="optimizer: has a parameter that is not the model's"):
                ndt.save_weights(model, tmp_path / "model.safetensors", optimizer)

    loopback.run(2, body, timeout=20.0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(nd.ConfigError, match=r"model: expected a torch\.nn\.Module, got dict"):
        ndt.save_weights({}, tmp_path / "model.safetensors")


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(nd.LaunchError, match=r"weights files need safetensors: pip install 'neondist\[torch\]'"):
        ndt.save_weights(nn.Linear(1, 1), tmp_path / "model.safetensors")
