"""Options for executing a module, beyond what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..halo import ExchangePolicy, Fusion
from .capture import lowered
from .checks import check_gather_at
from .fused import fused
from .layout import Layout, Mesh
from .lower import Lowering
from .plan import TorchPlan
from .schemes import Schemes, chosen
from .segments import Strips
from .trunk import fitted


@dataclass(frozen=True)
class Execution:
    """Execution options of a module; see `distribute`.

    Attributes
    ----------
    gather_at : tuple of str
    recompute : bool
    schemes : dict of path to ExchangePolicy
    strips : int, 'auto' or None
    memory : int or None
        Bytes that one rank may take.
    """

    gather_at: tuple[str, ...] = ()
    recompute: bool = False
    schemes: Mapping[str, ExchangePolicy] = field(default_factory=dict)
    strips: Strips = None
    memory: int | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        gather_at: Sequence[str],
        recompute: bool,
        scheme: Schemes,
        strips: Strips,
        memory: int | None,
    ) -> Execution:
        """Return that of a module, if its parts have these names; else raise ConfigError."""
        check_gather_at(module, gather_at)
        return cls(tuple(gather_at), recompute, chosen(scheme, dict(module.named_modules()), recompute), strips, memory)

    @property
    def reads_wide(self) -> bool:
        """Whether tiles of images may come with cells around them."""
        return any(isinstance(policy, Fusion) and policy.reads_wide for policy in self.schemes.values())

    def lowered(
        self, program: Any, mesh: Mesh, rank: int, layouts: Sequence[Layout], module: nn.Module
    ) -> tuple[TorchPlan, Any, Lowering | None]:
        """Return the plan of a program for one rank, the tree of its outputs, and what of it goes together.

        Parameters
        ----------
        module : torch.nn.Module
            Of the program.
        """
        given = program, mesh, rank, layouts, self.gather_at
        lowering: Lowering | None
        if self.memory is not None:
            lowering = fitted(*given, self.recompute, self.memory, module)
        else:
            lowering = fused(*given, self.schemes, self.strips)
        return *lowered(*given, self.schemes, self.recompute, lowering), lowering
