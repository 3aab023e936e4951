"""Comparison of neondist models and PyTorch modules: outputs, gradients, running statistics."""

import copy

import numpy as np
import torch

import neondist as nd
import neondist.torch as ndt

TOLERANCE = 1e-11


def to_channels_last(x):
    """Return a channels-first tensor as a channels-last array."""
    return np.moveaxis(x.detach().numpy(), 1, -1)


def perturb_state(module):
    """Return the module in float64, with parameters and statistics moved away from their initial values."""
    module = module.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
    return module


def draw_tensor(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(actual, expected, label=""):
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * scale, err_msg=label)


def run_module(module, shape):
    """Return outputs and gradients of two training passes, the output of an evaluation pass, and the final state."""
    results = []
    for seed in range(2):
        x = draw_tensor(shape, seed).requires_grad_()
        module.train().zero_grad()
        y = module(x)
        y.backward(draw_tensor(y.shape, 9))
        results += [to_channels_last(y), to_channels_last(x.grad)]
    parameters = [parameter.grad.numpy() for parameter in module.parameters()]
    buffers = [buffer.numpy() for buffer in module.buffers() if buffer.is_floating_point()]
    return [*results, to_channels_last(module.eval()(x)), *parameters, *buffers]


def run_model(model, shape):
    """Return the results of `run_module` for a model, with gradients and statistics in a module's layout."""
    results = []
    for seed in range(2):
        run = model.forward(to_channels_last(draw_tensor(shape, seed)), training=True)
        dy = draw_tensor((shape[0], *np.moveaxis(run.output, -1, 1).shape[1:]), 9)
        results += [run.output, run.backward(to_channels_last(dy))]
    results.append(model.forward(to_channels_last(draw_tensor(shape, 1)), training=False).output)
    state = model.state()
    model.load_state(state | model.gradients())
    module = ndt.to_torch(model)
    model.load_state(state)
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return results + [tensor.detach().numpy() for tensor in (*module.parameters(), *buffers)]


def assert_all_close(actual, expected):
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, b, f"array {index} of {len(actual)}")


def convert_module(module, shape):
    return ndt.from_torch(module, shape, model=nd.Convnet if len(shape) > 2 else nd.MLP, dtype="float64")


def check_conversion(module, shape):
    """Convert a module to a model and back, compare both with the module, and return them."""
    module = perturb_state(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = convert_module(module, shape)
    restored = ndt.to_torch(model)
    expected = run_module(copy.deepcopy(module), shape)
    assert_all_close(run_model(model, shape), expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert_all_close(run_module(copy.deepcopy(restored), shape), expected)
    return model, restored
