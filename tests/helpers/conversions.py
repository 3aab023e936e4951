"""Models of ours and modules of PyTorch that should be the same: outputs, gradients, running statistics."""

import copy

import numpy as np
import torch

import neondist as nd
import neondist.torch as ndt

TOLERANCE = 1e-11


def last(x):
    """Return channels last, as an array."""
    return np.moveaxis(x.detach().numpy(), 1, -1)


def shaken(module):
    """Return the module in float64 with parameters and statistics that differ from their first values."""
    module = module.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
    return module


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected, what=""):
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale, err_msg=what)


def passes(module, shape):
    """Return what a module gives: two passes of training, their statistics, and a pass of evaluation."""
    found = []
    for seed in range(2):
        x = drawn(shape, seed).requires_grad_()
        module.train().zero_grad()
        y = module(x)
        y.backward(drawn(y.shape, 9))
        found += [last(y), last(x.grad)]
    parameters = [parameter.grad.numpy() for parameter in module.parameters()]
    buffers = [buffer.numpy() for buffer in module.buffers() if buffer.is_floating_point()]
    return [*found, last(module.eval()(x)), *parameters, *buffers]


def passes_of_ours(model, shape):
    """Return the same of a model; gradients and statistics as a module has them."""
    found = []
    for seed in range(2):
        run = model.forward(last(drawn(shape, seed)), training=True)
        dy = drawn((shape[0], *np.moveaxis(run.output, -1, 1).shape[1:]), 9)
        found += [run.output, run.backward(last(dy))]
    found.append(model.forward(last(drawn(shape, 1)), training=False).output)
    kept = model.state()
    model.load_state(kept | model.gradients())
    module = ndt.to_torch(model)
    model.load_state(kept)
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return found + [tensor.detach().numpy() for tensor in (*module.parameters(), *buffers)]


def check_alike(found, expected):
    assert len(found) == len(expected)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        close(one, other, f"number {at} of {len(found)}")


def serial(module, shape):
    return ndt.from_torch(module, shape, model=nd.Convnet if len(shape) > 2 else nd.MLP, dtype="float64")


def converted(module, shape):
    """Return the module's twin of ours, which has been compared with it, and what that comes to as a module."""
    module = shaken(module)
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = serial(module, shape)
    again = ndt.to_torch(model)
    expected = passes(copy.deepcopy(module), shape)
    check_alike(passes_of_ours(model, shape), expected)
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.state_dict().items())
    check_alike(passes(copy.deepcopy(again), shape), expected)
    return model, again
