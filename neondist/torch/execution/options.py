"""Execution options of a distributed module: border schemes, strips, recomputation, and the memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...halo import ExchangePolicy, FusionScheme, scheme_text
from ..capture.capture import lower_program
from ..capture.channel_regions import find_channel_regions
from ..capture.checks import check_gather_at_paths
from ..exchange.schemes import Schemes, parse_schemes, policy_of_module
from ..ir.errors import UnsupportedOperator
from ..ir.layout import Layout, Mesh
from ..lowering.lowering import Lowering
from ..lowering.plan import TorchPlan
from .fused_lowering import FusedLowering
from .segment_planner import plan_segments
from .segments import OperatorSegment, SegmentSearch, Strips
from .trunk import create_trunk_lowering


@dataclass(frozen=True)
class ExecutionOptions:
    """Execution options of a module; see `distribute`.

    Attributes
    ----------
    memory : int or None
        Memory limit of one rank in bytes.
    """

    gather_at: tuple[str, ...] = ()
    recompute: bool = False
    schemes: Mapping[str, ExchangePolicy] = field(default_factory=dict)
    strips: Strips = None
    memory: int | None = None

    @classmethod
    def from_arguments(
        cls,
        module: nn.Module,
        gather_at: Sequence[str],
        recompute: bool,
        scheme: Schemes,
        strips: Strips,
        memory: int | None,
    ) -> ExecutionOptions:
        """Return the options for a module; raise ConfigError for an invalid scheme, or a path without a module."""
        check_gather_at_paths(module, gather_at)
        schemes = parse_schemes(scheme, dict(module.named_modules()))
        return cls(tuple(gather_at), recompute, schemes, strips, memory)

    @property
    def tiles_may_have_margins(self) -> bool:
        """Whether a scheme extends the tiles of images by a margin."""
        return any(isinstance(policy, FusionScheme) and policy.reads_extended_tile for policy in self.schemes.values())

    def check_not_recomputed(self) -> None:
        """Raise ConfigError in a pass that torch.utils.checkpoint recomputes, if a scheme keeps state."""
        policy = next((policy for policy in self.schemes.values() if policy.is_stateful), None)
        if policy is not None and torch._C._current_graph_task_id() != -1:  # inside a backward pass
            raise ConfigError(
                f"scheme: '{scheme_text(policy)}' keeps state, so torch.utils.checkpoint cannot recompute a pass; use"
                " ndt.distribute(..., recompute=True) instead"
            )

    def lower(
        self, program: Any, mesh: Mesh, rank: int, layouts: Sequence[Layout], module: nn.Module
    ) -> tuple[TorchPlan, Any, Lowering | None]:
        """Return a rank's plan, the outputs' tree structure, and the lowering in blocks or segments, if any."""
        args = program, mesh, rank, layouts, self.gather_at
        lowering: Lowering | None = None
        is_exact = all(policy_of_module(path, self.schemes) is None for path in self.schemes)
        search, segments = self._find_segments(program, mesh, layouts)
        if self.memory is not None:
            assert search is not None
            lower = partial(lower_program, program, mesh, 0, layouts, self.gather_at, self.schemes, self.recompute)
            can_reuse_plan = is_exact and self.strips is None and not self.recompute
            plan = search.program.plan if can_reuse_plan else None
            lowering = create_trunk_lowering(search, segments, rank, lower, self.memory, module, plan)
        elif search is not None and segments:
            lowering = FusedLowering(mesh, rank, segments, search.program.image_value_ids)
        can_partition_channels = is_exact and lowering is None and not self.gather_at
        channel_nodes = find_channel_regions(program, mesh) if can_partition_channels else ()
        return *lower_program(*args, self.schemes, self.recompute, lowering, channel_nodes=channel_nodes), lowering

    def _find_segments(
        self, program: Any, mesh: Mesh, layouts: Sequence[Layout]
    ) -> tuple[SegmentSearch | None, list[OperatorSegment]]:
        """Return the search for segments (None if no option needs it), and the segments that the options require."""
        has_fusion_scheme = mesh.axes and any(isinstance(policy, FusionScheme) for policy in self.schemes.values())
        args = program, mesh, layouts, self.gather_at, self.schemes
        if has_fusion_scheme or self.strips is not None:
            try:
                search = SegmentSearch(*args, self.strips)
                return search, plan_segments(search)
            except UnsupportedOperator:  # lower_program raises it again, unless only rows cannot be partitioned
                if self.tiles_may_have_margins:
                    raise
        return (None if self.memory is None else SegmentSearch(*args, None)), []
