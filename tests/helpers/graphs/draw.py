"""Random cases: a pure function of a seed and a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

import neondist as nd

from .build import node, refusal
from .case import Case, Grid, leaves
from .layouts import LAYOUTS

Shape = tuple[int, ...]
LARGEST = 400
"""numbers of an activation"""
ACTIVATIONS = ["ReLU", "Tanh", "Logistic", "Softmax", "Identity"]
EXACT = [
    "halo", "halo(backward=auto)", "halo(backward=gather)", "deep_halo", "deep_halo(layers=9)", "overlap_tile",
    "overlap_tile(statistics=global)", "auto", "auto(latency=1e-3)", "every(j=1)", "tower(merge=true)",
]  # fmt: skip
OTHERS = [
    "tower", "tower(fill=reflect)", "tower(fill=replicate)", "halo_oneway", "stale", "stale(steps=2)", "every",
    "every(between=zeros)", "every(between=replicate)", "quantised", "quantised(bits=8, feedback=true)",
]  # fmt: skip
GRIDS: list[Grid] = [
    (1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 3), (2, 1, 1, 1), (1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 2, 1),
    (1, 1, 3, 1), (1, 1, 1, 5), (3, 1, 1, 2), (1, 1, 3, 2), (1, 1, 7, 1), (2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 3, 3),
]  # fmt: skip


class Draw:
    """Random choices, small ones first."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.names = rng, 0

    def int(self, low: int, high: int) -> int:
        """Return an integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def maybe(self, chance: float = 0.5) -> bool:
        """Return True with this chance."""
        return bool(self.rng.random() < chance)

    def pick(self, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        return choices[self.int(0, len(choices) - 1)]

    def early(self, choices: Sequence[Any]) -> Any:
        """Return one of the choices, rather an early one."""
        return choices[int(len(choices) * self.rng.random() ** 1.6)]

    def axes(self, ndim: int, low: int, high: int) -> Any:
        """Return an integer, or one for each axis."""
        if self.maybe():
            return self.int(low, high)
        return tuple(self.int(low, high) for _ in range(ndim))

    def sides(self, ndim: int, low: int, high: int) -> Any:
        """Return an integer, one for each axis, or one for each side."""
        if self.maybe(0.6):
            return self.axes(ndim, low, high)
        return tuple((self.int(low, high), self.int(low, high)) for _ in range(ndim))

    def modes(self, ndim: int) -> Any:
        """Return a padding mode, or one for each axis."""
        choices = ["zeros", "zeros", "reflect", "replicate", "wrap"]
        return self.pick(choices) if self.maybe(0.7) else tuple(self.pick(choices) for _ in range(ndim))

    def kernel(self, ndim: int) -> Any:
        """Return a kernel_size, seldom a large one."""
        return self.axes(ndim, 1, 4 if self.maybe(0.9) else 7)

    def channels(self, most: int) -> int:
        """Return a number of channels, seldom a large one: kernels do that in other ways."""
        return self.int(1, most) if self.maybe(0.95) else self.int(16, 18)

    def name(self, kind: str) -> str:
        """Return a name that is not taken."""
        self.names += 1
        return f"{kind.lower()}{self.names}"


def conv(d: Draw, shape: Shape) -> dict[str, Any]:
    ndim, groups = len(shape) - 1, d.pick([g for g in (1, 1, 2, 3) if shape[-1] % g == 0])
    given = {"out_channels": groups * d.channels(4 // groups), "kernel_size": d.kernel(ndim)}
    given |= {"padding": d.pick(["same", d.sides(ndim, 0, 2), d.sides(ndim, 0, 2), d.sides(ndim, 3, 7), 1])}
    given |= {"padding_mode": d.modes(ndim)}
    given |= {"stride": d.axes(ndim, 1, 3)} if d.maybe(0.4) else {}
    given |= {"dilation": d.axes(ndim, 1, 3)} if d.maybe(0.3) else {}
    given |= {"groups": groups} if groups > 1 else {}
    return given | _bias(d) | _activation(d, given["out_channels"])


def deconv(d: Draw, shape: Shape) -> dict[str, Any]:
    ndim, groups = len(shape) - 1, d.pick([g for g in (1, 1, 2, 3) if shape[-1] % g == 0])
    given = {"out_channels": groups * d.int(1, 4 // groups), "kernel_size": d.axes(ndim, 1, 4)}
    stride = d.axes(ndim, 1, 3)
    given |= {"stride": stride} if d.maybe(0.7) else {}
    each = given.get("stride", 1)
    each = (each,) * ndim if isinstance(each, int) else each
    given |= {"output_padding": tuple(d.int(0, s - 1) for s in each)} if d.maybe() else {}
    given |= {"padding": d.sides(ndim, 0, 3)} if d.maybe(0.7) else {}
    given |= {"dilation": d.axes(ndim, 1, 2)} if d.maybe(0.3) else {}
    given |= {"groups": groups} if groups > 1 else {}
    return given | _bias(d) | _activation(d, given["out_channels"])


def pooling(d: Draw, shape: Shape) -> dict[str, Any]:
    ndim, kernel = len(shape) - 1, d.kernel(len(shape) - 1)
    least = min((kernel,) if isinstance(kernel, int) else kernel)
    given = {"kernel_size": kernel} | ({"stride": d.axes(ndim, 1, 3)} if d.maybe(0.6) else {})
    return given | ({"padding": d.sides(ndim, 0, least - 1)} if d.maybe() else {})


def avg_pooling(d: Draw, shape: Shape) -> dict[str, Any]:
    return pooling(d, shape) | ({"count_include_pad": False} if d.maybe() else {})


def upsample(d: Draw, shape: Shape) -> dict[str, Any]:
    ndim = len(shape) - 1
    return {"factor": d.axes(ndim, 1, 3 if d.maybe() else 6), "mode": d.pick(["nearest", "bilinear"])}


def pad(d: Draw, shape: Shape) -> dict[str, Any]:
    given = {"padding": d.sides(len(shape) - 1, -1 if d.maybe(0.3) else 0, 3)}
    given |= {"mode": d.modes(len(shape) - 1)}
    return given | ({"fill": 1.5} if d.maybe(0.3) else {})


def crop(d: Draw, shape: Shape) -> dict[str, Any]:
    return {"cropping": d.sides(len(shape) - 1, 0, 2)}


def local_filtering(d: Draw, shape: Shape) -> dict[str, Any]:
    ndim = len(shape) - 1
    given = {"out_channels": d.int(1, 3), "kernel_size": d.axes(ndim, 1, 3)}
    given |= {"stride": d.axes(ndim, 1, 2)} if d.maybe(0.4) else {}
    given |= {"padding": d.sides(ndim, 0, 2)} if d.maybe() else {}
    given |= {"bias": True} if d.maybe() else {}
    return (
        given
        | ({"shared": d.pick([True, d.axes(ndim, 1, 3)])} if d.maybe(0.3) else {})
        | _activation(d, given["out_channels"])
    )


def lcn(d: Draw, shape: Shape) -> dict[str, Any]:
    sizes = d.pick([1, 3, 5, tuple(2 * d.int(0, 2) + 1 for _ in shape[1:])])
    given = {
        "kernel_size": sizes,
        "min_deviation": d.pick([0.3, 1.0, "mean"]),
        "halo": d.pick(["auto", "twice", "wide"]),
    }
    given |= {"window": "uniform"} if d.maybe() else {"sigma": 1.5} if d.maybe() else {}
    return given | ({"padding_mode": "reflect"} if d.maybe() else {})


def lrn(d: Draw, shape: Shape) -> dict[str, Any]:
    return {"depth": d.int(1, 5), "alpha": 0.5, "beta": d.pick([0.75, 1.0]), "k": d.pick([1.0, 2.0])}


def batch_norm(d: Draw, shape: Shape) -> dict[str, Any]:
    return {"eps": 0.1} | ({"momentum": 0.3} if d.maybe() else {})


def group_norm(d: Draw, shape: Shape) -> dict[str, Any]:
    groups = d.pick([g for g in (1, 2, 3, 4) if shape[-1] % g == 0])
    return {"groups": groups, "eps": 0.1} | ({"affine": False} if d.maybe(0.3) else {})


def instance_norm(d: Draw, shape: Shape) -> dict[str, Any]:
    return {"eps": 0.1} | ({"affine": True} if d.maybe() else {})


def fc(d: Draw, shape: Shape) -> dict[str, Any]:
    given = {"out_features": d.int(1, 4)}
    return given | _bias(d) | _activation(d, given["out_features"])


def nothing(d: Draw, shape: Shape) -> dict[str, Any]:
    return {}


VECTORS: dict[str, Callable[[Draw, Shape], dict[str, Any]]] = {
    "FC": fc, "BatchNorm": batch_norm, "GroupNorm": group_norm, "LRN": lrn,
    "Activation": lambda d, shape: {"activation": _drawn_activation(d, shape[-1])},
    "Dropout": lambda d, shape: {"rate": d.pick([0.0, 0.3, 0.6])},
}  # fmt: skip
IMAGES = VECTORS | {
    "Conv": conv, "Deconv": deconv, "MaxPooling": pooling, "AvgPooling": avg_pooling, "L2Pooling": pooling,
    "Upsample": upsample, "Pad": pad, "Crop": crop, "LocalFiltering": local_filtering, "LCN": lcn,
    "InstanceNorm": instance_norm, "GlobalAvgPooling": nothing,
}  # fmt: skip
ENDS = ("FC", "GlobalAvgPooling")
WINDOWED = (
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
)
WEIGHTS = {"Conv": 6, "Deconv": 2, "MaxPooling": 2, "LocalFiltering": 1.5}


def draw_case(seed: int, number: int, grids: Sequence[Grid] = GRIDS, others: Sequence[Grid] = GRIDS) -> Case:
    """Return case `number` of a seed, for one of these grids and one of the others."""
    rng = np.random.default_rng([seed, number])
    while True:
        case = _case(Draw(rng), grids, others)
        if case is not None:
            return case


def _case(d: Draw, grids: Sequence[Grid], others: Sequence[Grid]) -> Case | None:
    ndim = d.pick([1, 2, 2, 2, 3])
    shape = (*(d.int(1, (0, 17, 9, 5)[ndim]) for _ in range(ndim)), d.channels(4))
    grid, other = d.early(grids), d.early(others)
    approximate = d.maybe(0.2)
    schemes = OTHERS if approximate else EXACT
    network, output_shape = _chain(d, shape, d.int(1, 4), depth=2, schemes=schemes)
    if d.maybe(0.4) and len(output_shape) > 1:
        network, output_shape = _more(d, network, output_shape, d.pick(ENDS), schemes)
    if not leaves(network):
        return None
    replicas = max(grid[0], other[0])
    batch = d.int(replicas, max(5, replicas))
    remembers = approximate and 3  # its first steps are others
    image = len(output_shape) > 1
    case = Case(
        shape=shape,
        network=network,
        batch=batch,
        rest=d.int(1, batch),
        steps=max(remembers + 1, 2),
        grid=grid,
        other=other,
        scheme=d.pick(schemes) if d.maybe(0.7) else "halo",
        backend=d.pick(["numpy", "torch", "torch throughout"]),
        dtype="float32" if d.maybe(0.15) else "float64",
        twin=d.maybe(0.3),
        cost=d.pick(["SumSquared", "CrossEntropy", *(["Dice"] * image)]),
        optimizer=d.pick([
            ("SGD", {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
            ("SGD", {"learning_rate": 0.01, "momentum": 0.5, "nesterov": True}),
            # a large eps: a bias before batch normalisation has gradient 0, whose rounding errors Adam would blow up
            ("Adam", {"learning_rate": 0.01, "eps": 1e-3}),
        ]),
        layout=d.pick(LAYOUTS) if d.maybe(0.6) else "plain",
        seed=d.int(0, 999),
    )  # fmt: skip
    how = {
        "strips": d.pick([1, 2, 3, 5, "auto"]) if d.maybe(0.6) else None,
        "memory": "1TiB" if d.maybe(0.5) else None,  # with `strips`, as much as can goes in strips from the image on
        "recompute": d.maybe(0.3),
        "accumulate": d.int(2, 3) if d.maybe(0.2) else 1,
    }
    for scheme in (case.scheme, "halo"):  # not every scheme can serve every network, nor every way to execute it
        for more in (how, {"strips": how["strips"], "memory": how["memory"]}):
            if refusal(case.changed(scheme=scheme, **more)) is None:
                return case.changed(scheme=scheme, **more)
    return None


def _chain(d: Draw, shape: Shape, length: int, depth: int, schemes: Sequence[str]) -> tuple[list[Any], Shape]:
    """Return layers one after the other, and what they give."""
    nodes: list[Any] = []
    for _ in range(length):
        if depth and d.maybe(0.3):
            made, shape = _container(d, shape, depth - 1, schemes)
            nodes.append(made)
        elif depth and d.maybe(0.06):
            nodes.append(identity(d))
        else:
            kinds = list(IMAGES) if len(shape) > 1 else list(VECTORS)
            weights = np.array([0.3 if kind in ENDS and depth else WEIGHTS.get(kind, 1) for kind in kinds])
            kind = str(d.rng.choice(kinds, p=weights / weights.sum()))
            nodes, shape = _more(d, nodes, shape, kind, schemes)
    return nodes, shape


def _more(d: Draw, nodes: list[Any], shape: Shape, kind: str, schemes: Sequence[str]) -> tuple[list[Any], Shape]:
    """Return the nodes and one layer more, if one of this kind is found that fits."""
    for _ in range(8):
        layer = (kind, {"name": d.name(kind)} | (IMAGES[kind])(d, shape))
        if kind in WINDOWED and d.maybe(0.12):
            layer[1]["scheme"] = d.pick(schemes)
        output = _fits(layer, shape)
        if output is not None:
            return [*nodes, layer], output
    return nodes, shape


def _fits(layer: tuple[str, dict[str, Any]], shape: Shape) -> Shape | None:
    """Return what a layer gives, if it can stand here and is small."""
    try:
        made = node(layer, dist=False)
        output = made.output_shape_for(shape)
        numbers = [prod(output), *(prod(p.shape) // 8 for p in made.parameters_for(shape).values())]
        nd.Convnet([made]).plan(shape)
    except nd.UserError:
        return None
    return output if max(numbers) <= LARGEST else None


def _container(d: Draw, shape: Shape, depth: int, schemes: Sequence[str]) -> tuple[Any, Shape]:
    """Return a Sequential, Sum or Concat whose branches fit."""
    kind = d.pick(["Sum", "Concat", "Sum", "Concat", "Sequential", "list"])
    if kind in ("Sequential", "list"):
        nodes, output = _chain(d, shape, d.int(0, 2), depth, schemes)
        return (nodes if kind == "list" else (kind, nodes)), output
    branches = [_chain(d, shape, d.int(0, 3), depth, schemes) for _ in range(d.int(1, 3))]
    wanted = shape if d.maybe(0.6) else branches[0][1]
    wanted = wanted if len(wanted) > 1 or len(shape) == 1 else shape
    fitted = [_fitted(d, nodes, output, wanted, kind, schemes) for nodes, output in branches]
    if wanted == shape or (kind == "Concat" and wanted[:-1] == shape[:-1]):
        fitted += [(identity(d), shape) for _ in range(d.pick([0, 1, 1, 2]))]
    d.rng.shuffle(fitted)  # type: ignore[arg-type]
    fitted = [pair for pair in fitted if pair[1] is not None]
    if not fitted or prod(wanted[:-1]) * sum(output[-1] for _, output in fitted) > LARGEST:
        return [], shape
    channels = sum(output[-1] for _, output in fitted) if kind == "Concat" else wanted[-1]
    return (kind, [nodes for nodes, _ in fitted]), (*wanted[:-1], channels)


def identity(d: Draw) -> Any:
    """Return something that gives on what it gets."""
    return d.pick([[], [], [[]], ("Sequential", []), ("Concat", [[]]), ("Sum", [[]]), [("Sum", [[]]), []]])


def _fitted(
    d: Draw, nodes: list[Any], output: Shape, wanted: Shape, kind: str, schemes: Sequence[str]
) -> tuple[list[Any], Shape | None]:
    """Return a branch, with layers at its end that make it fit."""
    if len(output) != len(wanted):
        if len(wanted) > 1:
            return nodes, None
        nodes, output = _more(d, nodes, output, "GlobalAvgPooling", schemes)
    if output[:-1] != wanted[:-1]:
        missing = [w - n for n, w in zip(output[:-1], wanted[:-1], strict=True)]
        first = [d.int(min(m, 0), max(m, 0)) for m in missing]
        sides = tuple((a, m - a) for a, m in zip(first, missing, strict=True))
        if max(missing) <= 0:
            made = ("Crop", {"name": d.name("Crop"), "cropping": tuple((-a, -b) for a, b in sides)})
        else:
            made = ("Pad", {"name": d.name("Pad"), "padding": sides})
        nodes, output = [*nodes, made], (*wanted[:-1], output[-1])
    if kind == "Sum" and output[-1] != wanted[-1]:
        made = ("Conv", {"name": d.name("Conv"), "out_channels": wanted[-1], "kernel_size": 1})
        if len(wanted) == 1:
            made = ("FC", {"name": d.name("FC"), "out_features": wanted[-1]})
        nodes, output = [*nodes, made], wanted
    return nodes, output


def _bias(d: Draw) -> dict[str, Any]:
    return {"bias": False} if d.maybe(0.2) else {}


def _activation(d: Draw, channels: int) -> dict[str, Any]:
    return {"activation": _drawn_activation(d, channels)} if d.maybe() else {}


def _drawn_activation(d: Draw, channels: int) -> str:
    found: str = d.pick(ACTIVATIONS)
    return (
        "Logistic" if found == "Softmax" and channels == 1 else found
    )  # all ones, and a norm gives but rounding errors
