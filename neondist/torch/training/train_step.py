"""A training step of a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...arrays.precision import ComputePrecision
from ...models import TrainStep
from ...runtime.observers.nonfinite import first_nonfinite_on_any_rank
from ..ir.registry import TRACING_LOCK


@contextmanager
def compute_in_precision(precision: ComputePrecision, module: nn.Module) -> Iterator[None]:
    """Context in which PyTorch computes in a precision, by autocast or with TF32 operands, on a module's device."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    dtype = getattr(torch, precision.name) if precision.has_16_bit_operands else None
    with torch.autocast(device, dtype, enabled=precision.has_16_bit_operands), ExitStack() as stack:
        if device == "cuda":
            backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
            for switches in backends:
                stack.callback(setattr, switches, "allow_tf32", switches.allow_tf32)
                switches.allow_tf32 = precision.name == "tf32"
        yield


class ModuleStep(TrainStep):
    """Training step of a TorchModel."""

    trainable: Any  # TorchModel; importing it here would be circular

    def save_for_rollback(self) -> Callable[[], None]:
        """Save the buffers, and the parameters that a forward pass writes; return a function that restores them."""
        module = self.trainable.module
        mutated_names = self.trainable.compiled.steps.mutated_tensors
        parameters = module.named_parameters(remove_duplicate=False)
        tensors = [*module.buffers(), *(parameter for name, parameter in parameters if name in mutated_names)]
        saved_values = [tensor.detach().clone() for tensor in tensors]

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, saved_values, strict=True):
                    tensor.copy_(value)

        return restore

    def compute_gradients(self, x: Any, targets: Any, batch_size: int) -> tuple[float, bool]:
        """Run a forward and backward pass, and synchronise the gradients."""
        trainable, parameters = self.trainable, self.trainable.built_parameters
        parameters.reset_gradients()
        with trainable.grid.observers.observe("cost"):
            _, loss = trainable.compute_loss(x, targets, batch_size)
            self.is_loss_finite = bool(loss.isfinite())
            parameters.sync.record_finiteness(self.is_loss_finite)
            (loss * self.loss_scale).backward()
        parameters.sum_gradients(to_owners=True, loss_scale=self.loss_scale)
        return parameters.fetch_loss_and_flags(loss.detach().numpy().reshape(1))

    def describe_first_nonfinite(self, x: Any, targets: Any, batch_size: int) -> str:
        """Describe the first non-finite value on any rank: the loss, a gradient or a sum of gradients. Collective."""
        nonfinite_by_name = {"the loss": not self.is_loss_finite}
        for name, tensor in self.trainable.built_parameters.tensors.items():
            nonfinite_by_name[f"the gradient of '{name}'"] = (
                tensor.grad is not None and not tensor.grad.isfinite().all()
            )
        first_name = first_nonfinite_on_any_rank(self.trainable.grid.world, nonfinite_by_name)
        return first_name or "the sum of the gradients over all ranks"

    def update_parameters(self) -> None:
        """Update the parameters that this rank owns, and receive the others from their owners."""
        # optimisers behave differently while another thread traces
        with self.trainable.built_parameters.optimizer_update(), TRACING_LOCK:
            self.trainable.apply_scheduled_rates()
            self.trainable.torch_optimizer.step()
