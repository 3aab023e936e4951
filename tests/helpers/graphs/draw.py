"""Random cases, as a pure function of a seed and a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

import neondist as nd

from .build import build_node, find_refusal
from .case import Case, Grid, list_leaves
from .layouts import LAYOUTS

Shape = tuple[int, ...]
MAX_ARRAY_SIZE = 400
"""maximum number of elements of an activation"""
PADDING_MODES = ["zeros", "zeros", "reflect", "replicate", "wrap"]
STRATEGIES = [
    "AllReduce(chunk_size=1)", "PartitionedAllReduce", "RandomAxisPartitionAR(seed=3)", "ShardedOptimizer", "PS",
    "PSLoadBalancing", "PartitionedPS(local_proxy_variable=True)", "UnevenPartitionedPS", "Parallax(chunk_size=1)",
]  # fmt: skip
ACTIVATIONS = ["ReLU", "Tanh", "Logistic", "Softmax", "Identity"]
EXACT_SCHEMES = [
    "halo", "halo(backward=auto)", "halo(backward=gather)", "deep_halo", "deep_halo(layers=9)", "overlap_tile",
    "overlap_tile(statistics=global)", "auto", "auto(latency=1e-3)", "every(j=1)", "tower(merge=true)",
]  # fmt: skip
APPROXIMATE_SCHEMES = [
    "tower", "tower(fill=reflect)", "tower(fill=replicate)", "halo_oneway", "stale", "stale(steps=2)", "every",
    "every(between=zeros)", "every(between=replicate)", "quantised", "quantised(bits=8, feedback=true)",
]  # fmt: skip
GRIDS: list[Grid] = [
    (1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 3), (2, 1, 1, 1), (1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 2, 1),
    (1, 1, 3, 1), (1, 1, 1, 5), (3, 1, 1, 2), (1, 1, 3, 2), (1, 1, 7, 1), (2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 3, 3),
]  # fmt: skip


class ChoiceSampler:
    """Random choices that favour small values."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.names = rng, 0

    def int(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def maybe(self, chance: float = 0.5) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < chance)

    def pick(self, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        return choices[self.int(0, len(choices) - 1)]

    def pick_early(self, choices: Sequence[Any]) -> Any:
        """Return one of the choices, preferring early ones."""
        return choices[int(len(choices) * self.rng.random() ** 1.6)]

    def axes(self, ndim: int, low: int, high: int) -> Any:
        """Return an integer, or one per axis."""
        if self.maybe():
            return self.int(low, high)
        return tuple(self.int(low, high) for _ in range(ndim))

    def sides(self, ndim: int, low: int, high: int) -> Any:
        """Return an integer, one per axis, or one per side."""
        if self.maybe(0.6):
            return self.axes(ndim, low, high)
        return tuple((self.int(low, high), self.int(low, high)) for _ in range(ndim))

    def modes(self, ndim: int) -> Any:
        """Return a padding mode, or one per axis."""
        return self.pick(PADDING_MODES) if self.maybe(0.7) else tuple(self.pick(PADDING_MODES) for _ in range(ndim))

    def kernel(self, ndim: int) -> Any:
        """Return a kernel_size, rarely a large one."""
        return self.axes(ndim, 1, 4 if self.maybe(0.9) else 7)

    def channels(self, most: int) -> int:
        """Return a number of channels, rarely a large one, which selects other kernels."""
        return self.int(1, most) if self.maybe(0.95) else self.int(16, 18)

    def name(self, kind: str) -> str:
        """Return a unique layer name."""
        self.names += 1
        return f"{kind.lower()}{self.names}"


def draw_conv(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim, groups = len(shape) - 1, d.pick([g for g in (1, 1, 2, 3) if shape[-1] % g == 0])
    arguments = {"out_channels": groups * d.channels(4 // groups), "kernel_size": d.kernel(ndim)}
    arguments |= {"padding": d.pick(["same", d.sides(ndim, 0, 2), d.sides(ndim, 0, 2), d.sides(ndim, 3, 7), 1])}
    arguments |= {"padding_mode": d.modes(ndim)}
    arguments |= {"stride": d.axes(ndim, 1, 3)} if d.maybe(0.4) else {}
    arguments |= {"dilation": d.axes(ndim, 1, 3)} if d.maybe(0.3) else {}
    arguments |= {"groups": groups} if groups > 1 else {}
    return arguments | _draw_bias(d) | _draw_activation_argument(d, arguments["out_channels"])


def draw_deconv(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim, groups = len(shape) - 1, d.pick([g for g in (1, 1, 2, 3) if shape[-1] % g == 0])
    arguments = {"out_channels": groups * d.int(1, 4 // groups), "kernel_size": d.axes(ndim, 1, 4)}
    stride = d.axes(ndim, 1, 3)
    arguments |= {"stride": stride} if d.maybe(0.7) else {}
    strides = arguments.get("stride", 1)
    strides = (strides,) * ndim if isinstance(strides, int) else strides
    arguments |= {"output_padding": tuple(d.int(0, s - 1) for s in strides)} if d.maybe() else {}
    arguments |= {"padding": d.sides(ndim, 0, 3)} if d.maybe(0.7) else {}
    arguments |= {"dilation": d.axes(ndim, 1, 2)} if d.maybe(0.3) else {}
    arguments |= {"groups": groups} if groups > 1 else {}
    return arguments | _draw_bias(d) | _draw_activation_argument(d, arguments["out_channels"])


def draw_pooling(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim, kernel = len(shape) - 1, d.kernel(len(shape) - 1)
    least = min((kernel,) if isinstance(kernel, int) else kernel)
    arguments = {"kernel_size": kernel} | ({"stride": d.axes(ndim, 1, 3)} if d.maybe(0.6) else {})
    return arguments | ({"padding": d.sides(ndim, 0, least - 1)} if d.maybe() else {})


def draw_avg_pooling(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return draw_pooling(d, shape) | ({"count_include_pad": False} if d.maybe() else {})


def draw_upsample(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim = len(shape) - 1
    return {"factor": d.axes(ndim, 1, 3 if d.maybe() else 6), "mode": d.pick(["nearest", "bilinear"])}


def draw_pad(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    arguments = {"padding": d.sides(len(shape) - 1, -1 if d.maybe(0.3) else 0, 3)}
    arguments |= {"mode": d.modes(len(shape) - 1)}
    return arguments | ({"fill": 1.5} if d.maybe(0.3) else {})


def draw_crop(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return {"cropping": d.sides(len(shape) - 1, 0, 2)}


def draw_local_filtering(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim = len(shape) - 1
    arguments = {"out_channels": d.int(1, 3), "kernel_size": d.axes(ndim, 1, 3)}
    arguments |= {"stride": d.axes(ndim, 1, 2)} if d.maybe(0.4) else {}
    arguments |= {"padding": d.sides(ndim, 0, 2)} if d.maybe() else {}
    arguments |= {"bias": True} if d.maybe() else {}
    return (
        arguments
        | ({"shared": d.pick([True, d.axes(ndim, 1, 3)])} if d.maybe(0.3) else {})
        | _draw_activation_argument(d, arguments["out_channels"])
    )


def draw_lcn(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    sizes = d.pick([1, 3, 5, tuple(2 * d.int(0, 2) + 1 for _ in shape[1:])])
    arguments = {
        "kernel_size": sizes,
        "min_deviation": d.pick([0.3, 1.0, "mean"]),
        "halo": d.pick(["auto", "twice", "wide"]),
    }
    arguments |= {"window": "uniform"} if d.maybe() else {"sigma": 1.5} if d.maybe() else {}
    return arguments | ({"padding_mode": "reflect"} if d.maybe() else {})


def draw_lrn(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return {"depth": d.int(1, 5), "alpha": 0.5, "beta": d.pick([0.75, 1.0]), "k": d.pick([1.0, 2.0])}


def draw_batch_norm(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return {"eps": 0.1} | ({"momentum": 0.3} if d.maybe() else {})


def draw_group_norm(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    groups = d.pick([g for g in (1, 2, 3, 4) if shape[-1] % g == 0])
    return {"groups": groups, "eps": 0.1} | ({"affine": False} if d.maybe(0.3) else {})


def draw_instance_norm(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return {"eps": 0.1} | ({"affine": True} if d.maybe() else {})


def draw_fc(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    arguments = {"out_features": d.int(1, 4)}
    return arguments | _draw_bias(d) | _draw_activation_argument(d, arguments["out_features"])


def draw_own_stencil(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    ndim = len(shape) - 1
    return {"kernel_size": d.axes(ndim, 1, 3), "padding": d.axes(ndim, 0, 2), "mode": d.pick(PADDING_MODES)}


def draw_nothing(d: ChoiceSampler, shape: Shape) -> dict[str, Any]:
    return {}


VECTOR_LAYERS: dict[str, Callable[[ChoiceSampler, Shape], dict[str, Any]]] = {
    "FC": draw_fc, "BatchNorm": draw_batch_norm, "GroupNorm": draw_group_norm, "LRN": draw_lrn,
    "Activation": lambda d, shape: {"activation": _draw_activation(d, shape[-1])},
    "Dropout": lambda d, shape: {"rate": d.pick([0.0, 0.3, 0.6])},
    "OwnGain": draw_nothing, "OwnNoise": draw_nothing, "OwnCounter": draw_nothing, "OwnBatchCenter": draw_nothing,
    "OwnProjection": lambda d, shape: {"out_features": d.int(1, 4)},
    "OwnSpread": lambda d, shape: {"extent": tuple(d.int(1, 6) for _ in range(d.int(1, 3)))},
}  # fmt: skip
IMAGE_LAYERS = VECTOR_LAYERS | {
    "Conv": draw_conv, "Deconv": draw_deconv,
    "MaxPooling": draw_pooling, "AvgPooling": draw_avg_pooling, "L2Pooling": draw_pooling,
    "Upsample": draw_upsample, "Pad": draw_pad, "Crop": draw_crop, "LocalFiltering": draw_local_filtering,
    "LCN": draw_lcn, "InstanceNorm": draw_instance_norm, "GlobalAvgPooling": draw_nothing,
    "OwnStencil": draw_own_stencil, "OwnCellGain": draw_nothing, "OwnCenter": draw_nothing, "OwnMoment": draw_nothing,
    "OwnExcitation": draw_nothing,
}  # fmt: skip
IMAGE_TO_VECTOR_LAYERS = ("FC", "GlobalAvgPooling", "OwnProjection", "OwnMoment")
WINDOWED_LAYERS = (
    "Conv",
    "Deconv",
    "MaxPooling",
    "AvgPooling",
    "L2Pooling",
    "Upsample",
    "Pad",
    "Crop",
    "LocalFiltering",
    "LCN",
    "OwnStencil",
)
DRAW_WEIGHTS = {"Conv": 6, "Deconv": 2, "MaxPooling": 2, "LocalFiltering": 1.5}


def draw_case(seed: int, number: int, grids: Sequence[Grid] = GRIDS, others: Sequence[Grid] = GRIDS) -> Case:
    """Return case `number` of a seed, on one of `grids` and then one of `others`."""
    rng = np.random.default_rng([seed, number])
    while True:
        case = _draw_case(ChoiceSampler(rng), grids, others)
        if case is not None:
            return case


def _draw_case(d: ChoiceSampler, grids: Sequence[Grid], others: Sequence[Grid]) -> Case | None:
    ndim = d.pick([1, 2, 2, 2, 3])
    shape = (*(d.int(1, (0, 17, 9, 5)[ndim]) for _ in range(ndim)), d.channels(4))
    grid, other = d.pick_early(grids), d.pick_early(others)
    approximate = d.maybe(0.2)
    schemes = APPROXIMATE_SCHEMES if approximate else EXACT_SCHEMES
    network, output_shape = _draw_chain(d, shape, d.int(1, 4), depth=2, schemes=schemes)
    if d.maybe(0.4) and len(output_shape) > 1:
        network, output_shape = _append_layer(d, network, output_shape, d.pick(IMAGE_TO_VECTOR_LAYERS), schemes)
    if d.maybe(0.2) and len(output_shape) == 1:
        network, output_shape = _append_layer(d, network, output_shape, "OwnSpread", schemes)
        added, output_shape = _draw_chain(d, output_shape, 1, depth=1, schemes=schemes)
        network = network + added
    if not list_leaves(network):
        return None
    replicas = max(grid[0], other[0])
    batch = d.int(replicas, max(5, replicas))
    memory_steps = approximate and 3  # stateful schemes have different first steps
    case = Case(
        shape=shape,
        network=network,
        batch=batch,
        last_batch=d.int(1, batch),
        steps=max(memory_steps + 1, 2),
        grid=grid,
        second_grid=other,
        scheme=d.pick(schemes) if d.maybe(0.7) else "halo",
        backend=d.pick(["numpy", "torch", "torch throughout"]),
        dtype="float32" if d.maybe(0.15) else "float64",
        twin=d.maybe(0.3),
        cost=draw_cost(d, output_shape),
        optimizer=d.pick([
            ("SGD", {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
            ("SGD", {"learning_rate": 0.01, "momentum": 0.5, "nesterov": True}),
            # a large eps, or Adam amplifies rounding errors of zero gradients, as of a bias before batch norm
            ("Adam", {"learning_rate": 0.01, "eps": 1e-3}),
            ("Adam", {"learning_rate": 0.01, "eps": 1e-3, "clip_norm": 0.1, "ema": 0.9}),
            ("AdamW", {"learning_rate": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
            ("RMSprop", {"learning_rate": 0.01, "eps": 1e-2, "momentum": 0.5, "centered": True}),
            ("SGD", {"learning_rate": 0.01, "clip_norm": 0.05, "weight_decay": 0.1}),
        ]),
        layout=d.pick(LAYOUTS) if d.maybe(0.6) else "plain",
        seed=d.int(0, 999),
    )  # fmt: skip
    execution = {
        "strips": d.pick([1, 2, 3, 5, "auto"]) if d.maybe(0.6) else None,
        "memory": "1TiB" if d.maybe(0.5) else None,  # with `strips`, streams from the image as far as possible
        "recompute": d.maybe(0.3),
        "accumulate": d.int(2, 3) if d.maybe(0.2) else 1,
        "strategy": d.pick(STRATEGIES) if d.maybe(0.3) else None,
        "sync": "bucketed" if d.maybe(0.2) else "allreduce",
    }
    for scheme in (case.scheme, "halo"):  # not every network supports all schemes and execution options
        for options in (execution, {"strips": execution["strips"], "memory": execution["memory"]}):
            if find_refusal(case.replace(scheme=scheme, **options)) is None:
                return case.replace(scheme=scheme, **options)
    return None


def draw_cost(d: ChoiceSampler, output_shape: Shape) -> tuple[str, dict[str, Any]]:
    """Return a cost and its arguments."""
    outputs = output_shape[-1]
    ignored = {"ignore_index": d.int(0, 1)} if d.maybe(0.3) else {}
    weights = {"class_weights": [0.5 + d.int(0, 3) for _ in range(outputs)]} if d.maybe(0.3) else {}
    smoothing = {"label_smoothing": 0.1} if d.maybe(0.3) else {}
    costs = [("SumSquared", {}), ("SumSquared", {}), ("MSE", {}), ("MAE", {}), ("Huber", {"delta": 0.5})]
    costs += [("BCE", ({"pos_weight": 2.5} if d.maybe() else {}) | ignored)]
    if outputs > 1:  # a softmax of a single output is rejected
        costs += [
            ("CrossEntropy", weights | ignored | smoothing),
            ("Focal", {"gamma": d.int(0, 2)} | weights | ignored),
        ]
    if outputs > 1 and len(output_shape) > 1:
        costs += [("Dice", ignored), ("DiceCE", {"dice_weight": 0.5} | weights | ignored | smoothing)]
    return d.pick(costs)


def _draw_chain(
    d: ChoiceSampler, shape: Shape, length: int, depth: int, schemes: Sequence[str]
) -> tuple[list[Any], Shape]:
    """Return a sequence of layers and its output shape."""
    nodes: list[Any] = []
    for _ in range(length):
        if depth and d.maybe(0.3):
            container, shape = _draw_container(d, shape, depth - 1, schemes)
            nodes.append(container)
        elif depth and d.maybe(0.06):
            nodes.append(draw_identity(d))
        else:
            kinds = [kind for kind in IMAGE_LAYERS if kind != "OwnSpread"] if len(shape) > 1 else list(VECTOR_LAYERS)
            weights = np.array(
                [0.3 if kind in IMAGE_TO_VECTOR_LAYERS and depth else DRAW_WEIGHTS.get(kind, 1) for kind in kinds]
            )
            kind = str(d.rng.choice(kinds, p=weights / weights.sum()))
            nodes, shape = _append_layer(d, nodes, shape, kind, schemes)
    return nodes, shape


def _append_layer(
    d: ChoiceSampler, nodes: list[Any], shape: Shape, kind: str, schemes: Sequence[str]
) -> tuple[list[Any], Shape]:
    """Append a layer of this kind unless eight draws are invalid."""
    for _ in range(8):
        layer = (kind, {"name": d.name(kind)} | (IMAGE_LAYERS[kind])(d, shape))
        if kind in WINDOWED_LAYERS and d.maybe(0.12):
            layer[1]["scheme"] = d.pick(schemes)
        output = _find_output_shape(layer, shape)
        if output is not None:
            return [*nodes, layer], output
    return nodes, shape


def _find_output_shape(layer: tuple[str, dict[str, Any]], shape: Shape) -> Shape | None:
    """Return the output shape of a layer, or None if it is invalid here or too large."""
    try:
        created = build_node(layer, dist=False)
        output = created.output_shape_for(shape)
        sizes = [prod(output), *(prod(p.shape) // 8 for p in created.parameters_for(shape).values())]
        (nd.Convnet if len(shape) > 1 else nd.MLP)([created]).plan(shape)
    except nd.UserError:
        return None
    return output if max(sizes) <= MAX_ARRAY_SIZE else None


def _draw_container(d: ChoiceSampler, shape: Shape, depth: int, schemes: Sequence[str]) -> tuple[Any, Shape]:
    """Return a Sequential, Sum or Concat with matching branches, and its output shape."""
    kind = d.pick(["Sum", "Concat", "Sum", "Concat", "Sequential", "list"])
    if kind in ("Sequential", "list"):
        nodes, output = _draw_chain(d, shape, d.int(0, 2), depth, schemes)
        return (nodes if kind == "list" else (kind, nodes)), output
    branches = [_draw_chain(d, shape, d.int(0, 3), depth, schemes) for _ in range(d.int(1, 3))]
    target = shape if d.maybe(0.6) else branches[0][1]
    target = target if len(target) > 1 or len(shape) == 1 else shape
    fitted = [_fit_branch(d, nodes, output, target, kind, schemes) for nodes, output in branches]
    if target == shape or (kind == "Concat" and target[:-1] == shape[:-1]):
        fitted += [(draw_identity(d), shape) for _ in range(d.pick([0, 1, 1, 2]))]
    d.rng.shuffle(fitted)  # type: ignore[arg-type]
    fitted = [pair for pair in fitted if pair[1] is not None]
    if not fitted or prod(target[:-1]) * sum(output[-1] for _, output in fitted) > MAX_ARRAY_SIZE:
        return [], shape
    channels = sum(output[-1] for _, output in fitted) if kind == "Concat" else target[-1]
    return (kind, [nodes for nodes, _ in fitted]), (*target[:-1], channels)


def draw_identity(d: ChoiceSampler) -> Any:
    """Return a network that computes the identity."""
    return d.pick([[], [], [[]], ("Sequential", []), ("Concat", [[]]), ("Sum", [[]]), [("Sum", [[]]), []]])


def _fit_branch(
    d: ChoiceSampler, nodes: list[Any], output: Shape, target: Shape, kind: str, schemes: Sequence[str]
) -> tuple[list[Any], Shape | None]:
    """Append layers to a branch to match the target shape."""
    if len(output) != len(target):
        if len(target) > 1:
            return nodes, None
        nodes, output = _append_layer(d, nodes, output, "GlobalAvgPooling", schemes)
    if output[:-1] != target[:-1]:
        missing = [w - n for n, w in zip(output[:-1], target[:-1], strict=True)]
        first = [d.int(min(m, 0), max(m, 0)) for m in missing]
        sides = tuple((a, m - a) for a, m in zip(first, missing, strict=True))
        if max(missing) <= 0:
            adapter = ("Crop", {"name": d.name("Crop"), "cropping": tuple((-a, -b) for a, b in sides)})
        else:
            adapter = ("Pad", {"name": d.name("Pad"), "padding": sides})
        nodes, output = [*nodes, adapter], (*target[:-1], output[-1])
    if kind == "Sum" and output[-1] != target[-1]:
        adapter = ("Conv", {"name": d.name("Conv"), "out_channels": target[-1], "kernel_size": 1})
        if len(target) == 1:
            adapter = ("FC", {"name": d.name("FC"), "out_features": target[-1]})
        nodes, output = [*nodes, adapter], target
    return nodes, output


def _draw_bias(d: ChoiceSampler) -> dict[str, Any]:
    return {"bias": False} if d.maybe(0.2) else {}


def _draw_activation_argument(d: ChoiceSampler, channels: int) -> dict[str, Any]:
    return {"activation": _draw_activation(d, channels)} if d.maybe() else {}


def _draw_activation(d: ChoiceSampler, channels: int) -> str:
    activation: str = d.pick(ACTIVATIONS)
    # a softmax of one channel is constant, and a norm of it consists of rounding errors
    return "Logistic" if activation == "Softmax" and channels == 1 else activation
