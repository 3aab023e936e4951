"""Convolutions of inputs in any memory format, without the calls that crash PyTorch on some processors.

These are backward passes of strided 1 x 1 kernels in channels-last memory (PyTorch 2.13). All cases run in a
subprocess, which a crash would terminate.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

NUM_CASES = 10
MEMORY_LAYOUTS = {
    "contiguous": lambda make, shape: make(shape),
    "movedim": lambda make, shape: make((shape[0], *shape[2:], shape[1])).movedim(-1, 1),
    "permute": lambda make, shape: make(shape[::-1]).permute(*reversed(range(len(shape)))),
    "expand": lambda make, shape: make((*shape[:2], *[1] * (len(shape) - 2))).expand(shape),
    "slice": lambda make, shape: make((shape[0], *(2 * n for n in shape[2:]), shape[1])).movedim(-1, 1)[
        (slice(None), slice(None), *[slice(1, None, 2)] * (len(shape) - 2))
    ],
}


class OneCellConvolutions(TorchDispatchMode):
    """Collect the names of channels-last strided 1 x 1 convolutions that reach PyTorch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in (name := str(func)):
            backward = "backward" in name
            *_, x, weight = [arg for arg in args[: 3 if backward else 2] if isinstance(arg, torch.Tensor)]
            strides = args[4 if backward or "mkldnn" in name else 3]
            affected = not x.is_contiguous() or "mkldnn" in name
            if set(weight.shape[2:]) == {1} and max(strides) > 1 and affected:
                self.names.append(name)
        return func(*args, **(kwargs or {}))


def draw_case(rng):
    """Draw a convolution, transposed or not, the memory format and shape of its input, and a grid."""
    n = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 2, 8]))
    transposed = bool(rng.random() < 0.3)
    kernel = tuple(map(int, rng.choice([1, 1, 1, 3], n))) if rng.random() < 0.3 else (1,) * n
    stride = tuple(map(int, rng.integers(1, 4, n)))
    padding = tuple(int(rng.integers(0, 2)) for _ in kernel)
    options = {"stride": stride, "padding": padding, "groups": groups, "bias": bool(rng.random() < 0.5)}
    if transposed:
        options["output_padding"] = tuple(int(rng.integers(0, s)) for s in stride)
    extents = tuple(map(int, rng.integers(4, 10, n)))
    dtype = [torch.float32, torch.float64][int(rng.integers(2))]
    memory = list(MEMORY_LAYOUTS)[int(rng.integers(len(MEMORY_LAYOUTS)))]
    rows = int(rng.integers(1, 4))
    kind = f"Conv{'Transpose' if transposed else ''}{n}d"
    return kind, (8, 16, kernel), options, (2, 8, *extents), memory, dtype, rows


def compute_reference(module, x):
    """Compute the convolution in float64 as a sum of products over the kernel of the padded or dilated input."""
    n, weight = x.dim() - 2, module.weight.double()
    s, p, k, g = module.stride, module.padding, module.kernel_size, module.groups
    x = x.double()
    if isinstance(module, torch.nn.modules.conv._ConvTransposeNd):
        dilated = x.new_zeros((*x.shape[:2], *((m - 1) * t + 1 for m, t in zip(x.shape[2:], s, strict=True))))
        dilated[(..., *(slice(None, None, t) for t in s))] = x
        padding = [
            (kk - 1 - pp, kk - 1 - pp + extra) for kk, pp, extra in zip(k, p, module.output_padding, strict=True)
        ]
        x = F.pad(dilated, [end for pair in reversed(padding) for end in pair])
        weight = weight.flip(list(range(2, n + 2))).unflatten(0, (g, -1)).transpose(1, 2).flatten(0, 1)
        s = (1,) * n
    else:
        x = F.pad(x, [pp for pp in reversed(p) for _ in range(2)])
    for dim, (kk, t) in enumerate(zip(k, s, strict=True)):
        x = x.unfold(dim + 2, kk, t)  # (N, C, *out, *kernel)
    x, weight = x.unflatten(1, (g, -1)), weight.unflatten(0, (g, -1))
    cells = "uvw"[:n], "xyz"[:n]
    y = torch.einsum(f"ngc{cells[0]}{cells[1]},goc{cells[1]}->ngo{cells[0]}", x, weight).flatten(1, 2)
    return y if module.bias is None else y + module.bias.double().view(-1, *[1] * n)


def check(kind, sizes, options, shape, memory, dtype, rows):
    """Assert that outputs and gradients on several ranks match `reference`."""

    def make(shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)

    torch.manual_seed(1)
    serial_module = getattr(torch.nn, kind)(*sizes, **options).to(dtype)
    x = MEMORY_LAYOUTS[memory](make, shape)
    image = x.detach().requires_grad_()
    y = compute_reference(serial_module, image)
    target = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    expected = torch.autograd.grad((y * target).sum(), [image, *serial_module.parameters()])

    def body(world):
        with nd.ProcessGrid(world, rows=rows if len(shape) > 3 else 1, cols=1 if len(shape) > 3 else rows) as grid:
            module = getattr(torch.nn, kind)(*sizes, **options).to(dtype)
            module.load_state_dict(serial_module.state_dict())
            model = ndt.distribute(module, shape, grid, dtype=dtype)
            tile = model.scatter(x).requires_grad_()
            with OneCellConvolutions() as mode:
                output = model(tile)
                loss = model.loss(lambda a, b: (a * b).sum() / len(a), output, model.scatter_target(target))
                (loss * len(target)).backward()
            return model.gather(output), [p.grad for p in module.parameters()], mode.names

    tolerance = {"rtol": 0, "atol": 1e-3 if dtype == torch.float32 else 1e-9}
    with share_captures():
        results = loopback.run(rows, body)
    for output, gradients, names in results:
        assert not names, names
        if output is not None:
            torch.testing.assert_close(output.double(), y.double(), **tolerance)
        for gradient, expected_gradient in zip(gradients, expected[1:], strict=True):
            torch.testing.assert_close(gradient.double(), expected_gradient.double(), **tolerance)


def check_all(seed):
    """Check all cases of a seed, printing each first so that a crash can be attributed."""
    rng = np.random.default_rng(seed)
    for number in range(NUM_CASES):
        case = draw_case(rng)
        print(number, case, flush=True)
        check(*case)
    check_autocast()
    check_layers()


def check_autocast():
    """Check that such calls are avoided under autocast too, where no compiled kernels apply."""
    for kind, extents in (("Conv2d", (8, 6)), ("Conv3d", (6, 6, 6))):
        module = getattr(torch.nn, kind)(8, 16, 1, stride=2)
        x = MEMORY_LAYOUTS["movedim"](torch.ones, (2, 8, *extents))

        def body(world, module=module, x=x):
            with nd.ProcessGrid(world, rows=2) as grid, torch.autocast("cpu", torch.bfloat16):
                model = ndt.distribute(module, x.shape, grid)
                with OneCellConvolutions() as mode:
                    model(model.scatter(x).requires_grad_()).float().sum().backward()
                return mode.names

        with share_captures():
            assert loopback.run(2, body) == [[], []]


def check_layers():
    """Check that neondist layers on the torch backend avoid such calls too."""
    for shape in ((9, 8, 16), (5, 6, 7, 16)):
        layer = nd.ConvLayer(16, kernel_size=1, stride=2, padding=1)
        model = nd.Convnet([layer, nd.AvgPoolingLayer(1, stride=2), nd.FCLayer(3)], backend="torch")
        model.build(shape, 2)
        with OneCellConvolutions() as mode:
            model.train_batch(np.ones((2, *shape), np.float32), np.zeros(2, np.int64))
        assert not mode.names, (shape, mode.names)


@pytest.mark.parametrize("threads", [2])
@pytest.mark.long
def test_convolutions_of_strided_inputs(threads):
    file = Path(__file__)
    paths = [str(file.parent), str(file.parents[2] / "helpers"), str(file.parents[3])]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", "import test_strided_inputs as t; t.check_all(0)"]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, (process.returncode, process.stdout.splitlines()[-1:], process.stderr[-2000:])
