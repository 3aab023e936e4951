"""Plan of a rank's steps and messages in a pass of a distributed module; needs no communicator."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...halo import scheme_text
from ...terminal.console import counted
from ..ir.graph import IDENTITY_STEPS, Step, TorchGraph
from .traffic import RankSubset, TrafficKey, traffic_of

Traffic = dict[TrafficKey, int]
"""Bytes by (kind, step, direction)."""


PRODUCT_OPS = ("conv", "linear", "matmul", "mm.", "mm_", "mv.", "scaled_dot_product")
"""Substrings of names of operators that autocast runs in reduced precision."""


class TorchPlan(TorchGraph):
    """The steps of a rank, with their costs."""

    def under_autocast(self, dtype: torch.dtype) -> TorchPlan:
        """Return the plan of the same steps under autocast on CPUs, for cost estimates only.

        Products return this dtype, as do steps whose floating-point inputs all have it.
        """
        values, steps = list(self.values), list[Step]()
        for step in self.steps:
            float_inputs = [value for value in step.inputs if values[value].dtype.is_floating_point]
            num_cast = 1 if step.kind == "norm" else None  # its weights and returned moments are float32
            is_product = step.kind == "local" and any(name in step.op_name for name in PRODUCT_OPS)
            if is_product:
                step = replace(step, run=partial(_run_product_in_dtype, dtype, step.run))
            if is_product or (float_inputs and all(values[value].dtype == dtype for value in float_inputs[:num_cast])):
                for value in step.outputs[:num_cast]:
                    if values[value].dtype == torch.float32:
                        values[value] = replace(values[value], dtype=dtype)
            steps.append(step)
        return replace(self, values=values, steps=steps)

    def traffic(self, rank: int, trained: Collection[str] | None = None, inputs: bool = False) -> Traffic:
        """Return the bytes that a rank sends, or contributes to reductions, in a forward and a backward pass.

        Keys are (kind, step, direction), the first fields of the keys in `comm.ledger`.

        Parameters
        ----------
        trained : collection of str
            The parameters that require gradients; default: all.
        inputs : bool
            Whether the inputs require gradients.
        """
        return {a: int(n[0]) for a, n in traffic_of(self, [rank], trained, inputs).items() if n[0]}

    def bytes(self, rank: int) -> int:
        """Return the bytes of messages that a rank sends in a training step, excluding reductions."""
        return sum(count for (kind, _, _), count in self.traffic(rank).items() if kind != "sum")

    def reduction_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank contributes to reductions in a training step, by step name or 'gradients'."""
        bytes_by_step: Counter[str] = Counter()
        for (kind, name, _), count in self.traffic(rank).items():
            if kind == "sum":
                bytes_by_step[name] += count
        return dict(bytes_by_step)

    @property
    def runs_original_module(self) -> bool:
        """Whether the only rank runs the module itself instead of the steps.

        False if the steps save memory, or draw random numbers, which are equal on all grids only in a plan.
        """
        saves_memory = self.recompute or any(step.blocks is not None for step in self.steps)
        return self.mesh.size == 1 and self.seed_id is None and not saves_memory

    def memory(self, rank: int) -> int:
        """Return the bytes of all values that a rank computes in a forward pass, excluding parameters and inputs."""
        ranks = RankSubset(self.mesh, [rank])
        outputs = [self.values[out] for step in self.steps if step.kind not in IDENTITY_STEPS for out in step.outputs]
        return sum(int(ranks.nbytes(value)[0]) for value in outputs)

    def peak(self) -> tuple[int, str]:
        """Return this rank's peak of live bytes in a forward pass without gradients, and the step where it occurs.

        The peak excludes parameters and buffers. It includes the workspace of block-wise computation and, estimated as
        the size of their arrays, that of convolutions, interpolations and rings.
        """
        sizes = [value.nbytes for value in self.values]
        excluded_ids = {*self.parameters.values(), *self.buffers.values(), *self.inputs}
        live_bytes = self.bytes_of_inputs()
        peaks = [(live_bytes, "")]
        for step in self.steps:
            allocated = sum(sizes[v] for v in step.outputs if v not in excluded_ids)
            freed = sum(sizes[v] for v in step.freed_ids if v not in excluded_ids)
            live_bytes += allocated
            has_workspace = "conv" in step.op_name or "upsample" in step.op_name or step.kind == "ring"
            workspace = sum(sizes[v] for v in (*step.inputs, *step.outputs)) if has_workspace else 0
            workspace += 0 if step.blocks is None else step.blocks.peak_bytes()
            peaks.append((live_bytes + workspace, step.name))
            live_bytes -= freed
        return max(peaks)

    def bytes_of_inputs(self) -> int:
        """Return the bytes of this rank's parts of the inputs, excluding those that are parameters or constants."""
        return sum(self.values[value].nbytes for value in self.inputs if self.values[value].kind == "value")

    def describe(self) -> str:
        """Return a table of the bytes that this rank sends in a training step."""
        totals: dict[tuple[str, str], list[int]] = {}
        for (kind, name, direction), count in self.traffic(self.rank).items():
            totals.setdefault((name, kind), [0, 0])[direction == "backward"] += count
        lines = [f"{'step':58s} {'kind':14s} {'forward':>14s} {'backward':>14s}  (bytes)"]
        lines += [
            f"{name[-58:]:58s} {kind:14s} {sent:14,d} {back:14,d}" for (name, kind), (sent, back) in totals.items()
        ]
        reduced_bytes = sum(self.reduction_bytes(self.rank).values())
        lines.append(
            f"{counted(len(self.steps), 'step')}; in a training step rank {self.rank} sends"
            f" {self.bytes(self.rank):,d} bytes and"
            f" contributes {reduced_bytes:,d} to reductions"
        )
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """Hash that is equal on ranks with the same steps."""
        lines = [str(self.mesh.parts), str(self.recompute)]
        for step in self.steps:
            layouts = [self.values[out].layout_or_none for out in step.outputs]
            dtypes = [str(self.values[out].dtype) for out in step.outputs]
            moved = step.transfer.requests if step.transfer else ()
            scheme = "" if step.scheme is None else scheme_text(step.scheme)
            axes = sorted(step.axes)
            lines.append(repr((step.kind, step.name, step.inputs, step.outputs, axes, moved, layouts, dtypes, scheme)))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _run_product_in_dtype(dtype: torch.dtype, run: Any, *tensors: torch.Tensor) -> Any:
    return run(*(tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors))
