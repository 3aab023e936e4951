"""Losses of PyTorch over tiles: their values and gradients are those of one process, for all that they can be given."""

import os
import random

import pytest

torch = pytest.importorskip("torch")

import losses  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import captured_once, distributed, serial  # noqa: E402

TABLE = losses.table()
PLACES = (
    # cells, samples, (replicas, rows, cols), planes
    ((5, 4), 2, (1, 1, 2), 1), ((5, 4), 2, (1, 2, 2), 1), ((5, 3), 2, (1, 3, 1), 1), ((4, 5), 3, (2, 1, 2), 1),
    ((3, 4, 5), 3, (1, 1, 1), 2), ((2, 1), 4, (3, 1, 1), 1), ((1, 2), 1, (1, 3, 2), 1),
)  # fmt: skip
"""some with samples or tiles that are uneven, or ranks without cells"""
leaves = torch.utils._pytree.tree_leaves
HOLES = "some", "a tile", "all"
SEED = int(os.environ["NEONDIST_SEED"])
CHOSEN = 7
"""losses are tried at each place, in one module; other seeds choose others"""


class Losses(nn.Module):
    """The losses of some names, of logits that a convolution makes."""

    def __init__(self, names, spatial):
        super().__init__()
        self.names, kind = names, {2: nn.Conv2d, 3: nn.Conv3d}[spatial]
        self.losses = [TABLE[name] for name in names]  # a forward that names TABLE has all of it watched
        self.logits = kind(losses.CLASSES, losses.CLASSES, 1)

    def extra_repr(self):
        """Return what tells it from others."""
        return repr(self.names)

    def forward(self, x, target, labels):
        """Return all losses."""
        y = self.logits(x)
        return tuple(loss(y, target, labels) for loss in self.losses)


def given(cells, samples, holes):
    """Return logits, targets and labels, some of which are -1."""
    drawn = torch.Generator().manual_seed(3)
    x, target = (torch.randn(samples, losses.CLASSES, *cells, generator=drawn, dtype=torch.float64) for _ in "xt")
    labels = torch.randint(0, losses.CLASSES, (samples, 1, *cells), generator=drawn).double()
    if holes == "some":
        labels[torch.rand(labels.shape, generator=drawn) < 0.4] = -1
    elif holes == "a tile":
        labels[..., : (cells[-1] + 1) // 2], labels[:, :, : (cells[0] + 1) // 2] = -1, -1
    else:
        labels[:] = -1
    return x, target, labels


def assert_equal(names, cells, samples, grid, planes, holes):
    torch.manual_seed(7)
    module, inputs = Losses(names, len(cells)).double(), given(cells, samples, holes)
    right = serial(module, inputs)
    with captured_once():
        found = distributed(module, inputs, right["gradients"], grid, planes=planes)
    for one in found:
        for name, loss, expected in zip(names, one["outputs"], right["outputs"], strict=True):
            assert same(loss, expected), f"{name}: {loss.flatten()[:3]} for {expected.flatten()[:3]}"
        for kind in ("inputs", "parameters"):
            pairs = zip(leaves(one[kind]), leaves(right[kind]), strict=True)
            assert all(same(gradient, expected) for gradient, expected in pairs), f"gradients of {kind}"


def same(found, expected):
    if found is None or expected is None:
        return found is expected
    close = torch.allclose(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    return found.shape == expected.shape and close


@pytest.mark.parametrize("at", range(len(PLACES)))
@pytest.mark.long
def test_losses_are_those_of_one_process(at):
    chosen = random.Random(f"losses {SEED} {at}").sample(sorted(TABLE), CHOSEN)
    assert_equal(chosen, *PLACES[at], HOLES[at % len(HOLES)])


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.long
def test_classes_beyond_the_weights_may_be_ignored(holes):
    wanted = ", weights, 255", ", weights, 1000000"
    beyond = [name for name in TABLE if "mean, images" in name and any(word in name for word in wanted)]
    assert len(beyond) == 8
    assert_equal(beyond, *PLACES[1], holes)


def test_the_weight_of_l1_loss():
    """PyTorch tells it nobody that overrides its functions."""
    assert_equal([name for name in TABLE if "l1_loss, weight" in name and "images" in name], *PLACES[0], "some")


def test_a_negative_variance_gives_no_number():
    from neondist.torch.rules.loss import gaussian_nll

    y, variance = torch.zeros(2, 3), torch.tensor([[1.0, -1, 0], [1, 1, 1]])
    assert gaussian_nll(y, y, variance, reduction="none").isnan().tolist() == [[False, True, False], [False] * 3]
    with pytest.raises(ValueError, match="does not fit"):
        gaussian_nll(y, y, torch.ones(3))
