"""Values and gradients of PyTorch's losses over tiles against a single process, for all their arguments."""

import os
import random

import pytest

torch = pytest.importorskip("torch")

import losses  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module, run_distributed, run_serial, share_captures  # noqa: E402

LOSS_BY_NAME = losses.list_losses()
CASES = (
    # cells, samples, (replicas, rows, cols), planes
    ((5, 4), 2, (1, 1, 2), 1), ((5, 4), 2, (1, 2, 2), 1), ((5, 3), 2, (1, 3, 1), 1), ((4, 5), 3, (2, 1, 2), 1),
    ((3, 4, 5), 3, (1, 1, 1), 2), ((2, 1), 4, (3, 1, 1), 1), ((1, 2), 1, (1, 3, 2), 1),
)  # fmt: skip
"""including uneven samples or tiles, and ranks without cells"""
leaves = torch.utils._pytree.tree_leaves
HOLE_KINDS = "some", "a tile", "all"
SEED = int(os.environ["NEONDIST_SEED"])
LOSSES_PER_CASE = 7
"""number of losses per case, in one module; drawn by seed"""


class Losses(nn.Module):
    """Named losses of the logits of a convolution."""

    def __init__(self, names, spatial):
        super().__init__()
        self.names, kind = names, {2: nn.Conv2d, 3: nn.Conv3d}[spatial]
        self.losses = [LOSS_BY_NAME[name] for name in names]  # all of LOSS_BY_NAME would be watched if forward used it
        self.logits = kind(losses.CLASSES, losses.CLASSES, 1)

    def extra_repr(self):
        """Return the names, which identify the module."""
        return repr(self.names)

    def forward(self, x, target, labels):
        """Return all losses."""
        y = self.logits(x)
        return tuple(loss(y, target, labels) for loss in self.losses)


def draw_inputs(cells, samples, holes):
    """Draw logits, targets and labels; labels are -1 in holes."""
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(samples, losses.CLASSES, *cells, generator=generator, dtype=torch.float64) for _ in "xt")
    labels = torch.randint(0, losses.CLASSES, (samples, 1, *cells), generator=generator).double()
    if holes == "some":
        labels[torch.rand(labels.shape, generator=generator) < 0.4] = -1
    elif holes == "a tile":
        labels[..., : (cells[-1] + 1) // 2], labels[:, :, : (cells[0] + 1) // 2] = -1, -1
    else:
        labels[:] = -1
    return x, target, labels


def check_losses(names, cells, samples, grid, planes, holes):
    torch.manual_seed(7)
    module, inputs = Losses(names, len(cells)).double(), draw_inputs(cells, samples, holes)
    reference = run_serial(module, inputs)
    with share_captures():
        results = run_distributed(module, inputs, reference["gradients"], grid, planes=planes)
    for result in results:
        for name, loss, expected in zip(names, result["outputs"], reference["outputs"], strict=True):
            assert is_equal(loss, expected), f"{name}: got {loss.flatten()[:3]}, expected {expected.flatten()[:3]}"
        for kind in ("inputs", "parameters"):
            pairs = zip(leaves(result[kind]), leaves(reference[kind]), strict=True)
            assert all(is_equal(gradient, expected) for gradient, expected in pairs), f"gradients of {kind}"


def is_equal(actual, expected):
    if actual is None or expected is None:
        return actual is expected
    close = torch.allclose(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    return actual.shape == expected.shape and close


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.long
def test_losses_match_single_process(case):
    names = random.Random(f"losses {SEED} {case}").sample(sorted(LOSS_BY_NAME), LOSSES_PER_CASE)
    check_losses(names, *CASES[case], HOLE_KINDS[case % len(HOLE_KINDS)])


@pytest.mark.parametrize("holes", HOLE_KINDS)
@pytest.mark.long
def test_ignored_classes_may_exceed_the_weights(holes):
    parts = ", weights, 255", ", weights, 1000000"
    names = [name for name in LOSS_BY_NAME if "mean, images" in name and any(part in name for part in parts)]
    assert len(names) == 8
    check_losses(names, *CASES[1], holes)


def test_weight_of_l1_loss():
    """PyTorch does not pass it to overrides of its functions."""
    check_losses([name for name in LOSS_BY_NAME if "l1_loss, weight" in name and "images" in name], *CASES[0], "some")


def compute_ctc_losses(x):
    """Return connectionist temporal classification losses for all options, of rows as frames and columns as classes."""
    y, targets = x.mean(1).transpose(0, 1).log_softmax(2), torch.tensor([[1, 2, 2], [4, 1, 3]])
    lengths, counts = torch.tensor([5, 4]), torch.tensor([3, 2])
    all_losses = [F.ctc_loss(y, targets, lengths, counts, 0, reduction) for reduction in losses.REDUCTIONS]
    flat = torch.tensor([1, 2, 2, 4, 1])
    return [
        *all_losses,
        F.ctc_loss(y, flat, (5, 4), (3, 2), zero_infinity=True),
        F.ctc_loss(y, targets, (1, 4), (3, 0), 5, zero_infinity=True),  # one frame is too short: the loss is infinite
        F.ctc_loss(y[:, 0], targets[0], lengths[0], counts[0]),
    ]


def test_ctc_loss():
    """PyTorch's own implementation reads the lengths."""
    check_module(FunctionModule(compute_ctc_losses), (2, 3, 5, 6), grids=((1, 1, 2), (1, 3, 1), (2, 1, 2)))


def test_negative_variance_gives_nan():
    from neondist.torch.rules.loss import traceable_gaussian_nll_loss

    y, variance = torch.zeros(2, 3), torch.tensor([[1.0, -1, 0], [1, 1, 1]])
    assert traceable_gaussian_nll_loss(y, y, variance, reduction="none").isnan().tolist() == [
        [False, True, False],
        [False] * 3,
    ]
    with pytest.raises(ValueError, match="does not fit"):
        traceable_gaussian_nll_loss(y, y, torch.ones(3))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, labels: F.hinge_embedding_loss(y, labels[:, None]),
        lambda y, labels: F.cosine_embedding_loss(y, 2 * y + 1, labels),
    ],
    ids=["hinge", "cosine"],
)
def test_trained_labels_of_replicated_losses_have_no_gradient(loss):
    """Their gradient is not planned either, which `run_distributed` compares with the bytes sent."""

    class TrainedLabels(nn.Module):
        def __init__(self):
            super().__init__()
            self.labels = nn.Parameter(torch.tensor([1.0, -1.0]))

        def forward(self, x):
            return loss(x.mean((2, 3)), self.labels)

    check_module(TrainedLabels(), (2, 3, 5, 4), grids=((1, 1, 2),))
