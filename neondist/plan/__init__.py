"""Compilation of layers into a plan of a training step, without MPI.

fit: `compile_plan`. plan: the Plan that `neondist check` prints and the executor runs. graph: steps and values of a
model. layer: one layer on all tiles. classes: tiles with equal plans. memory: lifetimes and offsets of arrays. section:
nodes whose arrays are in memory at the same time, and segments in strips. stream: leading nodes, run in strips.
segments: consecutive layers that exchange only the first layer's input, as schemes request. planner, choices: cheapest
segments and schemes, cuts for recomputation. search: fastest grid and strategy. blocks: block-wise inference. report:
the plan as text. parameters: trained parameters. model_plan: protocol of the plans of layer models and PyTorch modules.
"""

from .fit import compile_plan
from .graph import Graph, Step, prefix_error_with_layer
from .layer import LayerPlan
from .memory import LiveRange, MemoryPlan
from .model_plan import ModelPlan
from .parameters import ParameterPlan
from .plan import GRADIENTS, LOSS, Plan, TrainingSettings, max_micro_batch_size, micro_batch_ranges
from .section import PlannedSection
from .stream import StripwisePlan

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
    "StripwisePlan",
    "TrainingSettings",
    "compile_plan",
    "max_micro_batch_size",
    "micro_batch_ranges",
    "prefix_error_with_layer",
]
