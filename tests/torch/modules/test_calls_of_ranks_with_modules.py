"""Every collective call with modules is compared before it waits: its name, whole tensors, and random numbers."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from parting import check_leaving, methods, refused_pairs  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import captured_once  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

SHAPE = (2, 1, 6, 6)
IMAGE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
WINDOW = nd.Window(3, padding=1)
COLLECTIVE = {
    "distribute": ("distribute", lambda s: ndt.distribute(s.net, SHAPE, s.grid)),
    "DistributedModule.forward": ("forward", lambda s: s.model(s.tile)),
    "DistributedModule.loss": ("loss", lambda s: s.model.loss(F.mse_loss, s.y, s.tile)),
    "DistributedModule.gather": ("gather", lambda s: s.model.gather(s.y)),
    "loss.backward": ("backward of loss 1", lambda s: s.loss.backward(retain_graph=True)),
    "y.backward": ("backward of an output", lambda s: s.y.sum().backward(retain_graph=True)),
    "DistributedOptimizer": ("DistributedOptimizer", lambda s: ndt.DistributedOptimizer(s.model, torch.optim.SGD)),
    "halo": ("halo", lambda s: ndt.halo(s.tile, WINDOW, s.grid)),
    "halo's backward": ("backward of halo", lambda s: s.view.sum().backward(retain_graph=True)),
    "reduce": ("reduce sum over tiles", lambda s: ndt.reduce(s.tile.sum(), "sum", s.grid)),
    "loader": ("loader", lambda s: list(ndt.loader([IMAGE[0]], grid=s.grid))),
    "save_weights": ("save_weights", lambda s: ndt.save_weights(s.model, "none.safetensors")),
    "load_weights": ("load_weights", lambda s: ndt.load_weights(s.model, "none.safetensors")),
    "from_torch": ("from_torch", lambda s: ndt.from_torch(s.net, SHAPE, grid=s.grid)),
    "to_torch": ("state", lambda s: ndt.to_torch(s.ours)),
}
LOCAL = {
    "DistributedModule", "TorchLoss", "TorchModel", "TorchOptimizer", "TorchTransport", "UnsupportedOperator", "rule",
    "rules", "world",
}  # fmt: skip
LOCAL_METHODS = {
    "capture_within", "defer_gradients", "guard", "train", "state_dict", "load_state_dict", "scatter", "scatter_target",
}  # fmt: skip
CALLS = dict(COLLECTIVE.values())
PROGRAMS = {}


@pytest.fixture(autouse=True)
def captured_before():
    with captured_once(PROGRAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net(*more):
    """A module with the same weights wherever it is made."""
    found = nn.Sequential(nn.utils.skip_init(nn.Conv2d, 1, 1, 3, padding=1), *more)  # which draws nothing
    with torch.no_grad():
        for at, p in enumerate(found.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + at)
    return found


def begin(world):
    """A distributed module, and what its calls need."""
    grid = nd.ProcessGrid(world)
    model = ndt.distribute(inner := net(), SHAPE, grid)
    tile = model.scatter(IMAGE)
    y, x = model(tile), tile.clone().requires_grad_()
    loss, view = model.loss(F.mse_loss, y, tile), ndt.halo(x, WINDOW, grid)
    ours = nd.ConvnetDist([nd.ConvLayerDist(1, kernel_size=3, padding=1)])
    ours.build((6, 6, 1), 2, grid)
    return SimpleNamespace(grid=grid, net=inner, model=model, tile=tile, y=y, loss=loss, view=view, ours=ours)


def test_the_table_has_every_public_name():
    assert set(ndt.__all__) == LOCAL | {name for name in COLLECTIVE if name in ndt.__all__}
    told = {name.split(".")[-1] for name in COLLECTIVE} | LOCAL_METHODS
    assert methods(ndt.DistributedModule) <= told


def test_all_pairs_of_calls():
    assert not refused_pairs(begin, CALLS)


OF_TWO = {
    "forward": lambda one: one.model(one.tile), "gather": lambda one: one.model.gather(one.y),
    "loss": lambda one: one.model.loss(F.mse_loss, one.y, one.tile),
    "backward of a loss": lambda one: one.loss.backward(retain_graph=True),
    "backward of an output": lambda one: one.y.sum().backward(retain_graph=True),
}  # fmt: skip
OF_TILES = {"samples": lambda x: x[:1], "channels": lambda x: x.repeat(1, 2, 1, 1)}


@pytest.mark.parametrize("name", OF_TWO)
def test_calls_of_another_model(name):
    def body(world):
        first = begin(world)
        model = ndt.distribute(net(), SHAPE, first.grid)
        y = model(first.tile)
        second = SimpleNamespace(model=model, tile=first.tile, y=y, loss=model.loss(F.mse_loss, y, first.tile))
        OF_TWO[name](second if world.rank else first)

    with pytest.raises(nd.ConfigError, match="rank 1: the model is number 2 of those on this grid, but number 1 of"):
        nd.loopback.run(2, body)


@pytest.mark.parametrize("name", OF_TILES)
def test_tiles_of_other_shapes_by_hand(name):
    def body(world):
        x = torch.ones(2, 1, 6, 3)
        ndt.halo(OF_TILES[name](x) if world.rank else x, WINDOW, nd.ProcessGrid(world, cols=2))

    with pytest.raises(nd.ConfigError, match=f"rank 1: its number of {name} is"):
        nd.loopback.run(2, body)


def test_a_rank_that_leaves():
    check_leaving(begin, CALLS)


def others(x):
    """Tensors that are not x, as by mistake: of other values, order, samples, sign of zero."""
    yield from (x + 1e-6, x.flip(-1), x.flip(-2), x.flip(0), x.roll(1, -1), torch.full_like(x, torch.nan))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["image", "target"])
def test_other_tensors_on_a_rank(what, ranks):
    def body(world):
        grid, found = nd.ProcessGrid(world, replicas=ranks if what == "image" else 1), []
        model = ndt.distribute(net(), (6, 1, 6, 6), grid)
        x = torch.randn((6, 1, 6, 6), generator=torch.Generator().manual_seed(2))
        for wrong in others(x):
            image, target = (wrong if world.rank == ranks - 1 and what == at else x for at in ("image", "target"))
            try:
                y = model(model.scatter(image))
                model.loss(F.mse_loss, y, model.scatter_target(target))
                found.append("nothing")
            except nd.ConfigError as error:
                found.append(str(error))
        for same in (x, x.to(memory_format=torch.channels_last), x.fill_(torch.nan)):
            model.loss(F.mse_loss, model(model.scatter(same)), model.scatter_target(same))
        return found

    for found in nd.loopback.run(ranks, body):
        assert len(found) == 6
        for said in found:
            assert said.startswith(f"rank {ranks - 1}: the {what} passed to scatter"), said


def closing_over(weight):
    return lambda y, t: (weight.mean() * (y - t)).square().mean()


def of_a_large_tensor(s, wrong):
    weight = torch.ones(3, 40, 40)
    weight[1, 2, 3] += wrong
    s.model.loss(closing_over(weight), s.y, s.tile)


def updated(s, wrong, make):
    """Train for a few steps with the optimiser that a rank makes."""
    optimizer = make(s.model, wrong)
    for _ in range(3):
        s.model.loss(F.mse_loss, s.model(s.tile), s.tile).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_another_rate(model, wrong):
    optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] += wrong
    return optimizer


def with_other_weights(model, wrong):
    model(model.scatter(IMAGE))
    model.load_state_dict({name: value + wrong for name, value in model.state_dict().items()})
    return torch.optim.SGD(model.parameters(), 0.1)


SUM = r"after \d steps the sum of '0.(weight|bias)' is"
DIFFERENT = {
    f"{SUM} .*but": lambda s, wrong: updated(s, wrong, lambda m, w: torch.optim.SGD(m.parameters(), 0.1 + w)),
    f"{SUM} -?[0-9]": lambda s, wrong: updated(s, wrong, with_another_rate),
    f"{SUM} [0-9.]+, but": lambda s, wrong: updated(s, wrong, with_other_weights),
    "its factor is 2": lambda s, wrong: (s.model.loss(F.mse_loss, s.y, s.tile) * (1 + wrong)).backward(),
    "the number of batches is 2": lambda s, wrong: list(ndt.loader([IMAGE[0]] * int(1 + wrong), 1, grid=s.grid)),
    "the criterion is closing_over": of_a_large_tensor,
    "path is 1": lambda s, wrong: ndt.save_weights(s.model, f"{wrong:.0f}.safetensors"),
    "the argument lr is": lambda s, wrong: ndt.DistributedOptimizer(s.model, torch.optim.SGD, lr=0.1 + wrong),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_arguments_on_a_rank(what):
    def body(world):
        s = begin(world)
        with pytest.raises(nd.ConfigError, match=f"rank 1: {what}"):
            DIFFERENT[what](s, float(world.rank))

    nd.loopback.run(2, body)


def test_a_buffer_that_a_rank_changes():
    def body(world):
        module = net(nn.BatchNorm2d(1))
        model = ndt.distribute(module, SHAPE, nd.ProcessGrid(world))
        for _ in range(2):
            model(model.scatter(IMAGE))
        if world.rank == 1:
            module[1].running_mean.zero_()
        with pytest.raises(nd.ConfigError, match=r"rank 1 has a different module from rank 0: its '1\.running_mean'"):
            model(model.scatter(IMAGE))

    nd.loopback.run(2, body)


def test_checksums_see_each_bit_and_its_place():
    from neondist.comm.agree import checksum_of as of_array
    from neondist.torch.capture.checks import checksum_of

    x = torch.arange(3 * 70000, dtype=torch.int32).view(3, -1)  # more than one block of rows, and a rest
    changed = []
    for at in ((0, 0), (1, 40000), (2, 69999)):
        changed.append(y := x.clone())
        y[at] ^= 1 << 30
    changed += [x.flip(0), x.flip(1), x.view(-1, 3), x.view(torch.float32), torch.zeros_like(x)]
    assert len({checksum_of(y) for y in (x, *changed)}) == len(changed) + 1
    assert checksum_of(x.T.contiguous().T) == checksum_of(x)
    blocks = torch.arange(4 << 15, dtype=torch.int32)
    assert checksum_of(blocks) != checksum_of(blocks.roll(1 << 15))
    assert of_array(blocks.numpy()) != of_array(blocks.roll(1 << 15).numpy())
    assert len({of_array(y.contiguous().numpy()) for y in (x, *changed[:5])}) == 6


LOSSES = {
    "mean": (lambda model, y, t: y.square().mean(), True),
    "sum": (lambda model, y, t: y.square().sum(), True),
    "largest": (lambda model, y, t: y.abs().max(), True),
    "mse": (lambda model, y, t: F.mse_loss(y, t), True),
    "times a number": (lambda model, y, t: 3 * (y - t).square().mean(), True),
    "beside model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t) + y.abs().mean(), True),
    "model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t), False),
    "two of model.loss": (lambda model, y, t: model.loss(F.mse_loss, y, t) + model.loss(F.l1_loss, y, t), False),
    "model.loss of y's own": (lambda model, y, t: model.loss(F.mse_loss, y.sigmoid(), t), False),
    "a regulariser": (
        lambda model, y, t: 2 * model.loss(F.mse_loss, y, t) + sum(p.square().sum() for p in model.parameters()), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_a_loss_by_hand(name, replicas):
    loss, warned = LOSSES[name]

    def body(world):
        model = ndt.distribute(net(), SHAPE, nd.ProcessGrid(world, replicas=replicas))
        for _ in range(2):
            model.zero_grad()
            y, t = model(model.scatter(IMAGE)), model.scatter_target(IMAGE)
            loss(model, y, t).backward()
        return [p.grad.clone() for p in model.parameters()], model.backward_check._warned

    plain = SimpleNamespace(loss=lambda criterion, y, t: criterion(y, t), parameters=(single := net()).parameters)
    loss(plain, single(IMAGE), IMAGE).backward()
    for found, told in nd.loopback.run(2, body):
        assert told == warned
        if not warned or name == "sum":
            for mine, p in zip(found, single.parameters(), strict=True):
                torch.testing.assert_close(mine, p.grad)


def test_a_scattered_gradient_and_no_gradient_warn_of_nothing():
    def body(world):
        model = ndt.distribute(net(), SHAPE, nd.ProcessGrid(world))
        y = model(model.scatter(IMAGE))
        y.backward(model.scatter_target(IMAGE))
        with torch.no_grad():
            model(model.scatter(IMAGE)).mean()
        return model.backward_check._warned

    assert nd.loopback.run(2, body) == [False, False]


def states():
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def test_generators_of_the_caller_stay_as_they_are(tmp_path, monkeypatch):
    """What draws as PyTorch's dropout does, draws once for all ranks."""

    def body(world):
        state = begin(world)
        before = states()
        for name, call in CALLS.items():
            if not name.endswith("_weights"):
                call(state)
                assert states() == before, name

    monkeypatch.chdir(tmp_path)  # where weights are saved
    before = states()
    nd.loopback.run(2, body)
    PROGRAMS.clear()
    model = ndt.distribute(net(nn.ReLU()), SHAPE, nd.ProcessGrid.serial())
    model.loss(F.mse_loss, model(IMAGE), IMAGE).backward()
    assert states() == before
    model = ndt.distribute(net(nn.Dropout()), SHAPE, nd.ProcessGrid.serial())
    assert states() == before


class Apart(nd.comm.SingleTransport):
    """A rank of its own process, with a generator of its own."""

    def __init__(self, rank):
        self.rank, self.size = rank, 2


def test_every_rank_draws_alike():
    from neondist.torch.execution.run import Runner

    after = []
    for rank in range(2):
        torch.manual_seed(3)
        comm = SimpleNamespace(grid=SimpleNamespace(world=Apart(rank)))
        Runner._draw_seed(SimpleNamespace(comm=comm), [])
        after.append(torch.get_rng_state())
    assert torch.equal(*after)
