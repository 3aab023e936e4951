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
        counts = np.ones(len(self.ranks), int)
        for atom in atoms:
            counts *= atom.extent if atom.axis is None else np.diff(atom.bounds or ())[self.places[atom.axis]]
        return counts

    def sent_and_received_cells(self, transfer: ViewTransfer) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of cells that each rank sends to and receives from other ranks in a separable transfer."""
        counts = np.ones((3, len(self.ranks)), int)
        for request in transfer.requests:
            parts = next((self.places[axis] for axis in request.axes), 0)
            counts *= np.array(request.sent_received_kept_counts)[:, parts].reshape(3, -1)
        sent, received, kept = counts
        return sent - kept, received - kept

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
    counter, bytes_by_key = _TrafficCounter(plan, RankSubset(plan.mesh, ranks)), dict[TrafficKey, np.ndarray]()

    def count(steps: Iterable[Step], direction: str) -> None:
        for step in steps:
            if (messages := counter.message_bytes(step, direction)) is not None:
                key = messages[0], step.name, direction
                bytes_by_key[key] = bytes_by_key.get(key, 0) + messages[1]

    input_ids = [v for v in plan.inputs if inputs and plan.values[v].kind == "value"]
    backward = BackwardSteps(plan, trained, [v for v in input_ids if supports_gradients(plan.values[v].dtype)])
    count(plan.steps, "forward")
    count((step for step in reversed(plan.steps) if id(step) in backward.communicating_step_ids), "backward")
    for segment in plan.recomputed_segments():
        if any(id(step) in backward.backward_step_ids for step in segment.steps):
            count((step for step in segment.steps if step.scheme is None or not step.scheme.is_stateful), "forward")
    trained_ids = (plan.parameters.get(name) for name in trained)
    read_ids = {value for value in trained_ids if value in backward.contributing_values}
    part_steps = plan.partitioned_parameters()
    own_parts = [plan.values[part_steps[value].outputs[0]] for value in read_ids & part_steps.keys()]
    bytes_by_key["sum", GRADIENTS, "backward"] = (
        counter.allreduce_bytes(plan.mesh.axes, [plan.values[value] for value in read_ids - part_steps.keys()])
        + counter.allreduce_bytes(plan.mesh.axes & {0}, own_parts)
        + sum(counter.ranks.nbytes(part) for part in own_parts)  # the sums are gathered
    )
    return bytes_by_key


class _TrafficCounter:
    def __init__(self, plan: TorchGraph, ranks: RankSubset) -> None:
        self.plan, self.ranks = plan, ranks

    def message_bytes(self, step: Step, direction: str) -> tuple[str, np.ndarray] | None:
        """Return the kind and the bytes of a step's messages in a direction, or None if there are none."""
        values, is_forward = self.plan.values, direction == "forward"
        if step.transfer is not None and (is_forward or step.kind == "view"):
            return message_kind(step), self._transfer_bytes(step, direction)
        if step.kind == "norm":
            mean = values[step.outputs[1]]
            mean = replace(mean, dtype=torch.float64) if is_forward else mean
            return "sum", 2 * self.allreduce_bytes(step.kind_args[0].axes, [mean])
        if step.kind == "ring":
            return "ring", self._ring_bytes(step, direction)
        if step.kind in (("sum", "max") if is_forward else ("spread",)):
            return "sum", self.allreduce_bytes(step.axes, [values[step.inputs[0]]])
        return None

    def _transfer_bytes(self, step: Step, direction: str) -> np.ndarray:
        """Return the bytes that each rank sends in a step's transfer; for border schemes the mean over many steps."""
        transfer, value = step.transfer, self.plan.values[step.inputs[0]]
        assert transfer is not None
        size = value.dtype.itemsize
        sent_dims = {request.dim for request in transfer.requests}
        extents = self.ranks.extent_products(value, (dim for dim in range(len(value.local)) if dim not in sent_dims))
        if step.scheme is None and transfer.is_separable:
            return self.ranks.sent_and_received_cells(transfer)[direction == "backward"] * extents * size
        sent_bytes = list[int]()
        for rank, extent in zip(self.ranks.ranks.tolist(), extents.tolist(), strict=True):
            pieces = transfer.sends(rank) if direction == "forward" else transfer.receives(rank)
            counts = [piece.source.size * extent for piece in pieces if piece.peer != rank]
            if step.scheme is not None:
                size = 4 if value.dtype == torch.bfloat16 else size  # NumPy has no bfloat16, so it is sent as float32
                sent_bytes.append(round(step.scheme.mean_bytes(counts, size, direction)))
            else:
                sent_bytes.append(sum(counts) * size)
        return np.array(sent_bytes)

    def _ring_bytes(self, step: Step, direction: str) -> np.ndarray:
        """Return the bytes of keys and values, or of these and their gradients, that each rank sends around a ring."""
        _, *keys_and_values = (self.plan.values[value] for value in step.inputs[:3])
        key_counts = ring_keys_sent_by_rank(step.kind_args, direction)[self.ranks.ranks]
        bytes_per_key = (
            self.ranks.extent_products(value, (dim for dim in range(len(value.local)) if dim != len(value.local) - 2))
            * value.dtype.itemsize
            for value in keys_and_values
        )
        return key_counts * sum(bytes_per_key)

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
    contributing_values : set of int
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
            input_sets = [required] * len(step.outputs) if step.blocks is None else step.blocks.differentiable_inputs
            for out, inputs in zip(step.outputs, input_sets, strict=True):
                if not required.isdisjoint(inputs) and plan.values[out].kind != "constant":
                    self.values_requiring_grad.add(out)
        self.contributing_values = {out for out in plan.outputs if isinstance(out, int)}
        self.backward_step_ids, self.communicating_step_ids = set[int](), set[int]()
        for step in reversed(plan.steps):
            if any(out in self.contributing_values and out in self.values_requiring_grad for out in step.outputs):
                self.contributing_values.update(step.inputs)
                self.backward_step_ids.add(id(step))
                summed_inputs = step.inputs[:1] if step.kind == "norm" else step.inputs  # excluding a norm's weights
                if any(value in self.values_requiring_grad for value in summed_inputs):
                    self.communicating_step_ids.add(id(step))


def ring_keys_sent_by_rank(ring: RingPlan, direction: str) -> np.ndarray:
    """Return the number of keys, and in a backward pass of their gradients, that each rank sends: an array (size,)."""
    axes = sorted(axes_of([ring.keys]))
    key_counts = RankSubset.all(ring.mesh).element_counts_by_rank(ring.keys)
    # move the axes of each ring to the end, in order
    last_axes = range(len(ring.mesh.parts) - len(axes), len(ring.mesh.parts))
    counts = np.moveaxis(key_counts.reshape(ring.mesh.parts), axes, last_axes)
    shape = counts.shape
    counts = counts.reshape(*shape[: len(shape) - len(axes)], -1)
    sent_counts = (1 + (direction == "backward")) * counts.sum(-1, keepdims=True) - np.roll(counts, -1, -1)
    return np.moveaxis(sent_counts.reshape(shape), last_axes, axes).reshape(-1)


def message_kind(step: Step) -> str:
    """Return the ledger's kind for a step's messages."""
    return "halo" if step.kind == "view" else "redistribution"
