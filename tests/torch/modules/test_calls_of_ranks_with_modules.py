"""Cross-rank consistency of collective calls on modules: call names, global tensors and random numbers."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from mismatched_calls import check_early_exit, find_undetected_pairs, list_public_methods  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

SHAPE = (2, 1, 6, 6)
IMAGE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
WINDOW = nd.Window(3, padding=1)
COLLECTIVE_CALLS = {
    "distribute": ("distribute", lambda state: ndt.distribute(state.net, SHAPE, state.grid)),
    "DistributedModule.forward": ("forward", lambda state: state.model(state.tile)),
    "DistributedModule.loss": ("loss", lambda state: state.model.loss(F.mse_loss, state.y, state.tile)),
    "DistributedModule.gather": ("gather", lambda state: state.model.gather(state.y)),
    "loss.backward": ("backward of loss 1", lambda state: state.loss.backward(retain_graph=True)),
    "y.backward": ("backward of an output", lambda state: state.y.sum().backward(retain_graph=True)),
    "DistributedOptimizer": (
        "DistributedOptimizer",
        lambda state: ndt.DistributedOptimizer(state.model, torch.optim.SGD),
    ),
    "halo": ("halo", lambda state: ndt.halo(state.tile, WINDOW, state.grid)),
    "halo's backward": ("backward of halo", lambda state: state.view.sum().backward(retain_graph=True)),
    "reduce": ("reduce sum over tiles", lambda state: ndt.reduce(state.tile.sum(), "sum", state.grid)),
    "loader": ("loader", lambda state: list(ndt.loader([IMAGE[0]], grid=state.grid))),
    "save_weights": ("save_weights", lambda state: ndt.save_weights(state.model, "none.safetensors")),
    "load_weights": ("load_weights", lambda state: ndt.load_weights(state.model, "none.safetensors")),
    "from_torch": ("from_torch", lambda state: ndt.from_torch(state.net, SHAPE, grid=state.grid)),
    "to_torch": ("state", lambda state: ndt.to_torch(state.layers_model)),
}
LOCAL_NAMES = {
    "DistributedModule", "TorchLoss", "TorchModel", "TorchOptimizer", "TorchTransport", "UnsupportedOperator", "rule",
    "rules", "world",
}  # fmt: skip
LOCAL_METHODS = {
    "set_export_context", "defer_gradients", "guard", "train", "state_dict", "load_state_dict", "scatter",
    "scatter_target",
}  # fmt: skip
CALLS = dict(COLLECTIVE_CALLS.values())
CAPTURED_PROGRAMS = {}


@pytest.fixture(autouse=True)
def shared_programs():
    with share_captures(CAPTURED_PROGRAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_net(*modules):
    """Build a convolution, and further modules, with deterministic weights."""
    module = nn.Sequential(nn.utils.skip_init(nn.Conv2d, 1, 1, 3, padding=1), *modules)  # draws no random numbers
    with torch.no_grad():
        for index, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + index)
    return module


def set_up(world):
    """Set up a distributed module and the arguments of its calls."""
    grid = nd.ProcessGrid(world)
    model = ndt.distribute(inner := build_net(), SHAPE, grid)
    tile = model.scatter(IMAGE)
    y, x = model(tile), tile.clone().requires_grad_()
    loss, view = model.loss(F.mse_loss, y, tile), ndt.halo(x, WINDOW, grid)
    layers_model = nd.ConvnetDist([nd.ConvLayerDist(1, kernel_size=3, padding=1)])
    layers_model.build((6, 6, 1), 2, grid)
    return SimpleNamespace(
        grid=grid, net=inner, model=model, tile=tile, y=y, loss=loss, view=view, layers_model=layers_model
    )


def test_all_public_names_are_covered():
    assert set(ndt.__all__) == LOCAL_NAMES | {name for name in COLLECTIVE_CALLS if name in ndt.__all__}
    names = {name.split(".")[-1] for name in COLLECTIVE_CALLS} | LOCAL_METHODS
    assert list_public_methods(ndt.DistributedModule) <= names


def test_all_pairs_of_calls():
    assert not find_undetected_pairs(set_up, CALLS)


CALLS_OF_A_MODEL = {
    "forward": lambda state: state.model(state.tile), "gather": lambda state: state.model.gather(state.y),
    "loss": lambda state: state.model.loss(F.mse_loss, state.y, state.tile),
    "backward of a loss": lambda state: state.loss.backward(retain_graph=True),
    "backward of an output": lambda state: state.y.sum().backward(retain_graph=True),
}  # fmt: skip
WRONG_TILES = {"samples": lambda x: x[:1], "channels": lambda x: x.repeat(1, 2, 1, 1)}


@pytest.mark.parametrize("name", CALLS_OF_A_MODEL)
def test_calls_on_different_models(name):
    def body(world):
        first = set_up(world)
        model = ndt.distribute(build_net(), SHAPE, first.grid)
        y = model(first.tile)
        second = SimpleNamespace(model=model, tile=first.tile, y=y, loss=model.loss(F.mse_loss, y, first.tile))
        CALLS_OF_A_MODEL[name](second if world.rank else first)

    with pytest.raises(nd.ConfigError, match="rank 1: the model is number 2 of this grid, but number 1 of this grid"):
        nd.loopback.run(2, body)


@pytest.mark.parametrize("name", WRONG_TILES)
def test_halo_with_different_tile_shapes(name):
    def body(world):
        x = torch.ones(2, 1, 6, 3)
        ndt.halo(WRONG_TILES[name](x) if world.rank else x, WINDOW, nd.ProcessGrid(world, cols=2))

    with pytest.raises(nd.ConfigError, match=f"rank 1: the number of {name} of x is"):
        nd.loopback.run(2, body)


def test_early_exit_of_a_rank():
    check_early_exit(set_up, CALLS)


def yield_altered(x):
    """Yield tensors of the shape of x with other values or another order."""
    yield from (x + 1e-6, x.flip(-1), x.flip(-2), x.flip(0), x.roll(1, -1), torch.full_like(x, torch.nan))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("argument", ["image", "target"])
def test_different_tensors_on_a_rank(argument, ranks):
    def body(world):
        grid, errors = nd.ProcessGrid(world, replicas=ranks if argument == "image" else 1), []
        model = ndt.distribute(build_net(), (6, 1, 6, 6), grid)
        x = torch.randn((6, 1, 6, 6), generator=torch.Generator().manual_seed(2))
        for wrong in yield_altered(x):
            image, target = (
                wrong if world.rank == ranks - 1 and argument == name else x for name in ("image", "target")
            )
            try:
                y = model(model.scatter(image))
                model.loss(F.mse_loss, y, model.scatter_target(target))
                errors.append("nothing")
            except nd.ConfigError as error:
                errors.append(str(error))
        for tensor in (x, x.to(memory_format=torch.channels_last), x.fill_(torch.nan)):
            model.loss(F.mse_loss, model(model.scatter(tensor)), model.scatter_target(tensor))
        return errors

    for errors in nd.loopback.run(ranks, body):
        assert len(errors) == 6
        for message in errors:
            assert message.startswith(f"rank {ranks - 1}: the {argument} passed to scatter"), message


def make_criterion(weight):
    return lambda y, t: (weight.mean() * (y - t)).square().mean()


def close_over_tensor(state, wrong):
    weight = torch.ones(3, 40, 40)
    weight[1, 2, 3] += wrong
    state.model.loss(make_criterion(weight), state.y, state.tile)


def train_with(state, wrong, make_optimizer):
    """Train a few steps with an optimiser that depends on the rank."""
    optimizer = make_optimizer(state.model, wrong)
    for _ in range(3):
        state.model.loss(F.mse_loss, state.model(state.tile), state.tile).backward()
        optimizer.step()
        optimizer.zero_grad()


def change_rate(model, wrong):
    optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] += wrong
    return optimizer


def change_weights(model, wrong):
    model(model.scatter(IMAGE))
    model.load_state_dict({name: value + wrong for name, value in model.state_dict().items()})
    return torch.optim.SGD(model.parameters(), 0.1)


SUM_PATTERN = r"after \d steps the sum of '0.(weight|bias)' is"
DIFFERENT_ARGUMENTS = {
    f"{SUM_PATTERN} .*but": lambda state, wrong: train_with(
        state, wrong, lambda m, w: torch.optim.SGD(m.parameters(), 0.1 + w)
    ),
    f"{SUM_PATTERN} -?[0-9]": lambda state, wrong: train_with(state, wrong, change_rate),
    f"{SUM_PATTERN} [0-9.]+, but": lambda state, wrong: train_with(state, wrong, change_weights),
    "gradient of the loss is 2": lambda state, wrong: (
        state.model.loss(F.mse_loss, state.y, state.tile) * (1 + wrong)
    ).backward(),
    "the number of batches is 2": lambda state, wrong: list(
        ndt.loader([IMAGE[0]] * int(1 + wrong), 1, grid=state.grid)
    ),
    "the criterion is make_criterion": close_over_tensor,
    "path is 1": lambda state, wrong: ndt.save_weights(state.model, f"{wrong:.0f}.safetensors"),
    "the argument lr is": lambda state, wrong: ndt.DistributedOptimizer(state.model, torch.optim.SGD, lr=0.1 + wrong),
}


@pytest.mark.parametrize("message", DIFFERENT_ARGUMENTS)
def test_different_arguments_on_a_rank(message):
    def body(world):
        state = set_up(world)
        with pytest.raises(nd.ConfigError, match=f"rank 1: {message}"):
            DIFFERENT_ARGUMENTS[message](state, float(world.rank))

    nd.loopback.run(2, body)


def test_different_buffers_on_a_rank():
    def body(world):
        module = build_net(nn.BatchNorm2d(1))
        model = ndt.distribute(module, SHAPE, nd.ProcessGrid(world))
        for _ in range(2):
            model(model.scatter(IMAGE))
        if world.rank == 1:
            module[1].running_mean.zero_()
        with pytest.raises(nd.ConfigError, match=r"rank 1 has a different module from rank 0: its '1\.running_mean'"):
            model(model.scatter(IMAGE))

    nd.loopback.run(2, body)


def test_checksums_depend_on_each_bit_and_position():
    from neondist.comm.agreement import checksum_of as array_checksum
    from neondist.torch.capture.checks import checksum_of

    x = torch.arange(3 * 70000, dtype=torch.int32).view(3, -1)  # several blocks of rows and a remainder
    changed = []
    for position in ((0, 0), (1, 40000), (2, 69999)):
        changed.append(y := x.clone())
        y[position] ^= 1 << 30
    changed += [x.flip(0), x.flip(1), x.view(-1, 3), x.view(torch.float32), torch.zeros_like(x)]
    assert len({checksum_of(y) for y in (x, *changed)}) == len(changed) + 1
    assert checksum_of(x.T.contiguous().T) == checksum_of(x)
    blocks = torch.arange(4 << 15, dtype=torch.int32)
    assert checksum_of(blocks) != checksum_of(blocks.roll(1 << 15))
    assert array_checksum(blocks.numpy()) != array_checksum(blocks.roll(1 << 15).numpy())
    assert len({array_checksum(y.contiguous().numpy()) for y in (x, *changed[:5])}) == 6


LOSSES = {
    "mean": (lambda model, y, t: y.square().mean(), True),
    "sum": (lambda model, y, t: y.square().sum(), True),
    "largest": (lambda model, y, t: y.abs().max(), True),
    "mse": (lambda model, y, t: F.mse_loss(y, t), True),
    "times a number": (lambda model, y, t: 3 * (y - t).square().mean(), True),
    "added to model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t) + y.abs().mean(), True),
    "model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t), False),
    "two of model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t) + model.loss(F.l1_loss, y, t), False),
    "model.loss of an activation": (lambda model, y, t: model.loss(F.mse_loss, y.sigmoid(), t), False),
    "a regulariser": (
        lambda model, y, t: 2 * model.loss(F.mse_loss, y, t) + sum(p.square().sum() for p in model.parameters()), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_warnings_for_losses_without_model_loss(name, replicas):
    loss, warned = LOSSES[name]

    def body(world):
        model = ndt.distribute(build_net(), SHAPE, nd.ProcessGrid(world, replicas=replicas))
        for _ in range(2):
            model.zero_grad()
            y, t = model(model.scatter(IMAGE)), model.scatter_target(IMAGE)
            loss(model, y, t).backward()
        return [p.grad.clone() for p in model.parameters()], model.backward_check._has_warned

    plain = SimpleNamespace(loss=lambda criterion, y, t: criterion(y, t), parameters=(single := build_net()).parameters)
    loss(plain, single(IMAGE), IMAGE).backward()
    for gradients, has_warned in nd.loopback.run(2, body):
        assert has_warned == warned
        if not warned or name == "sum":
            for gradient, p in zip(gradients, single.parameters(), strict=True):
                torch.testing.assert_close(gradient, p.grad)


def test_no_warning_for_scattered_gradients():
    def body(world):
        model = ndt.distribute(build_net(), SHAPE, nd.ProcessGrid(world))
        y = model(model.scatter(IMAGE))
        y.backward(model.scatter_target(IMAGE))
        with torch.no_grad():
            model(model.scatter(IMAGE)).mean()
        return model.backward_check._has_warned

    assert nd.loopback.run(2, body) == [False, False]


def read_generator_states():
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def test_generators_of_the_caller_are_unchanged(tmp_path, monkeypatch):
    """Only modules with dropout draw from the caller's generators, once for all ranks."""

    def body(world):
        state = set_up(world)
        before = read_generator_states()
        for name, call in CALLS.items():
            if not name.endswith("_weights"):
                call(state)
                assert read_generator_states() == before, name

    monkeypatch.chdir(tmp_path)  # for the weights files
    before = read_generator_states()
    nd.loopback.run(2, body)
    CAPTURED_PROGRAMS.clear()
    model = ndt.distribute(build_net(nn.ReLU()), SHAPE, nd.ProcessGrid.serial())
    model.loss(F.mse_loss, model(IMAGE), IMAGE).backward()
    assert read_generator_states() == before
    model = ndt.distribute(build_net(nn.Dropout()), SHAPE, nd.ProcessGrid.serial())
    assert read_generator_states() == before


class SeparateRank(nd.comm.SingleTransport):
    """Rank of its own process, with its own generator."""

    def __init__(self, rank):
        self.rank, self.size = rank, 2


def test_all_ranks_draw_the_same_seed():
    from neondist.torch.execution.runner import PlanRunner

    drawn_states = []
    for rank in range(2):
        torch.manual_seed(3)
        comm = SimpleNamespace(grid=SimpleNamespace(world=SeparateRank(rank)))
        PlanRunner._draw_seed(SimpleNamespace(comm=comm), [])
        drawn_states.append(torch.get_rng_state())
    assert torch.equal(*drawn_states)
