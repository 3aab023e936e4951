"""Plan of a rank's steps and messages in a pass of a distributed module; pure, needs no communicator."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..halo import scheme_text
from .graph import SAME, Step, TorchGraph
from .traffic import Account, Ranks, traffic_of

Traffic = dict[Account, int]
"""Bytes by account."""


PRODUCTS = ("conv", "linear", "matmul", "mm.", "mm_", "mv.", "scaled_dot_product")
"""In names of operators whose operands autocast makes narrow."""


class TorchPlan(TorchGraph):
    """The steps, and what they cost."""

    def under_autocast(self, dtype: torch.dtype) -> TorchPlan:
        """Return the plan of the same steps under autocast on CPUs, to count by; it is not run.

        Products give numbers of this dtype, and so does what is computed from such numbers alone.
        """
        values, steps = list(self.values), list[Step]()
        for step in self.steps:
            floats = [value for value in step.inputs if values[value].dtype.is_floating_point]
            first = 1 if step.kind == "norm" else None  # its weights, and the moments that it gives, are float32
            product = step.kind == "local" and any(name in step.op for name in PRODUCTS)
            if product:
                step = replace(step, run=partial(_run_in, dtype, step.run))
            if product or (floats and all(values[value].dtype == dtype for value in floats[:first])):
                for value in step.outputs[:first]:
                    if values[value].dtype == torch.float32:
                        values[value] = replace(values[value], dtype=dtype)
            steps.append(step)
        return replace(self, values=values, steps=steps)

    def traffic(self, rank: int, trained: Collection[str] | None = None, inputs: bool = False) -> Traffic:
        """Return the bytes that a rank sends, or gives into sums, in a forward and a backward pass.

        By kind, step and direction, as the ledger of `wires` records them.

        Parameters
        ----------
        trained : collection of str
            The parameters that require gradients; default: all.
        inputs : bool
            Whether the inputs do.
        """
        return {a: int(n[0]) for a, n in traffic_of(self, [rank], trained, inputs).items() if n[0]}

    def bytes(self, rank: int) -> int:
        """Return the bytes of messages that a rank sends in a training step, sums not counted."""
        return sum(count for (kind, _, _), count in self.traffic(rank).items() if kind != "sum")

    def reduced(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank gives into sums over ranks in a training step, by step, and of 'gradients'."""
        found: Counter[str] = Counter()
        for (kind, name, _), count in self.traffic(rank).items():
            if kind == "sum":
                found[name] += count
        return dict(found)

    def memory(self, rank: int) -> int:
        """Return the bytes of all values that a rank makes in a forward pass, parameters and inputs not counted."""
        ranks = Ranks(self.mesh, [rank])
        made = [self.values[out] for step in self.steps if step.kind not in SAME for out in step.outputs]
        return sum(int(ranks.nbytes(value)[0]) for value in made)

    def peak(self) -> tuple[int, str]:
        """Return the bytes that live at once in a pass of this rank without a way back, and the step where they do.

        Parameters and buffers are not counted; what convolutions, interpolations and rings take for a moment is: as
        much as their arrays have.
        """
        size = [value.nbytes for value in self.values]
        kept = {*self.parameters.values(), *self.buffers.values(), *self.inputs}
        live = sum(size[value] for value in self.inputs)
        found = [(live, "")]
        for step in self.steps:
            made, freed = (sum(size[v] for v in values if v not in kept) for values in (step.outputs, step.free))
            live += made
            takes = "conv" in step.op or "upsample" in step.op or step.kind == "ring"
            work = sum(size[v] for v in (*step.inputs, *step.outputs)) if takes else 0
            found.append((live + work, step.name))
            live -= freed
        return max(found)

    def describe(self) -> str:
        """Return a table of what this rank sends in a training step."""
        table: dict[tuple[str, str], list[int]] = {}
        for (kind, name, direction), count in self.traffic(self.rank).items():
            table.setdefault((name, kind), [0, 0])[direction == "backward"] += count
        lines = [f"{'step':58s} {'kind':14s} {'forward':>14s} {'backward':>14s}  (bytes)"]
        lines += [
            f"{name[-58:]:58s} {kind:14s} {there:14,d} {back:14,d}" for (name, kind), (there, back) in table.items()
        ]
        summed = sum(self.reduced(self.rank).values())
        lines.append(
            f"{len(self.steps)} steps; in a training step rank {self.rank} sends {self.bytes(self.rank):,d} bytes, and"
            f" gives {summed:,d} into sums"
        )
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """A hash that is equal on ranks that will run the same steps."""
        text = [str(self.mesh.parts), str(self.recompute)]
        for step in self.steps:
            layouts = [self.values[out].layout_or_none for out in step.outputs]
            dtypes = [str(self.values[out].dtype) for out in step.outputs]
            wants = step.transfer.wants if step.transfer else ()
            scheme = "" if step.scheme is None else scheme_text(step.scheme)
            axes = sorted(step.axes)
            text.append(repr((step.kind, step.name, step.inputs, step.outputs, axes, wants, layouts, dtypes, scheme)))
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _run_in(dtype: torch.dtype, run: Any, *tensors: torch.Tensor) -> Any:
    """Run a product, whose operands are of a dtype."""
    return run(*(tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors))
