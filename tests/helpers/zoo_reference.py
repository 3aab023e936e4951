"""Reference results of the models of the zoo on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo import ZooEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reference:
    """Results of a model in train mode on one process, which `distribute` must reproduce on any grid.

    Attributes
    ----------
    x, dx : torch.Tensor
        Input and its gradient.
    outputs, output_gradients : list of torch.Tensor
        Tensors of the output, in the order of `flatten_tensors`, and their gradients.
    gradients : dict of str to torch.Tensor
        Gradients of the parameters, zeros for unused ones.
    buffers : dict of str to torch.Tensor
        Final running statistics.
    """

    x: torch.Tensor
    dx: torch.Tensor
    outputs: list[torch.Tensor]
    output_gradients: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def compute_reference(entry: ZooEntry, dtype: str = "float64", seed: int = 0, *, training: bool = True) -> Reference:
    """Return the results of a forward and a backward pass with `draw_example` and random output gradients."""
    import torch

    module = build_deterministic(entry, dtype).train(training)
    x = draw_example(entry, dtype, seed).requires_grad_()
    outputs = flatten_tensors(module(x))
    output_gradients = draw_like(outputs, seed + 1)
    torch.autograd.backward(outputs, output_gradients)
    gradients = {
        name: torch.zeros_like(values) if values.grad is None else values.grad
        for name, values in module.named_parameters()
    }
    assert x.grad is not None
    return Reference(
        x.detach(), x.grad, [y.detach() for y in outputs], output_gradients, gradients, dict(module.named_buffers())
    )


def train_reference(entry: ZooEntry, steps: int = 5, dtype: str = "float64", seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the state of a module after some steps of SGD with different examples."""
    module = build_deterministic(entry, dtype)
    optimizer = make_sgd(module)
    for step in range(steps):
        optimizer.zero_grad()
        outputs = flatten_tensors(module(draw_example(entry, dtype, seed + step)))
        compute_loss(outputs, draw_like(outputs, seed + step + 1)).backward()
        optimizer.step()
    return module.state_dict()


def build_deterministic(entry: ZooEntry, dtype: str = "float64") -> torch.nn.Module:
    """Return the module in train mode without dropout, for which a distributed model uses other random numbers."""
    import torch

    module = entry.build().to(getattr(torch, dtype))
    part: Any
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0
        elif type(part).__name__ == "DropPath":
            part.drop_prob = 0.0
    return module


def draw_example(entry: ZooEntry, dtype: str = "float64", seed: int = 0) -> torch.Tensor:
    """Return a random input, equal in every dtype up to rounding."""
    import torch

    x = torch.empty(entry.example_shape, dtype=torch.float64)
    return draw_like([x], seed)[0].to(getattr(torch, dtype))


def draw_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return normally distributed tensors of the same shapes, drawn in float64."""
    import torch

    source = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=source, dtype=torch.float64).to(t.dtype) for t in tensors]


def flatten_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output, which may be a dictionary."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(output)


def compute_loss(outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the mean squared errors of all outputs."""
    import torch

    return torch.stack([((y - t) ** 2).mean() for y, t in zip(outputs, targets, strict=True)]).sum()


def make_sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return SGD with a small learning rate, because models with random weights diverge with a larger one."""
    import torch

    return torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
