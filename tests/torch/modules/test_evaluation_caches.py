"""Tensors that a module computes from its parameters and keeps in evaluation: computed anew in every pass."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

IMAGES = (2, 3, 9, 7)


class CachedBias(nn.Module):
    """Module that, in evaluation, keeps a tensor computed from a parameter and a buffer, as vision transformers do."""

    def __init__(self, change=lambda self, x: x):
        super().__init__()
        self.weight, self.change, self.cache = nn.Parameter(torch.tensor([1.0, -2.0])), change, {}
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.register_buffer("scale", torch.ones(3))

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)

    def forward(self, x):
        biases = {} if self.training else self.cache
        if "bias" not in biases:
            biases["bias"] = self.weight[self.index] * self.scale
        return self.change(self, x) * biases["bias"][:, None, None]


def test_caches_of_parameters_in_evaluation():
    image = torch.randn(IMAGES)

    def body(world):
        with nd.ProcessGrid(world, rows=world.size) as grid:
            module, results = CachedBias(), []
            model = ndt.distribute(module, IMAGES, grid)
            with torch.no_grad():
                for scale in 1, 3:
                    module.weight.copy_(torch.tensor([scale, -2.0]))
                    model.train()
                    model.eval()
                    results.append([model.gather(model(model.scatter(image))) for _ in range(2)])
            return results

    for scale, results in zip((1, 3), nd.loopback.run(2, body)[0], strict=True):
        for result in results:
            torch.testing.assert_close(result, image * torch.tensor([scale, -2.0, -2.0])[:, None, None])


def write_buffer(self, x):
    self.scale.add_(1)
    return x


def assign_buffer(self, x):
    self.scale = self.scale + 1
    return x


def accumulate(self, x):
    self.cache["sum"] = total = self.cache.get("sum", 0) + self.weight.sum()
    return x * total


def cache_mean(self, x):
    return x * self.cache.setdefault("mean", x.mean())


@pytest.mark.parametrize("change", [write_buffer, assign_buffer, accumulate, cache_mean])
def test_caches_of_changing_values_in_evaluation_are_rejected(change):
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match="the forward pass changes cache, which"):
        ndt.distribute(CachedBias(change).eval(), IMAGES, grid)
