"""Random numbers of distributed torch modules: the same for every grid, or refused."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import Function, captured_once  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.run import Runner  # noqa: E402

IMAGES = (2, 3, 13, 11)


def outputs(module, images, grid):
    """Return what each virtual rank has of the whole output."""
    replicas, rows, cols = grid

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            model = ndt.distribute(copy.deepcopy(module), IMAGES, ranks)
            return model.gather(model(model.scatter(images)))

    with captured_once():
        return loopback.run(replicas * rows * cols, body)


def attention(x):
    """Cells, and vectors that are whole on all ranks, forget some of what they look at."""
    cells, vectors = x.flatten(2).mT, x.mean((2, 3))[:, None]
    found = F.scaled_dot_product_attention(cells, cells, cells, dropout_p=0.3).mT.unflatten(2, x.shape[2:])
    return found * F.scaled_dot_product_attention(vectors, vectors, vectors, dropout_p=0.3).mT[..., None]


def test_dropout_is_that_of_one_rank_on_every_grid(monkeypatch):
    """Grids have plans of other lengths, and a channel or a vector is whole on all ranks."""
    monkeypatch.setattr(
        Runner, "_drawn", lambda self, inputs: torch.tensor(12345)
    )  # virtual ranks share PyTorch's generator
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5)
    module = nn.Sequential(*parts, Function(attention), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)).double()
    images = torch.randn(IMAGES, dtype=torch.float64)
    (alone,) = outputs(module, images, (1, 1, 1))
    assert 0 < (alone == 0).sum() < alone.numel()
    for grid in ((1, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 2)):
        for found in outputs(module, images, grid):
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


REFUSED = {
    "whole numbers": lambda x: x + torch.randint(0, 5, (13, 11)),
    "an order": lambda x: x.mean((2, 3))[:, torch.randperm(3)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_each_rank_would_draw_for_itself_is_refused(name):
    module = Function(REFUSED[name])
    with pytest.raises(ndt.UnsupportedOperator, match=r"random|dropout"):
        outputs(module, torch.zeros(IMAGES), (1, 2, 1))
