"""References for the models of the zoo, computed by one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo import Entry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reference:
    """Results of one model in train mode in one process, which `distribute` has to reproduce on any grid.

    Attributes
    ----------
    x, dx : torch.Tensor
        The input and its gradient.
    outputs, output_gradients : list of torch.Tensor
        The tensors among the outputs, in the order of `tensors_of`, and the gradients that were sent back from them.
    gradients : dict of str to torch.Tensor
        The parameters' gradients, zeros for a parameter that takes no part.
    buffers : dict of str to torch.Tensor
        The running statistics afterwards.
    """

    x: torch.Tensor
    dx: torch.Tensor
    outputs: list[torch.Tensor]
    output_gradients: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def reference(entry: Entry, dtype: str = "float64", seed: int = 0, *, training: bool = True) -> Reference:
    """Return what one process computes, forward and backward, from `example` and gradients by `drawn_like`."""
    import torch

    module = deterministic(entry, dtype).train(training)
    x = example(entry, dtype, seed).requires_grad_()
    outputs = tensors_of(module(x))
    output_gradients = drawn_like(outputs, seed + 1)
    torch.autograd.backward(outputs, output_gradients)
    gradients = {
        name: torch.zeros_like(values) if values.grad is None else values.grad
        for name, values in module.named_parameters()
    }
    assert x.grad is not None
    return Reference(
        x.detach(), x.grad, [y.detach() for y in outputs], output_gradients, gradients, dict(module.named_buffers())
    )


def state_after(entry: Entry, steps: int = 5, dtype: str = "float64", seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the state of the module after some steps of `sgd`, each with an example of its own and `loss_of`."""
    module = deterministic(entry, dtype)
    optimizer = sgd(module)
    for step in range(steps):
        optimizer.zero_grad()
        outputs = tensors_of(module(example(entry, dtype, seed + step)))
        loss_of(outputs, drawn_like(outputs, seed + step + 1)).backward()
        optimizer.step()
    return module.state_dict()


def deterministic(entry: Entry, dtype: str = "float64") -> torch.nn.Module:
    """Return the module in train mode and without dropout, which a distributed model draws by other keys."""
    import torch

    module = entry.build().to(getattr(torch, dtype))
    part: Any
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0
        elif type(part).__name__ == "DropPath":
            part.drop_prob = 0.0
    return module


def example(entry: Entry, dtype: str = "float64", seed: int = 0) -> torch.Tensor:
    """Return an input of the entry's shape, the same in every dtype but for rounding."""
    import torch

    x = torch.empty(entry.example_shape, dtype=torch.float64)
    return drawn_like([x], seed)[0].to(getattr(torch, dtype))


def drawn_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return normally distributed values for each, drawn in float64."""
    import torch

    source = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=source, dtype=torch.float64).to(t.dtype) for t in tensors]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output, which some models pack into a dict."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(output)


def loss_of(outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error, added up over the outputs."""
    import torch

    return torch.stack([((y - t) ** 2).mean() for y, t in zip(outputs, targets, strict=True)]).sum()


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of `state_after`; with long steps, models with random weights are chaotic."""
    import torch

    return torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
