"""Border schemes of PyTorch modules against those of neondist layers, over several steps, forward and backward."""

import copy
import re
from functools import lru_cache, partial
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from case_selection import select_cases  # noqa: E402
from scheme_runs import SCHEMES  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import count_sent_bytes, share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import ConfigError  # noqa: E402
from neondist.torch.exchange.schemes import parse_schemes  # noqa: E402

NUM_STEPS = 5
NETS = {
    "images": (
        (2, 2, 13, 11),
        nn.Sequential(
            nn.Conv2d(2, 3, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2),
            nn.AvgPool2d(2, 1),
            nn.Conv2d(4, 2, (2, 4), padding="same"),
        ),
    ),
    "volumes": ((2, 1, 5, 6, 4), nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, (1, 2, 2)))),
}
CASES = [("images", (1, 3, 2)), ("images", (1, 4, 1)), ("volumes", (2, 1, 5))]
"""networks and grids (replicas, rows, cols); tiles of the last one are smaller than their halos, or empty"""
CAPTURED_PROGRAMS = {}


@lru_cache
def convert_to_layers(name):
    """Return a module in float64, and its conversion to neondist layers."""
    shape, module = NETS[name]
    module = copy.deepcopy(module).double()
    return module, ndt.from_torch(module, shape, model=nd.Convnet)


@pytest.mark.parametrize(
    ("case", "scheme"), select_cases(product(CASES, [name for name in SCHEMES if "backward" not in name]))
)
@pytest.mark.long
def test_schemes_match_layers(case, scheme):
    name, (replicas, rows, cols) = case
    shape, (module, layers_model) = NETS[name][0], convert_to_layers(name)
    rng = np.random.default_rng(1)
    images = [torch.from_numpy(rng.normal(size=shape)) for _ in range(NUM_STEPS)]
    gradients = [torch.from_numpy(rng.normal(size=module(images[0]).shape)) for _ in range(NUM_STEPS)]

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            model = ndt.distribute(copy.deepcopy(module), shape, ranks, dtype=torch.float64, scheme=scheme)
            layers = nd.ConvnetDist(
                [layer.distributed_counterpart() for layer in layers_model.layers], dtype="float64", scheme=scheme
            )
            layers.load_state(layers_model.state())
            layers.build(layers_model.input_shape, shape[0], ranks)
            for step in range(NUM_STEPS):
                training = step != NUM_STEPS - 2
                model.train(training)
                x = model.scatter(images[step]).requires_grad_()
                y = model(x)
                dy = model.tiling.local_part(gradients[step], model.programs.current.layouts_by_output[0])
                y.backward(dy)
                layers.step = step - (step == NUM_STEPS - 1)  # evaluation does not count as a step
                run = layers.forward(x.detach().movedim(1, -1).numpy(), training)
                expected = torch.from_numpy(run.output.copy()).movedim(-1, 1)
                dx = torch.from_numpy(run.backward(dy.movedim(1, -1).numpy())).movedim(-1, 1)
                torch.testing.assert_close(y.detach(), expected, rtol=1e-11, atol=1e-11)
                torch.testing.assert_close(x.grad, dx, rtol=1e-11, atol=1e-11)

    with share_captures(CAPTURED_PROGRAMS):
        loopback.run(replicas * rows * cols, body)


def run_distributed(scheme, dtype=torch.float32, **options):
    shape, module = NETS["images"]
    module = copy.deepcopy(module).to(dtype)

    def body(world):
        with ProcessGrid(world, rows=2, cols=2) as ranks:
            model = ndt.distribute(copy.deepcopy(module), shape, ranks, scheme=scheme, **options)
            y = model(model.scatter(torch.ones(shape, dtype=dtype)))
            y.sum().backward()
            schemes = [
                str(step.scheme and type(step.scheme).__name__) for step in model.plan.steps if step.is_window_view
            ]
            return schemes, count_sent_bytes(model), model.plan.traffic(ranks.rank)

    with share_captures(CAPTURED_PROGRAMS):
        return loopback.run(4, body)


def test_innermost_named_module_sets_the_scheme():
    for schemes, traffic, planned in run_distributed({"": "tower", "3": nd.schemes.HaloOneway(), "4": "halo"}):
        assert schemes == ["Tower", "Tower", "HaloOneway", "None", "Tower"]
        assert traffic == planned


@pytest.mark.parametrize("scheme", ["tower", "halo_oneway", "quantised(bits=8)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.long
def test_traffic_matches_plan(scheme, dtype):
    exact = run_distributed("halo", torch.float64)
    for (_, traffic, planned), (_, exact_traffic, _) in zip(run_distributed(scheme, dtype), exact, strict=True):
        assert traffic == planned
        assert sum(traffic.values()) < sum(exact_traffic.values())


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("tover", "unknown; did you mean 'tower'"),
        ({"7": "tower"}, "scheme: the module has no submodule named '7'"),
        ("halo(backward=gather)", "applies to neondist layers"),
    ],
)
def test_bad_schemes(scheme, message):
    with pytest.raises(ConfigError, match=message):
        run_distributed(scheme)


@pytest.mark.parametrize("scheme", ["stale(steps=2)", "every(j=3)", "quantised(bits=8, feedback=true)"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.long
def test_recomputed_segments_reuse_received_cells(scheme, forwards):
    """Also if another forward pass was run in between; no cells are sent again."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())]
    module, shape = nn.Sequential(*layers).double(), (2, 2, 9, 11)
    images = torch.randn(8, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def body(world, recompute):
        with ProcessGrid(world, rows=2, cols=2) as ranks:
            model = ndt.distribute(copy.deepcopy(module), shape, ranks, scheme=scheme, recompute=recompute)
            assert len(model.plan.recomputed_segments()) > 1 or not recompute
            optimizer, gradients = torch.optim.SGD(model.parameters(), 0.1), []
            for start in range(0, len(images), forwards):
                tiles = [model.scatter(x).requires_grad_() for x in images[start : start + forwards]]
                outputs = [model(tile) for tile in tiles]
                for y in reversed(outputs):
                    model.loss(torch.nn.functional.mse_loss, y, torch.zeros_like(y)).backward()
                gradients += [tile.grad for tile in tiles]
                optimizer.step()
                optimizer.zero_grad()
            return gradients, model.comm.bytes_sent, sum(model.plan.traffic(ranks.rank).values())

    with share_captures(CAPTURED_PROGRAMS):
        stored, recomputed = (loopback.run(4, partial(body, recompute=recompute)) for recompute in (False, True))
    for (expected, *sent), (actual, *sent_again) in zip(stored, recomputed, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
        assert sent == sent_again


def test_mode_set_by_the_module_itself():
    """Evaluation passes exchange the current cells, also after `eval` of the original module."""
    images = torch.randn(3, 1, 1, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def body(world):
        with ProcessGrid(world) as grid:
            module = nn.Conv2d(1, 1, 3, padding=1).double()
            model = ndt.distribute(module, (1, 1, 8, 5), grid, scheme="stale")
            for mode in (True, False, True):
                module.train(mode)
                assert model.training is mode
                with torch.no_grad():
                    outputs = [(model.gather(model(model.scatter(x))), module(x)) for x in images]
                errors = [(y - expected).abs().max().item() for y, expected in outputs]
                assert (max(errors) > 0.01) is mode, errors

    loopback.run(2, body)


@pytest.mark.filterwarnings("ignore:an output of a distributed module")
@pytest.mark.parametrize("scheme", ["stale", "every(j=2)", "quantised(feedback=true)"])
def test_stateful_schemes_reject_checkpoint(scheme):
    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(nn.Conv2d(1, 1, 3, padding=1), (1, 1, 6, 5), grid, scheme=scheme)
            for use_checkpoint in (False, True):
                tile = model.scatter(torch.ones(1, 1, 6, 5))
                y = checkpoint(model, tile, use_reentrant=False) if use_checkpoint else model(tile)
                y.sum().backward()

    with pytest.raises(ConfigError, match=r"scheme: .* keeps state, so torch\.utils\.checkpoint cannot"):
        loopback.run(2, body)


@pytest.mark.filterwarnings("ignore:an output of a distributed module")
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["checkpoint", "recompute"])
def test_quantised_cells_can_be_recomputed(options):
    torch.manual_seed(0)
    original = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1)).double()
    image = torch.randn(1, 1, 7, 6, dtype=torch.float64)

    def body(world):
        gradients = []
        with ProcessGrid(world) as grid:
            for recomputed in (False, True):
                module = copy.deepcopy(original)
                given = options if recomputed else {}
                model = ndt.distribute(module, image.shape, grid, scheme="quantised", **given)
                tile = model.scatter(image)
                by_checkpoint = recomputed and not options
                y = checkpoint(model, tile, use_reentrant=False) if by_checkpoint else model(tile)
                y.square().sum().backward()
                gradients.append([p.grad for p in module.parameters()])
        return gradients

    for plain, recomputed in loopback.run(2, body):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-14)


def test_schemes_in_docstring():
    quoted = re.findall(r"'(\w+\(.*?\))'", ndt.distribute.__doc__)
    assert len(quoted) > 1
    for scheme in quoted:
        parse_schemes(scheme, {""})
