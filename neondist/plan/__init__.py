"""From layers to what a step does: graph (steps and values), memory (what lives when, and where)."""

from .graph import Graph, Step
from .memory import LiveRange, MemoryPlan, plan_memory

__all__ = ["Graph", "LiveRange", "MemoryPlan", "Step", "plan_memory"]
