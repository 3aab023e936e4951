"""Segments of modules, whose windows share an exchange, and strips of tiles, against a single process."""

import copy
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_cases  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import ConfigError, ShapeError  # noqa: E402


class ResidualNet(nn.Module):
    """Residual block with norms, strides, two branches and an operand computed from a parameter alone."""

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
    """U-Net with cropped upsampling, channel attention and two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.Conv2d(6, 8, 3, 2, 1)
        self.inner, self.up = nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ConvTranspose2d(8, 6, 2, 2)
        self.last, self.attention = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        x = F.silu(self.first(x))
        y = self.up(F.gelu(self.inner(self.down(x))))[:, :, : x.shape[2], : x.shape[3]]
        y = y * torch.sigmoid(self.attention(y.mean((2, 3), keepdim=True)))
        features = torch.cat([x, F.interpolate(y, x.shape[2:], mode="bilinear")], 1)
        return {"y": self.last(features), "x": F.avg_pool2d(features, 3, 1, 1)}


def build_volume_net():
    return nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1), nn.InstanceNorm3d(3, affine=True, track_running_stats=True), nn.SiLU(),
        nn.Conv3d(3, 3, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(3, 2, 2),
    )  # fmt: skip


CASES = {
    "batch norm": (ResidualNet, (2, 3, 25, 19)),
    "known statistics": (lambda: ResidualNet().eval(), (2, 3, 13, 9)),
    "moments alone": (lambda: ResidualNet(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), (2, 3, 19, 17)),
    "U-Net": (UNet, (2, 3, 21, 26)),
    "volume": (build_volume_net, (2, 2, 9, 8, 7)),
}  # fmt: skip
SETTINGS = {
    "two windows": ({"scheme": "deep_halo"}, ((2, 1, 3),)),
    "three windows, recomputed": ({"scheme": "deep_halo(layers=3)", "recompute": True}, ((1, 2, 2),)),
    "all windows": ({"scheme": "deep_halo(layers=9)"}, ((1, 2, 2), (1, 7, 1))),  # including empty tiles
    "strips": ({"strips": 7}, ((1, 1, 1), (1, 1, 2))),
    "strips of segments": ({"strips": "auto", "scheme": "auto"}, ((2, 2, 1),)),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    select_cases(sorted({*product(("batch norm", "U-Net"), SETTINGS), *product(CASES, ("all windows", "strips"))})),
)
@pytest.mark.long
def test_segments_match_single_process(name, setting):
    (build, shape), (options, grids) = CASES[name], SETTINGS[setting]
    torch.manual_seed(0)
    check_module(build(), shape, grids=grids, **options)


NORMS = {
    "batch": nn.BatchNorm2d(3), "groups": nn.GroupNorm(3, 3), "instance": nn.InstanceNorm2d(3, affine=True),
    "running": nn.InstanceNorm2d(3, track_running_stats=True), "none": nn.Identity(),
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["deep_halo(layers=3)", "overlap_tile(statistics=global)"])
@pytest.mark.parametrize("norm", NORMS)
def test_empty_replicas(norm, scheme):
    """The placeholder sample of an empty replica has no part in statistics and no gradient."""
    if norm == "running" and "overlap" in scheme:
        pytest.skip("a segment excludes running statistics of instance norms on other replicas")
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    check_module(
        nn.Sequential(convs[0], NORMS[norm], nn.SELU(), *convs[1:]), (2, 3, 9, 8), grids=[(3, 2, 1)], scheme=scheme
    )


def test_norm_used_for_its_statistics_only():
    class UnusedNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))

        def forward(self, x):
            self.net(x)
            return x * 2

    check_module(UnusedNorm(), (2, 2, 9, 11), grids=((1, 2, 2),), scheme="deep_halo")


def plan_on(module, shape, ranks=4, **options):
    """Return the plan of the first rank, and the bytes that each rank sends in a training step."""

    def body(world):
        with ProcessGrid(world) as grid:
            plan = ndt.distribute(copy.deepcopy(module), shape, grid, **options).plan
            return plan, plan.bytes(grid.rank)

    with share_captures():
        plans = loopback.run(ranks, body)
    return plans[0][0], [sent for _, sent in plans]


def count_views(plan):
    return sum(step.kind == "view" for step in plan.steps)


CHAIN = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(6)))


@pytest.mark.long
def test_windows_of_a_segment_share_an_exchange():
    counts = {
        layers: count_views(plan_on(CHAIN, (1, 2, 24, 24), scheme=f"deep_halo(layers={layers})")[0])
        for layers in (1, 2, 3, 9)
    }
    assert counts == {1: 6, 2: 3, 3: 2, 9: 1}
    assert count_views(plan_on(CHAIN, (1, 2, 24, 24), scheme={"": "halo", "2": "deep_halo", "3": "deep_halo"})[0]) == 5
    assert count_views(plan_on(CHAIN, (1, 2, 24, 24), scheme={"": "deep_halo", "2": "tower"})[0]) == 4


class Encoder(nn.Module):
    """Windows before a global operator, two of which read the image."""

    def __init__(self):
        super().__init__()
        self.body, self.head = ResidualNet(), nn.Linear(3, 2)
        self.side = nn.Conv2d(3, 3, 5)

    def forward(self, x, scale):
        x = (x - 0.5) * scale[:, None, None, None]
        y, z = self.body(x), F.max_pool2d(self.side(x), 3, 2)
        return self.head((y + F.adaptive_avg_pool2d(x, 1)).mean((2, 3))), z


OVERLAPPING = {
    "batch norm": (ResidualNet, [(2, 3, 25, 19)]),
    "moments alone": (lambda: ResidualNet(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), [(2, 3, 19, 17)]),
    "volume": (build_volume_net, [(2, 2, 9, 8, 7)]),
    "encoder": (Encoder, [(2, 3, 25, 21), (2,)]),
}
GRIDS = ((1, 2, 2), (2, 1, 3), (1, 5, 1))


@pytest.mark.parametrize(("name", "grid"), select_cases(product(OVERLAPPING, GRIDS)), ids=str)
@pytest.mark.long
def test_overlapping_tiles_match_single_process(name, grid):
    build, shapes = OVERLAPPING[name]
    if name == "volume" and grid[0] > 1:
        pytest.skip("a segment excludes running statistics of instance norms on other replicas")
    torch.manual_seed(0)
    variants = [{}, {"recompute": True}] if name == "batch norm" else [{}]
    for options in variants:
        check_module(build(), *shapes, grids=(grid,), scheme="overlap_tile(statistics=global)", **options)


def test_segments_of_unread_results():
    def forward(x, z):
        z.flip(torch.arange(2, z.dim()).tolist())
        return x

    options = {"scheme": "deep_halo(layers=3)", "strips": 3}
    check_module(FunctionModule(forward), (1, 1, 7, 11), (1, 1), grids=((3, 2, 1),), **options)


@pytest.mark.parametrize("options", [{}, {"strips": 5}], ids=str)
@pytest.mark.long
def test_overlapping_tiles_exchange_nothing(options):
    check_module(copy.deepcopy(CHAIN), (1, 2, 24, 24), grids=GRIDS, scheme="overlap_tile", **options)
    _, sent = plan_on(CHAIN, (1, 2, 24, 24), scheme="overlap_tile", **options)
    assert sent == [0, 0, 0, 0]
    parts = {"": "overlap_tile", "3": "halo", "4": "tower", "5": "halo"}
    assert count_views(plan_on(CHAIN, (1, 2, 24, 24), scheme=parts, **options)[0]) == 3


def test_tiles_without_overlap_are_rejected():
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
    plan, _ = plan_on(norms, (2, 2, 24, 24), scheme="deep_halo(layers=3)")
    assert [step.kind for step in plan.steps if step.kind in ("view", "norm")] == ["view", "norm", "norm", "norm"]


@pytest.mark.parametrize(("latency", "count"), [(1e-9, 6), (1.0, 1)])
def test_planner_weighs_latency_against_work(latency, count):
    plan, _ = plan_on(CHAIN, (1, 2, 240, 240), scheme=f"auto(latency={latency}, bandwidth=1e12)")
    assert count_views(plan) == count


def test_planner_ignores_results_that_are_not_tensors():
    """Without indices, the second result of adaptive max pooling is None."""
    convs = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    check_module(
        nn.Sequential(convs[0], nn.AdaptiveMaxPool2d(6), convs[1]), (1, 2, 12, 12), grids=[(1, 2, 1)], scheme="auto"
    )


def test_dropout_draws_the_same_numbers():
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Dropout(0.4), nn.Conv2d(3, 3, 3), nn.Dropout2d(0.3), nn.Conv2d(3, 1, 3)
    )
    x = torch.randn(2, 1, 19, 23, dtype=torch.float64)

    def train(ranks, **options):
        def body(world):
            with ProcessGrid(world) as grid:
                model = ndt.distribute(copy.deepcopy(module).double(), x.shape, grid, **options)
                torch.manual_seed(3)
                y = model(model.scatter(x))
                y.square().sum().backward()
                return model.gather(y.detach()), [p.grad for p in model.parameters()]

        return loopback.run(ranks, body)[0]

    with share_captures():
        expected = train(1)
        for options in (
            {"scheme": "deep_halo(layers=3)"},
            {"strips": 4},
            {"strips": 4, "scheme": "deep_halo(layers=3)"},
        ):
            for ranks in (1, 4):
                torch.testing.assert_close(train(ranks, **options), expected, rtol=1e-10, atol=1e-10)


def test_strips_save_little_for_backward():
    def measure_saved_bytes(strips):
        sizes, shape = [], (1, 2, 128, 128)
        model = ndt.distribute(copy.deepcopy(CHAIN), shape, ProcessGrid.serial(), strips=strips)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(torch.randn(shape))
        return sum(sizes)

    assert measure_saved_bytes(16) < measure_saved_bytes(None) / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strips": 0}, "strips: expected an integer of at least 1, 'auto' or null, got 0"),
        ({"strips": "all"}, "strips: expected an integer .*, got the text 'all'"),
        ({"strips": True}, "strips: expected an integer .*, got True"),
        ({"scheme": "deep_halo(layers=0)"}, "layers"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ConfigError, match=message):
        plan_on(CHAIN, (1, 2, 24, 24), 1, **options)


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "message"),
    [
        (
            ResidualNet,
            (1, 3, 24, 24),
            "overlap_tile",
            r"conv2d\S* in module 'b' depends .*; give other modules another scheme",
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
def test_overlap_tile_rejects_dependent_windows(module, shape, scheme, message):
    with pytest.raises(ConfigError, match=message):
        plan_on(module(), shape, 2, scheme=scheme)
