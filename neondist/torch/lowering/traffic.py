"""Traffic of some or all ranks in a pass of a distributed module, computed without communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from ...geometry import Atom, ViewTransfer
from ..exchange.ring import RingPlan
from ..ir.graph import ACCUMULATION_DTYPES, GRADIENTS, Step, TorchGraph, Value, supports_gradients
from ..ir.layout import Mesh, axes_of

TrafficKey = tuple[str, str, str]
"""(kind, step, direction): kind 'halo', 'redistribution', 'ring' or 'sum', and 'forward' or 'backward'."""


class RankSubset:
    """Some ranks of a mesh, for which quantities are computed at once, as arrays of shape (len(ranks),)."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks = mesh, np.asarray(ranks)
        self.places = np.unravel_index(self.ranks, mesh.parts)

    @classmethod
    def all(cls, mesh: Mesh) -> RankSubset:
        """Return all ranks of a mesh."""
        return cls(mesh, range(mesh.size))

    def extent_products(self, value: Value, dims: Iterable[int]) -> np.ndarray:
        """Return, for each rank, the product of the extents of its part of a value along `dims`.

        For a view, the extents on the plan's own rank are used.
        """
        if value.layout_or_none is None:
            return self.element_counts_by_rank(()) * prod(value.local[dim] for dim in dims)
        return self.element_counts_by_rank(atom for dim in dims for atom in value.layout[dim])

    def element_counts_by_rank(self, atoms: Iterable[Atom]) -> np.ndarray:
        """Return, for each rank, the product of its numbers of indices of some atoms."""
        lengths = np.ones(len(self.ranks), int)
        for atom in atoms:
            lengths *= atom.extent if atom.axis is None else np.diff(atom.bounds or ())[self.places[atom.axis]]
        return lengths

    def sent_and_received_cells(self, transfer: ViewTransfer) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of cells that each rank sends to and receives from other ranks in a separable transfer."""
        counts = np.ones((3, len(self.ranks)), int)
        for request in transfer.requests:
            parts = next((self.places[axis] for axis in request.axes), 0)
            counts *= np.array(request.sent_received_kept_counts)[:, parts].reshape(3, -1)
        sent, received, own = counts
        return sent - own, received - own

    def nbytes(self, value: Value, in_sum_dtype: bool = False) -> np.ndarray:
        """Return the bytes of the ranks' parts, in the dtype of sums over ranks if `in_sum_dtype`."""
        dtype = ACCUMULATION_DTYPES.get(value.dtype, value.dtype) if in_sum_dtype else value.dtype
        return self.extent_products(value, range(len(value.local))) * dtype.itemsize


def traffic_of(
    plan: TorchGraph, ranks: Sequence[int], trained: Collection[str] | None = None, inputs: bool = False
) -> dict[TrafficKey, np.ndarray]:
    """Return the bytes that ranks send, or contribute to sums, in a forward and a backward pass.

    Parameters
    ----------
    ranks : sequence of int
    trained : collection of str
        The parameters that require gradients; default: all.
    inputs : bool
        Whether the inputs require gradients.
    """
    trained = plan.parameters if trained is None else trained
    counter, accounts = _TrafficCounter(plan, RankSubset(plan.mesh, ranks)), dict[TrafficKey, np.ndarray]()

    def add(steps: Iterable[Step], direction: str) -> None:
        for step in steps:
            if (messages := counter.message_bytes(step, direction)) is not None:
                account = messages[0], step.name, direction
                accounts[account] = accounts.get(account, 0) + messages[1]

    given = [value for value in plan.inputs if inputs and plan.values[value].kind == "value"]
    back = BackwardSteps(plan, trained, [value for value in given if supports_gradients(plan.values[value].dtype)])
    add(plan.steps, "forward")
    add((step for step in reversed(plan.steps) if id(step) in back.communicating_step_ids), "backward")
    for segment in plan.recomputed_segments():
        if any(id(step) in back.backward_step_ids for step in segment.steps):
            add((step for step in segment.steps if step.scheme is None or not step.scheme.is_stateful), "forward")
    named = (plan.parameters.get(name) for name in trained)
    read, parts = {value for value in named if value in back.sources}, plan.partitioned_parameters()
    owned = [plan.values[parts[value].outputs[0]] for value in read & parts.keys()]
    accounts["sum", GRADIENTS, "backward"] = (
        counter.allreduce_bytes(plan.mesh.axes, [plan.values[value] for value in read - parts.keys()])
        + counter.allreduce_bytes(plan.mesh.axes & {0}, owned)
        + counter.allreduce_bytes(plan.mesh.axes - {0}, owned)  # the sums are gathered
    )
    return accounts


class _TrafficCounter:
    def __init__(self, plan: TorchGraph, ranks: RankSubset) -> None:
        self.plan, self.ranks = plan, ranks

    def message_bytes(self, step: Step, direction: str) -> tuple[str, np.ndarray] | None:
        """Return the kind and the bytes of a step's messages in a direction, or None if there are none."""
        values, forward = self.plan.values, direction == "forward"
        if step.transfer is not None and (forward or step.kind == "view"):
            return message_kind(step), self._transfer_bytes(step, direction)
        if step.kind == "norm":
            mean = values[step.outputs[1]]
            mean = replace(mean, dtype=torch.float64) if forward else mean
            return "sum", 2 * self.allreduce_bytes(step.kind_args[0].axes, [mean])
        if step.kind == "ring":
            return "ring", self._ring_bytes(step, direction)
        if step.kind in (("sum", "max") if forward else ("spread",)):
            return "sum", self.allreduce_bytes(step.axes, [values[step.inputs[0]]])
        return None

    def _transfer_bytes(self, step: Step, direction: str) -> np.ndarray:
        """Return the bytes that each rank sends in a step's transfer; for border schemes the mean over many steps."""
        transfer, value = step.transfer, self.plan.values[step.inputs[0]]
        assert transfer is not None
        moved = {request.dim for request in transfer.requests}
        others = self.ranks.extent_products(value, (dim for dim in range(len(value.local)) if dim not in moved))
        if step.scheme is None and transfer.is_separable:
            return self.ranks.sent_and_received_cells(transfer)[direction == "backward"] * others * value.dtype.itemsize
        sent, size = [], value.dtype.itemsize
        for rank, count in zip(self.ranks.ranks.tolist(), others.tolist(), strict=True):
            pieces = transfer.sends(rank) if direction == "forward" else transfer.receives(rank)
            numbers = [piece.source.size * count for piece in pieces if piece.peer != rank]
            if step.scheme is not None:
                size = 4 if value.dtype == torch.bfloat16 else size  # NumPy has no bfloat16, so it is sent as float32
                sent.append(round(step.scheme.mean_bytes(numbers, size, direction)))
            else:
                sent.append(sum(numbers) * size)
        return np.array(sent)

    def _ring_bytes(self, step: Step, direction: str) -> np.ndarray:
        """Return the bytes of keys and values, or of these and their gradients, that each rank sends around a ring."""
        _, *passed = (self.plan.values[value] for value in step.inputs[:3])
        keys = ring_keys_sent_by_rank(step.kind_args, direction)[self.ranks.ranks]
        nbytes = (
            self.ranks.extent_products(value, (dim for dim in range(len(value.local)) if dim != len(value.local) - 2))
            * value.dtype.itemsize
            for value in passed
        )
        return keys * sum(nbytes)

    def allreduce_bytes(self, axes: frozenset[int], values: Iterable[Value]) -> np.ndarray:
        """Return the bytes that each rank contributes to sums of values over axes."""
        total = np.zeros(len(self.ranks.ranks), int)
        for value in values:
            total += self.ranks.nbytes(value, in_sum_dtype=True)
        return len(self.plan.mesh.reduction_axes(axes)) * total


class BackwardSteps:
    """Steps of a backward pass.

    Parameters
    ----------
    plan : TorchGraph
    trained : collection of str
        The parameters that require gradients.
    inputs : iterable of int
        The inputs that require gradients.

    Attributes
    ----------
    values_requiring_grad : set of int
        Values that require a gradient.
    sources : set of int
        Values that the outputs depend on through steps of the backward pass.
    backward_step_ids : set of int
        Steps of the backward pass, by id().
    communicating_step_ids : set of int
        Those of `backward_step_ids` whose backward pass may communicate.
    """

    def __init__(self, plan: TorchGraph, trained: Collection[str], inputs: Iterable[int] = ()) -> None:
        self.values_requiring_grad = {*inputs, *(value for name, value in plan.parameters.items() if name in trained)}
        for step in plan.steps:
            required = {at for at, value in enumerate(step.inputs) if value in self.values_requiring_grad}
            sources = [required] * len(step.outputs) if step.blocks is None else step.blocks.differentiable_inputs
            for out, inputs in zip(step.outputs, sources, strict=True):
                if not required.isdisjoint(inputs) and plan.values[out].kind != "constant":
                    self.values_requiring_grad.add(out)
        self.sources = {out for out in plan.outputs if isinstance(out, int)}
        self.backward_step_ids, self.communicating_step_ids = set[int](), set[int]()
        for step in reversed(plan.steps):
            if any(out in self.sources and out in self.values_requiring_grad for out in step.outputs):
                self.sources.update(step.inputs)
                self.backward_step_ids.add(id(step))
                summed = step.inputs[:1] if step.kind == "norm" else step.inputs  # excluding a norm's weights
                if any(value in self.values_requiring_grad for value in summed):
                    self.communicating_step_ids.add(id(step))


def ring_keys_sent_by_rank(ring: RingPlan, direction: str) -> np.ndarray:
    """Return the number of keys, and in a backward pass of their gradients, that each rank sends: an array (size,)."""
    axes = sorted(axes_of([ring.keys]))
    length = RankSubset.all(ring.mesh).element_counts_by_rank(ring.keys)
    # move the axes of each ring to the end, in order
    ends = range(len(ring.mesh.parts) - len(axes), len(ring.mesh.parts))
    rings = np.moveaxis(length.reshape(ring.mesh.parts), axes, ends)
    shape = rings.shape
    rings = rings.reshape(*shape[: len(shape) - len(axes)], -1)
    keys = (1 + (direction == "backward")) * rings.sum(-1, keepdims=True) - np.roll(rings, -1, -1)
    return np.moveaxis(keys.reshape(shape), ends, axes).reshape(-1)


def message_kind(step: Step) -> str:
    """Return the ledger's kind for a step's messages."""
    return "halo" if step.kind == "view" else "redistribution"
