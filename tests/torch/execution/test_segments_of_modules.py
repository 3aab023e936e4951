"""Windows of a module that share an exchange, and strips of tiles, give the numbers of windows one by one."""

import copy
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import captured_once, check  # noqa: E402
from turns import some  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import ConfigError, ShapeError  # noqa: E402


class Residual(nn.Module):
    """Norms in a residual block, strides, two branches, and what is computed of neither image nor parameters alone."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.a, self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4)
        self.b, self.groups = nn.Conv2d(4, 4, 5, padding=2), nn.GroupNorm(2, 4)
        self.c, self.d = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 3, 3)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        x = F.relu(self.first(self.a(x)))
        y = F.max_pool2d(F.relu_(self.groups(self.b(x)) * torch.tanh(self.scale) + x), 3, 2, 1)
        return self.d(F.relu(self.c(y)))


class UNet(nn.Module):
    """Up again, to the extent of what comes beside it; two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.Conv2d(6, 8, 3, 2, 1)
        self.inner, self.up = nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ConvTranspose2d(8, 6, 2, 2)
        self.last, self.attention = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        x = F.silu(self.first(x))
        y = self.up(F.gelu(self.inner(self.down(x))))[:, :, : x.shape[2], : x.shape[3]]
        y = y * torch.sigmoid(self.attention(y.mean((2, 3), keepdim=True)))
        both = torch.cat([x, F.interpolate(y, x.shape[2:], mode="bilinear")], 1)
        return {"y": self.last(both), "x": F.avg_pool2d(both, 3, 1, 1)}


def volume():
    return nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1), nn.InstanceNorm3d(3, affine=True, track_running_stats=True), nn.SiLU(),
        nn.Conv3d(3, 3, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(3, 2, 2),
    )  # fmt: skip


CASES = {
    "batch norm": (Residual, (2, 3, 25, 19)),
    "known statistics": (lambda: Residual().eval(), (2, 3, 13, 9)),
    "moments alone": (lambda: Residual(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), (2, 3, 19, 17)),
    "U-Net": (UNet, (2, 3, 21, 26)),
    "volume": (volume, (2, 2, 9, 8, 7)),
}  # fmt: skip
HOW = {
    "two windows": ({"scheme": "deep_halo"}, ((2, 1, 3),)),
    "three windows, run again": ({"scheme": "deep_halo(layers=3)", "recompute": True}, ((1, 2, 2),)),
    "all windows": ({"scheme": "deep_halo(layers=9)"}, ((1, 2, 2), (1, 7, 1))),  # which has tiles without cells inside
    "strips": ({"strips": 7}, ((1, 1, 1), (1, 1, 2))),
    "strips of segments": ({"strips": "auto", "scheme": "auto"}, ((2, 2, 1),)),
}


@pytest.mark.parametrize(
    ("name", "way"),
    some(sorted({*product(("batch norm", "U-Net"), HOW), *product(CASES, ("all windows", "strips"))})),
)
@pytest.mark.long
def test_the_numbers_of_one_process(name, way):
    (make, shape), (how, grids) = CASES[name], HOW[way]
    torch.manual_seed(0)
    check(make(), shape, grids=grids, **how)


NORMS = {
    "batch": nn.BatchNorm2d(3), "groups": nn.GroupNorm(3, 3), "instance": nn.InstanceNorm2d(3, affine=True),
    "running": nn.InstanceNorm2d(3, track_running_stats=True), "none": nn.Identity(),
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["deep_halo(layers=3)", "overlap_tile(statistics=global)"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_replica_without_samples(norm, scheme):
    """A sample that fills in for those that it has not is part of no statistics, and has no gradient."""
    if norm == "running" and "overlap" in scheme:
        pytest.skip("running statistics of instance norms of other replicas are no part of a segment")
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    check(nn.Sequential(convs[0], NORMS[norm], nn.SELU(), *convs[1:]), (2, 3, 9, 8), grids=[(3, 2, 1)], scheme=scheme)


def test_a_norm_of_which_the_statistics_alone_are_read():
    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))

        def forward(self, x):
            self.net(x)
            return x * 2

    check(Unread(), (2, 2, 9, 11), grids=((1, 2, 2),), scheme="deep_halo")


def planned(module, shape, ranks=4, **how):
    """Return the plan of the first of some ranks, and of all what they send in a training step."""

    def body(world):
        with ProcessGrid(world) as grid:
            plan = ndt.distribute(copy.deepcopy(module), shape, grid, **how).plan
            return plan, plan.bytes(grid.rank)

    with captured_once():
        found = loopback.run(ranks, body)
    return found[0][0], [sent for _, sent in found]


def views(plan):
    return sum(step.kind == "view" for step in plan.steps)


CHAIN = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(6)))


@pytest.mark.long
def test_windows_of_a_segment_share_an_exchange():
    counts = {
        layers: views(planned(CHAIN, (1, 2, 24, 24), scheme=f"deep_halo(layers={layers})")[0])
        for layers in (1, 2, 3, 9)
    }
    assert counts == {1: 6, 2: 3, 3: 2, 9: 1}
    assert views(planned(CHAIN, (1, 2, 24, 24), scheme={"": "halo", "2": "deep_halo", "3": "deep_halo"})[0]) == 5
    assert views(planned(CHAIN, (1, 2, 24, 24), scheme={"": "deep_halo", "2": "tower"})[0]) == 4


class Encoder(nn.Module):
    """Windows before an operator on the whole image, two of which read the image."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Residual(), nn.Linear(3, 2)
        self.side = nn.Conv2d(3, 3, 5)

    def forward(self, x, scale):
        x = (x - 0.5) * scale[:, None, None, None]
        y, z = self.body(x), F.max_pool2d(self.side(x), 3, 2)
        return self.head((y + F.adaptive_avg_pool2d(x, 1)).mean((2, 3))), z


OVERLAPPING = {
    "batch norm": (Residual, [(2, 3, 25, 19)]),
    "moments alone": (lambda: Residual(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), [(2, 3, 19, 17)]),
    "volume": (volume, [(2, 2, 9, 8, 7)]),
    "encoder": (Encoder, [(2, 3, 25, 21), (2,)]),
}
GRIDS = ((1, 2, 2), (2, 1, 3), (1, 5, 1))


@pytest.mark.parametrize(("name", "grid"), some(product(OVERLAPPING, GRIDS)), ids=str)
@pytest.mark.long
def test_tiles_that_overlap_give_the_numbers_of_one_process(name, grid):
    make, shapes = OVERLAPPING[name]
    if name == "volume" and grid[0] > 1:
        pytest.skip("running statistics of instance norms of other replicas are no part of a segment")
    torch.manual_seed(0)
    how = [{}, {"recompute": True}] if name == "batch norm" else [{}]
    for more in how:
        check(make(), *shapes, grids=(grid,), scheme="overlap_tile(statistics=global)", **more)


@pytest.mark.parametrize("more", [{}, {"strips": 5}], ids=str)
@pytest.mark.long
def test_tiles_that_overlap_exchange_nothing(more):
    check(copy.deepcopy(CHAIN), (1, 2, 24, 24), grids=GRIDS, scheme="overlap_tile", **more)
    _, sent = planned(CHAIN, (1, 2, 24, 24), scheme="overlap_tile", **more)
    assert sent == [0, 0, 0, 0]
    parts = {"": "overlap_tile", "3": "halo", "4": "tower", "5": "halo"}
    assert views(planned(CHAIN, (1, 2, 24, 24), scheme=parts, **more)[0]) == 3


def test_a_tile_without_what_is_around_it_is_refused():
    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(copy.deepcopy(CHAIN), (1, 2, 24, 24), grid, scheme="overlap_tile")
            x = torch.zeros(1, 2, 24, 24)
            assert model.scatter(x).shape == (1, 2, 18, 24)
            with pytest.raises(ShapeError, match=r"\(1, 2, 12, 24\).*this rank's tile of .* is \(1, 2, 18, 24\)"):
                model(x[:, :, :12])

    loopback.run(2, body)


def test_norms_stay_in_a_segment():
    norms = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)) for _ in range(3)))
    plan, _ = planned(norms, (2, 2, 24, 24), scheme="deep_halo(layers=3)")
    assert [step.kind for step in plan.steps if step.kind in ("view", "norm")] == ["view", "norm", "norm", "norm"]


@pytest.mark.parametrize(("latency", "count"), [(1e-9, 6), (1.0, 1)])
def test_a_planner_weighs_messages_and_work(latency, count):
    plan, _ = planned(CHAIN, (1, 2, 240, 240), scheme=f"auto(latency={latency}, bandwidth=1e12)")
    assert views(plan) == count


def test_dropout_draws_the_same_numbers():
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Dropout(0.4), nn.Conv2d(3, 3, 3), nn.Dropout2d(0.3), nn.Conv2d(3, 1, 3)
    )
    x = torch.randn(2, 1, 19, 23, dtype=torch.float64)

    def trained(ranks, **how):
        def body(world):
            with ProcessGrid(world) as grid:
                model = ndt.distribute(copy.deepcopy(module).double(), x.shape, grid, **how)
                torch.manual_seed(3)
                y = model(model.scatter(x))
                y.square().sum().backward()
                return model.gather(y.detach()), [p.grad for p in model.parameters()]

        return loopback.run(ranks, body)[0]

    with captured_once():
        expected = trained(1)
        for how in ({"scheme": "deep_halo(layers=3)"}, {"strips": 4}, {"strips": 4, "scheme": "deep_halo(layers=3)"}):
            for ranks in (1, 4):
                torch.testing.assert_close(trained(ranks, **how), expected, rtol=1e-10, atol=1e-10)


def test_strips_keep_nothing_between_windows():
    def kept(strips):
        sizes, shape = [], (1, 2, 128, 128)
        model = ndt.distribute(copy.deepcopy(CHAIN), shape, ProcessGrid.serial(), strips=strips)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(torch.randn(shape))
        return sum(sizes)

    assert kept(16) < kept(None) / 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"strips": 0}, "strips: 0; expected a number of rows > 0, or 'auto'"),
        ({"strips": "all"}, "strips: 'all'; expected"),
        ({"strips": True}, "strips: True; expected"),
        ({"strips": 4, "memory": "1GiB"}, "strips: cannot be combined with memory"),
        ({"strips": 4, "compile": True}, "strips: cannot be combined .* compile"),
        ({"scheme": "deep_halo", "memory": "1GiB"}, "memory: requires a module with one input and exact halos"),
        ({"scheme": "deep_halo(layers=0)"}, "layers"),
    ],
)
def test_bad_input(how, message):
    with pytest.raises(ConfigError, match=message):
        planned(CHAIN, (1, 2, 24, 24), 1, **how)


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "message"),
    [
        (
            Residual,
            (1, 3, 24, 24),
            "overlap_tile",
            r"conv2d\S* in module 'b' depends .*: 'overlap_tile\(statistics=global\)'",
        ),
        (
            UNet,
            (1, 3, 24, 24),
            "overlap_tile",
            r"test_segments_of_modules.py:\d+: scheme: .*upsample_bilinear2d.vec in module '' depends on cells",
        ),
        (
            lambda: CHAIN,
            (1, 2, 24, 24),
            {"3": "overlap_tile"},
            r"conv2d.default in module '3' depends .*, as in \{'': 'halo', 'encoder': .*",
        ),
        (
            lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"),
            (1, 3, 8, 8),
            "overlap_tile",
            "depends on cells of other tiles",
        ),
    ],
)
def test_windows_that_cannot_do_without_messages(module, shape, scheme, message):
    with pytest.raises(ConfigError, match=message):
        planned(module(), shape, 2, scheme=scheme)
