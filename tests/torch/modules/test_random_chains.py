"""Random chains of PyTorch modules, converted to neondist models: exact, or rejected."""

import os
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_conversion import check_conversion  # noqa: E402

import neondist.torch as ndt  # noqa: E402

NUMBER_OF_CHAINS = 10


def draw_chain(seed):
    """Draw a chain of modules that PyTorch accepts, and the shape of its input."""
    rng = random.Random(seed)
    axes = rng.choice([1, 2, 2, 3])
    shape = (2, rng.choice([2, 4]), *(rng.randint(5, 14 if axes < 3 else 8) for _ in range(axes)))

    def draw_per_axis(*choices):
        return tuple(rng.choice(choices) for _ in range(axes))

    def find_class(name):
        return getattr(nn, f"{name}{axes}d")

    def draw_conv(c):
        mode, groups = rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"]), rng.choice([1, 1, 2])
        options = {
            "dilation": draw_per_axis(1, 1, 2),
            "groups": groups,
            "bias": rng.random() < 0.7,
            "padding_mode": mode,
        }
        return find_class("Conv")(
            c, 4, draw_per_axis(1, 2, 3, 4), draw_per_axis(1, 1, 2, 3), draw_per_axis(0, 1, 2), **options
        )

    def draw_transposed(c):
        return find_class("ConvTranspose")(
            c,
            2,
            draw_per_axis(1, 2, 3),
            draw_per_axis(1, 2),
            draw_per_axis(0, 1),
            draw_per_axis(0, 0, 1),
            rng.choice([1, 2]),
        )

    def draw_pool(c):
        kernel = draw_per_axis(1, 2, 3, 4)
        options = {"padding": tuple(rng.randint(0, k // 2) for k in kernel), "ceil_mode": rng.random() < 0.5}
        if rng.random() < 0.5:
            return find_class("MaxPool")(kernel, draw_per_axis(1, 2, 3, 5), **options)
        return find_class("AvgPool")(kernel, draw_per_axis(1, 2, 3, 5), count_include_pad=rng.random() < 0.5, **options)

    kinds = [
        draw_conv, draw_conv, draw_transposed, draw_pool, draw_pool,
        lambda c: find_class("BatchNorm")(c), lambda c: nn.GroupNorm(2, c),
        lambda c: find_class("InstanceNorm")(c, affine=rng.random() < 0.5), lambda c: nn.ReLU(), lambda c: nn.Tanh(),
        lambda c: nn.Softmax(1), lambda c: nn.Upsample(scale_factor=draw_per_axis(1.0, 2.0, 2.0, 1.5)),
        lambda c: find_class("ConstantPad")([rng.randint(-1, 2) for _ in range(2 * axes)], 0.5),
        lambda c: find_class("AdaptiveAvgPool")(draw_per_axis(1, 2, None)),
        lambda c: find_class("AdaptiveMaxPool")(draw_per_axis(1, 3)),
    ]  # fmt: skip
    chain, x = [], torch.zeros(shape)
    while len(chain) < 4:
        module = rng.choice(kinds)(x.shape[1])
        try:
            y = module(x)
        except (RuntimeError, TypeError, ValueError):
            continue
        if y.numel() and y.numel() < 5000 and y[0, 0].numel() > 1:
            chain, x = [*chain, module], y
    if rng.random() < 0.5:
        chain += [nn.Flatten(), nn.Linear(x[0].numel(), 3)]
    return nn.Sequential(*chain), shape


@pytest.mark.long
def test_random_chains_are_exact_or_rejected():
    exact = 0
    for number in range(NUMBER_OF_CHAINS):
        seed = f"{os.environ['NEONDIST_SEED']} {number}"
        torch.manual_seed(number)
        module, shape = draw_chain(seed)
        try:
            check_conversion(module, shape)
        except ndt.UnsupportedOperator:
            continue
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {module} on {shape}") from error
        exact += 1
    assert exact > 4
