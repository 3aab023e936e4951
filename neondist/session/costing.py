"""What a layer costs on a grid: bytes sent and bytes held, from its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..geometry import GridShape, split
from ..plan import Graph, plan_memory

if TYPE_CHECKING:
    from ..models import Model
    from ..models.plan import LayerPlan, ModelPlan


@dataclass(frozen=True)
class LayerCosts:
    """One layer (or several) in one training step.

    Attributes
    ----------
    sent_most, sent_all : bytes of halos, forward and backward, of the rank that sends most and of all ranks
    parameters : number of trained values
    memory : bytes that the fullest rank holds, kernels' scratch space not counted
    """

    sent_most: int = 0
    sent_all: int = 0
    parameters: int = 0
    memory: int = 0

    def __add__(self, other: LayerCosts) -> LayerCosts:
        """Add layer by layer; the ranks that send or hold most need not be the same, so the sum is an upper bound."""
        return LayerCosts(
            self.sent_most + other.sent_most,
            self.sent_all + other.sent_all,
            self.parameters + other.parameters,
            self.memory + other.memory,
        )


def layer_costs(model: Model, plans: ModelPlan, batch_size: int, grid: GridShape) -> list[LayerCosts]:
    """Return the costs of every layer in one step of a whole batch."""
    itemsize = model.dtype.itemsize
    per_value = itemsize * (2 + len(model.optimizer.slot_names))  # value, gradient, slots
    shares = [hi - lo for lo, hi in (split(batch_size, grid.replicas, i) for i in range(grid.replicas))]
    samples = held_samples(model, plans, shares[0])  # of the fullest replica
    costs, ungiven = [], Graph(model.layers, plans.input_shape).first_layers
    for index, (layer, plan) in enumerate(zip(model.leaves, plans, strict=True)):
        channels = plan.input_shape[-1] * itemsize
        home = layer not in ungiven  # the images need no gradient, so nothing returns from what they go into
        sent = sent_bytes(plan, shares[0], itemsize, home)
        held = max((1 + (index > 0)) * box.size * channels for box in plan.kept)
        costs.append(
            LayerCosts(
                sent_most=round(max(sent)),
                sent_all=round(sum(sum(sent_bytes(plan, n, itemsize, home)) for n in shares)),
                parameters=plan.parameters,
                memory=held * samples + max(plan.held) * per_value,
            )
        )
    return costs


def held_samples(model: Model, plans: ModelPlan, samples: int) -> int:
    """Return how many of a rank's samples are in memory at once: a micro-batch, if none waits for another."""
    over_batch = any(one.over_batch for plan in plans for one in plan.sums)
    return samples if over_batch else -(-samples // model.accumulate)


def planned_memory(model: Model, plans: ModelPlan, batch_size: int, grid: GridShape) -> int:
    """Return the bytes of one block for all views and gradients, on the rank that needs most.

    Arrays that never live at the same moment of a step share memory in it; kernels' scratch space is not counted.
    """
    samples = held_samples(model, plans, split(batch_size, grid.replicas, 0)[1])
    graph = Graph(model.layers, plans.input_shape)
    by_layer = {id(layer): plan for layer, plan in zip(model.leaves, plans, strict=True)}
    of_steps = [by_layer.get(id(step.layer)) for step in graph.steps]

    def held(tile: int) -> int:
        views = [0 if plan is None else plan.kept[tile].size * plan.input_shape[-1] for plan in of_steps]
        windowed = [plan is not None and plan.windows[tile] for plan in of_steps]
        values = [grid.partition(shape[:-1]).box(tile).size * shape[-1] for shape in graph.shapes]
        for step, plan in zip(graph.steps, of_steps, strict=True):
            if plan is not None:
                values[step.output] = plan.tiles[tile].size * plan.output_shape[-1]
        return plan_memory(graph, views, windowed, values).length

    return max(map(held, range(grid.tiles))) * samples * model.dtype.itemsize


def pretraining_bytes(
    model: Model, plans: list[LayerPlan], batch_size: int, grid: GridShape
) -> list[tuple[str, int, int]]:
    """Return each stage's name, and what the busiest rank and all ranks send in a step of its pretraining."""
    found, most = model.pretraining_words(plans), split(batch_size, grid.replicas, 0)[1]
    size = model.dtype.itemsize
    return [(name, max(words) * most * size, sum(words) * batch_size * size) for name, words in found.items()]


def sent_bytes(plan: LayerPlan, samples: int, itemsize: int, home: bool = True) -> list[float]:
    """Return the bytes of halos that each tile sends in a training step, by its scheme's formula.

    Parameters
    ----------
    samples : int
        Of one replica.
    home : bool
        Whether the layer's input needs a gradient.
    """
    scheme, sent = plan.scheme, []
    for there, back in zip(plan.forward, plan.backward, strict=True):
        there, back = ([numbers * samples for numbers in messages] for messages in (there, back))
        needed = home or plan.reverse  # a transposed convolution's weights need its neighbours' gradients
        sent.append(scheme.forward_bytes(there, itemsize) + (scheme.backward_bytes(back, itemsize) if needed else 0))
    return sent
