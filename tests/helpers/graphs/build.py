"""Models of a case."""

from __future__ import annotations

from math import prod
from typing import Any

from availability import KERNEL_VARIANTS, make_backend

import neondist as nd

from . import own_layers
from .case import Case, Grid, list_leaves

EXECUTION_FIELDS = ("strips", "memory", "recompute", "accumulate", "strategy", "sync")
CONTAINERS = ("Sequential", "Sum", "Concat")


def build_nodes(nodes: list[Any], dist: bool) -> list[Any]:
    """Return layers and containers, serial or distributed."""
    return [build_node(node, dist) for node in nodes]


def build_node(node: Any, dist: bool) -> Any:
    """Return one layer or container, or a list of them."""
    if isinstance(node, list):
        return build_nodes(node, dist)
    kind, arguments = node
    if kind in CONTAINERS:
        return getattr(nd, kind)(build_nodes(arguments, dist))
    arguments = dict(arguments)
    if "activation" in arguments:
        arguments["activation"] = getattr(nd, arguments["activation"])()
    module = own_layers if kind.startswith("Own") else nd
    return getattr(module, f"{kind}Layer{'Dist' if dist else ''}")(**arguments)


def build_model(case: Case, dist: bool) -> Any:
    """Return the model of a case, not built yet."""
    if dist and case.twin:
        return nd.distribute(_create_model(case, dist=False, scheme=case.scheme, with_execution=True))
    return _create_model(case, dist, case.scheme if dist else "halo", with_execution=dist)


def _create_model(case: Case, dist: bool, scheme: str, with_execution: bool) -> Any:
    (name, arguments), (cost, cost_arguments) = case.optimizer, case.cost
    return (nd.ConvnetDist if dist else nd.Convnet)(
        build_nodes(case.network, dist),
        cost=getattr(nd, cost)(**cost_arguments),
        optimizer=getattr(nd, name)(**arguments),
        seed=case.seed,
        backend=make_backend(case.backend if case.backend in KERNEL_VARIANTS else "numpy"),
        dtype=case.dtype,
        scheme=scheme,
        **({field: getattr(case, field) for field in EXECUTION_FIELDS} if with_execution else {}),
    )


def make_grid_shape(grid: Grid) -> nd.GridShape:
    """Return a grid shape for plans."""
    replicas, planes, rows, cols = grid
    return nd.GridShape(replicas, rows, cols, planes)


def make_process_grid(comm: Any, grid: Grid) -> nd.ProcessGrid:
    """Return a process grid."""
    replicas, planes, rows, cols = grid
    return nd.ProcessGrid(comm, replicas=replicas, rows=rows, cols=cols, planes=planes)


def is_exact(case: Case) -> bool:
    """Return whether all grids of a case must give the results of one process."""
    schemes = [layer.scheme for layer in build_model(case, dist=True).leaves]
    return all(scheme.exact for scheme in schemes) or all(
        make_grid_shape(grid).tiles == 1 for grid in (case.grid, case.second_grid)
    )


def find_refusal(case: Case) -> nd.UserError | None:
    """Return the error of an invalid case, such as a layer that does not fit its input, or None."""
    try:
        if case.accumulate > 1 and any(kind == "OwnCounter" for kind, _ in list_leaves(case.network)):
            return nd.ConfigError("counts micro-batches")
        output = build_model(case, dist=False).plan(case.shape)
        if not output or not list_leaves(case.network):
            return nd.ConfigError("no layers")
        normalised = [prod(plan.input_shape[:-1]) for plan in output if plan.class_name == "BatchNormLayer"]
        if case.last_batch == 1 in normalised:
            return nd.ConfigError("a batch with one value per channel")
        for grid in (case.grid, case.second_grid):
            build_model(case, dist=True).plan(case.shape, make_grid_shape(grid), case.batch)
            if case.batch < grid[0]:
                return nd.ConfigError("fewer samples than replicas")
    except nd.UserError as error:
        return error
    return None
