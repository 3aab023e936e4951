"""From layers to what a step does, from arithmetic alone.

fit: `compile_plan`. plan: the Plan that check prints and the executor runs. graph: its steps and values. layer: one
layer on all tiles. memory: what lives when, and where. section: nodes whose arrays are in memory together, and
segments in strips. stream: nodes in strips from the image on; streamable: which can. A segment is layers one after the
other of which only the first one's input is exchanged; segments: those that schemes ask for. planner, choices: which
segments, and which schemes, cost least. report: a plan to read. parameters:
those of a model of either kind. model_plan: the protocol of their plans.
"""

from .fit import compile_plan
from .graph import Graph, Step, of_layer
from .layer import LayerPlan
from .memory import LiveRange, MemoryPlan, plan_memory
from .model_plan import ModelPlan
from .parameters import ParameterPlan
from .plan import GRADIENTS, LOSS, Plan, Training, largest_of, micro_batches
from .section import PlannedSection
from .stream import Stream

__all__ = [
    "GRADIENTS",
    "LOSS",
    "Graph",
    "LayerPlan",
    "LiveRange",
    "MemoryPlan",
    "ModelPlan",
    "ParameterPlan",
    "Plan",
    "PlannedSection",
    "Step",
    "Stream",
    "Training",
    "compile_plan",
    "largest_of",
    "micro_batches",
    "of_layer",
    "plan_memory",
]
