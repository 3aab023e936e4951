"""Optimisers against torch.optim to 1e-12 in float64."""

import numpy as np
import pytest

from neondist.optim import SGD, Adam
from neondist.optim.flat import HOST_BLOCK_ELEMENTS

SIZE = HOST_BLOCK_ELEMENTS + 37  # more than one block, the last one partial


def run_neondist(optimizer, start, gradients, scales):
    params = start.copy()
    slots = optimizer.create_slots(params)
    for step, (grads, scale) in enumerate(zip(gradients, scales, strict=True)):
        optimizer.update(params, grads.copy(), slots, step, scale)
    return params


def run_torch(make, start, gradients, scales):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make(torch.optim, [p])
    rate = optimizer.param_groups[0]["lr"]
    for grads, scale in zip(gradients, scales, strict=True):
        optimizer.param_groups[0]["lr"] = rate * scale
        p.grad = torch.from_numpy(grads.copy())
        optimizer.step()
    return p.detach().numpy()


CASES = [
    (SGD(0.1), lambda o, p: o.SGD(p, lr=0.1)),
    (SGD(0.1, momentum=0.9), lambda o, p: o.SGD(p, lr=0.1, momentum=0.9)),
    (SGD(0.1, momentum=0.9, weight_decay=0.03), lambda o, p: o.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.03)),
    (SGD(0.1, weight_decay=0.03), lambda o, p: o.SGD(p, lr=0.1, weight_decay=0.03)),
    (
        SGD(0.1, momentum=0.8, weight_decay=0.03, nesterov=True),
        lambda o, p: o.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.03, nesterov=True),
    ),
    (Adam(), lambda o, p: o.Adam(p)),
    (
        Adam(0.02, beta1=0.7, beta2=0.95, eps=1e-4, weight_decay=0.1),
        lambda o, p: o.Adam(p, lr=0.02, betas=(0.7, 0.95), eps=1e-4, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("optimizer", "make_torch"), CASES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("scales", [[1.0] * 6, [1.0, 1.0, 0.5, 0.1, 0.1, 0.0]], ids=["constant", "scaled"])
def test_parameters_match_torch(optimizer, make_torch, scales):
    rng = np.random.default_rng(0)
    start = rng.normal(size=SIZE)
    gradients = [rng.normal(size=SIZE) for _ in scales]
    np.testing.assert_allclose(
        run_neondist(optimizer, start, gradients, scales),
        run_torch(make_torch, start, gradients, scales),
        rtol=1e-12,
        atol=1e-13,
    )
