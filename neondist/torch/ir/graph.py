"""Values and steps of a plan; a step is local work or communication with other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch

from ...geometry import Place, ViewTransfer
from ...halo import ExchangePolicy
from ...plan.planner import recompute_cuts
from .layout import (
    Dim,
    Layout,
    Mesh,
    Shape,
    axes_of,
    is_contiguous_on_every_rank,
    layout_of_block,
    local_shape,
    range_at,
    shape_of,
)

GRADIENTS = "gradients"
"""Name of the reduction of all parameters' gradients, in place of a step's name."""
ACCUMULATION_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Accumulation dtype of low-precision sums over ranks."""
UNSHARED_RESULT_OPS = {
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.add.Tensor", "aten.sub.Tensor",
    "aten.linear.default", "aten._native_batch_norm_legit_functional.default", "aten.group_norm.default",
    "aten._native_batch_norm_legit_no_training.default", "aten.instance_norm.default", "aten.cat.default",
    "aten.conv_transpose2d.input", "aten.conv_transpose3d.input", "aten.batch_norm.default",
}  # fmt: skip
"""Operators that return new memory and do not need their results for the backward pass."""
IN_PLACE_VARIANTS: dict[str, Callable[..., Any]] = {"aten.relu.default": lambda tensor: (torch.relu_(tensor),)}
"""In-place functions for operators that may overwrite their input if it has no other reader."""
UNSHARED_GRADIENT_OPS = {
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv1d.padding", "aten.conv2d.padding",
    "aten.conv3d.padding",
}  # fmt: skip
"""Operators whose input gradient is in memory that is not shared."""
UNSHARED_WEIGHT_GRADIENT_OPS = UNSHARED_GRADIENT_OPS | {"aten.linear.default"}
"""Operators whose weight gradient is in memory that is not shared."""
IDENTITY_STEPS = ("spread", "counted", "part")
"""Kinds of steps that return their input, or a part of it, unchanged and act on its gradient."""
Pads = tuple[tuple[int, int, int], ...]


def is_eager_cpu_float(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether alternative kernels apply: floats on the CPU, no autocast, no compiler."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class DimPart(NamedTuple):
    """A range of one dimension of a tensor, for each rank."""

    dim: int
    atoms: Dim

    @classmethod
    def from_layout(cls, layout: Layout) -> DimPart | None:
        """Return the parts of a tensor of this layout, or None if they are not ranges of one dimension."""
        split_dims = [(dim, atoms) for dim, atoms in enumerate(layout) if axes_of((atoms,))]
        return cls(*split_dims[0]) if len(split_dims) == 1 and is_contiguous_on_every_rank(split_dims[0][1]) else None

    def select(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Return the part of a tensor on the rank at a place, as a view of the tensor."""
        lo, hi = range_at(self.atoms, place)
        return tensor.narrow(self.dim, lo, hi - lo)


@dataclass(eq=False)
class Value:
    """A tensor of the plan.

    Attributes
    ----------
    id : int
    local : tuple of int
        Shape of this rank's part.
    axes : frozenset of int
        Axes of the mesh along which ranks have different parts; along other axes, the value is replicated.
    dtype : torch.dtype
    kind : 'value', 'parameter' (whose gradient is summed at the end), or 'constant' (without a gradient)
    layout_or_none : Layout or None
        Layout of the whole tensor; None: a view, which is used by one operation only.
    shape_at : callable, optional
        Maps a place to the shape of a view there.
    """

    id: int
    local: Shape
    axes: frozenset[int]
    dtype: torch.dtype
    kind: str
    layout_or_none: Layout | None = None
    shape_at: Callable[[Place], Shape] | None = None

    def at_place(self, place: Place) -> Value:
        """Return the value with the shape and layout that it has in the block at a place."""
        if self.layout_or_none is None:
            return self if self.shape_at is None else replace(self, local=self.shape_at(place))
        return replace(self, local=local_shape(self.layout, place), layout_or_none=layout_of_block(self.layout, place))

    @property
    def layout(self) -> Layout:
        """Layout of the whole tensor."""
        assert self.layout_or_none is not None
        return self.layout_or_none

    @cached_property
    def shape(self) -> Shape:
        """Global shape."""
        return shape_of(self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return prod(self.local) * self.dtype.itemsize


class BlockComputation(Protocol):
    """Block-wise computation of a step, which is repeated in the backward pass.

    Attributes
    ----------
    block_counts : tuple of int
    differentiable_inputs : list of frozenset of int
        For each output, the positions of the inputs to which its gradient propagates.
    compiler : callable or None
        Compiles the computation of a block.
    """

    block_counts: tuple[int, ...]
    differentiable_inputs: list[frozenset[int]]
    compiler: Callable[..., Any] | None

    def peak_bytes(self, inputs_requiring_grad: Collection[int] | None = None) -> int:
        """Return the most bytes live at once in the computation of a block, excluding the step's inputs and outputs.

        Parameters
        ----------
        inputs_requiring_grad : collection of int, optional
            For a backward pass, the positions of the inputs that require gradients; None: for a forward pass.
        """


@dataclass(eq=False)
class Step:
    """Operation of a plan: local work, or communication with other ranks.

    Attributes
    ----------
    kind : 'local', 'norm', 'view', 'gather', 'ring', 'sum', 'max', or one of IDENTITY_STEPS
    name : str
        The module's path and the operator.
    inputs, outputs : values, by id
    run : callable
        For 'local': maps the tensors of the inputs to those of the outputs.
    bind_to_place : callable, optional
        Maps a place to `run` there, if `run` differs between places.
    op_name : str
        Name of the operator that computes the first output, if any.
    is_window_view : bool
        Whether the step is a view for sliding windows (a range along each axis), so that it may have a border scheme.
    scheme : ExchangePolicy or None
        Border scheme for cells of other tiles; None: exact exchange.
    has_unaliased_gradient : bool
        For a view: whether the memory of its output's gradient is not shared.
    blocks : BlockComputation or None
        `run`, if it computes the step block by block.
    is_check : bool
        Whether the step also runs if its results are never read.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[..., Any] | None = None
    transfer: ViewTransfer | None = None
    pads: Pads = ()
    fill: float = 0.0
    axes: frozenset[int] = frozenset()
    contributes_gradient: bool = True
    kind_args: Any = None
    freed_ids: tuple[int, ...] = field(default=())
    op_name: str = ""
    is_window_view: bool = False
    scheme: ExchangePolicy | None = None
    has_unaliased_gradient: bool = False
    bind_to_place: Callable[[Place], Callable[..., Any]] | None = None
    blocks: BlockComputation | None = None
    is_check: bool = False


@dataclass(eq=False)
class TorchGraph:
    """Steps of a captured module on one rank of a mesh.

    Attributes
    ----------
    mesh : Mesh
    rank : int
    steps : list of Step
    values : list of Value
    parameters, buffers : dict of name to id
    inputs : list of id
    outputs : list of ids, or of objects whose `value` is a Python value
    mutated_tensors : dict of name of a parameter or buffer to id
        Values that replace the parameters and buffers that a pass modifies.
    seed_id : int or None
        Id of the random seed.
    recompute : bool
        Whether the backward pass recomputes segments instead of keeping their values.
    dtypes_under_autocast : dict of int to dtype
        Dtypes of floating-point values under the autocast around the capture, by id; empty without autocast.
    unaliased_gradients : set of int
        Parameters whose gradients in a pass are in memory of their own, which may be reused.
    """

    mesh: Mesh
    rank: int
    steps: list[Step]
    values: list[Value]
    parameters: dict[str, int]
    buffers: dict[str, int]
    inputs: list[int]
    outputs: list[Any]
    mutated_tensors: dict[str, int]
    seed_id: int | None = None
    recompute: bool = False
    dtypes_under_autocast: Mapping[int, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Drop steps whose values are never read, and determine which memory can be freed or reused."""
        result_ids = {out for out in self.outputs if isinstance(out, int)} | set(self.mutated_tensors.values())
        needed_ids = set(result_ids)
        needed_steps: list[Step] = []
        for step in reversed(self.steps):
            if step.is_check or any(out in needed_ids for out in step.outputs):
                needed_ids.update(step.inputs)
                needed_steps.append(step)
        self.steps = needed_steps[::-1]
        seen_ids = set(result_ids)
        for step in reversed(self.steps):
            last_used_ids = [value for value in (*step.inputs, *step.outputs) if value not in seen_ids]
            step.freed_ids = tuple(dict.fromkeys(last_used_ids))
            seen_ids.update(last_used_ids)
        self._overwrite_unread_values()
        self.unaliased_gradients = self._find_unaliased_gradients()

    def _recompute_cuts(self) -> list[int]:
        """Return the boundaries of about sqrt(steps) segments, cut where few values are live; equal on all ranks."""
        num_steps = len(self.steps)
        producer_by_value = {out: at for at, step in enumerate(self.steps) for out in step.outputs}
        last_readers = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        live_counts = [0] * num_steps  # values of earlier steps that are read at or after this step
        for value, first in producer_by_value.items():
            for at in range(first + 1, last_readers.get(value, first) + 1):
                live_counts[at] += num_steps if self._is_last_read_in_place(value, last_readers) else 1
        return recompute_cuts(live_counts)

    def partitioned_parameters(self) -> dict[int, Step]:
        """Return the steps that select the only part of a parameter that a rank reads, by the parameter's id."""
        reader_counts = Counter(value for step in self.steps for value in step.inputs)
        steps = {step.inputs[0]: step for step in self.steps if step.kind == "part"}
        return {value: step for value, step in steps.items() if reader_counts[value] == 1 and value not in self.outputs}

    def recomputed_segments(self) -> list[Segment]:
        """Return the segments that the backward pass recomputes: all but the last if `recompute` is set, else none."""
        return self.executed_segments()[:-1] if self.recompute else []

    def executed_segments(
        self,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        functions: dict[Any, Callable[..., Any]] | None = None,
    ) -> list[Segment]:
        """Return the segments of a forward pass: a single one with all steps unless `recompute` is set.

        Parameters
        ----------
        compiler : callable, optional
            Compiles a function of consecutive local steps, which then become a single step.
        functions : dict, optional
            Compiled functions of similar plans, reused for equal steps on tensors of equal shapes; extended in place.
        """
        cuts = self._recompute_cuts() if self.recompute else [0, len(self.steps)]
        segments, compiled_segments = self._split_into_segments(cuts), list[Segment]()
        if compiler is None:
            return segments
        is_barrier = [s.kind != "local" or s.kind_args is not None or s.blocks is not None for s in self.steps]
        boundaries = {at for at in range(1, len(is_barrier)) if is_barrier[at] or is_barrier[at - 1]}
        subsegments = iter(self._split_into_segments(sorted(boundaries.union(cuts))))
        functions = {} if functions is None else functions
        for segment in segments:
            steps = list[Step]()
            num_remaining_steps = len(segment.steps)
            while num_remaining_steps:
                subsegment = next(subsegments)
                has_several_steps = len(subsegment.steps) > 1
                steps += [self._compile(subsegment, compiler, functions)] if has_several_steps else subsegment.steps
                num_remaining_steps -= len(subsegment.steps)
            compiled_segments.append(segment._replace(steps=steps))
        return compiled_segments

    def _compile(
        self, segment: Segment, compiler: Callable[..., Any], functions: dict[Any, Callable[..., Any]]
    ) -> Step:
        """Return one step that runs a segment of local steps."""
        steps, inputs, outputs = segment
        freed_ids = {value for step in steps for value in step.freed_ids}
        shapes = tuple(self.values[value].local for value in inputs)
        key = shapes, outputs, *((step.run, step.inputs, step.outputs) for step in steps)
        if key not in functions:
            functions[key] = compiler(segment.build_function())
        segment_freed_ids = tuple(value for value in (*inputs, *outputs) if value in freed_ids)
        return replace(steps[-1], inputs=inputs, outputs=outputs, run=functions[key], freed_ids=segment_freed_ids)

    def _split_into_segments(self, cuts: Sequence[int]) -> list[Segment]:
        last_readers = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        for value in (*self.outputs, *self.mutated_tensors.values()):
            last_readers[value] = len(self.steps)
        segments = []
        for begin, end in pairwise(cuts):
            steps = self.steps[begin:end]
            produced = {out for step in steps for out in step.outputs}
            read_values = dict.fromkeys(value for step in steps for value in step.inputs if value not in produced)
            returned_values = [out for step in steps for out in step.outputs if last_readers.get(out, -1) >= end]
            segments.append(Segment(steps, tuple(read_values), tuple(returned_values)))
        return segments

    def _is_last_read_in_place(self, value: int, last_readers: Mapping[int, int]) -> bool:
        """Return whether the last reader of a value may overwrite it: recomputation could not read the value again."""
        last_reader = last_readers.get(value, len(self.steps))
        return last_reader < len(self.steps) and self.steps[last_reader].op_name in IN_PLACE_VARIANTS

    def _find_unaliased_gradients(self) -> set[int]:
        """Return the parameters read by a single operator that computes their gradient in new memory."""
        readers: dict[int, list[Step]] = {value: [] for value in self.parameters.values()}
        for step in self.steps:
            for value in step.inputs:
                readers.setdefault(value, []).append(step)
        unaliased_parameters = set[int]()
        for parameter in self.parameters.values():
            value, steps = parameter, readers[parameter]
            while len(steps) == 1 and steps[0].kind in IDENTITY_STEPS:
                (value,) = steps[0].outputs
                steps = readers.get(value, [])
            computes_gradient = [
                step.op_name in UNSHARED_WEIGHT_GRADIENT_OPS and step.blocks is None and step.inputs[1:2] == (value,)
                for step in steps
            ]
            is_matrix = len(self.values[parameter].local) > 1  # a bias may share the gradient of a single result
            if computes_gradient == [True] and is_matrix and parameter not in self.outputs:
                unaliased_parameters.add(parameter)
        return unaliased_parameters

    def _overwrite_unread_values(self) -> None:
        """Make steps overwrite inputs that have no other reader, and find views whose gradient is not shared."""
        readers = Counter(value for step in self.steps for value in step.inputs)
        own_grads = {s.inputs[0] for s in self.steps if s.op_name in UNSHARED_GRADIENT_OPS and s.inputs}
        own_results = {
            s.outputs[0] for s in self.steps if s.op_name in UNSHARED_RESULT_OPS and s.kind in ("local", "norm")
        }
        for at, step in enumerate(self.steps):
            if step.op_name in IN_PLACE_VARIANTS and step.kind == "local" and step.kind_args is None:
                (value,) = step.inputs
                if value in own_results and readers[value] == 1 and value in step.freed_ids:
                    self.steps[at] = replace(step, run=IN_PLACE_VARIANTS[step.op_name])
            elif step.kind == "view":
                (value,) = step.outputs
                step.has_unaliased_gradient = value in own_grads and readers[value] == 1 and value not in self.outputs


class Segment(NamedTuple):
    """Consecutive steps, the values from outside that they read, and those of their results that are used later."""

    steps: list[Step]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def build_function(self) -> Callable[..., tuple[Any, ...]]:
        """Return a new function that runs the local steps, since torch.compile limits compilations per function."""

        def run(*tensors: Any) -> tuple[Any, ...]:
            return self.run(*tensors)

        return FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        """Run the steps, all of which are local, and return the outputs."""
        env = dict(zip(self.inputs, tensors, strict=True))
        for step in self.steps:
            assert step.run is not None
            env.update(zip(step.outputs, step.run(*[env[value] for value in step.inputs]), strict=True))
        return tuple(env[value] for value in self.outputs)


def supports_gradients(dtype: torch.dtype) -> bool:
    """Return whether a dtype can have gradients: real or complex floating point."""
    return dtype.is_floating_point or dtype.is_complex


def axes_of_values(values: Iterable[Value]) -> frozenset[int]:
    """Return the axes along which any of the values differs between ranks."""
    return frozenset[int]().union(*(value.axes for value in values))
