"""From a case to neondist's models."""

from __future__ import annotations

from typing import Any

from present import KERNELS, backend_of

import neondist as nd

from .case import Case, Grid, leaves

EXECUTION = ("strips", "memory", "recompute", "accumulate")
CONTAINERS = ("Sequential", "Sum", "Concat")


def network(nodes: list[Any], dist: bool) -> list[Any]:
    """Return layers and containers, serial or distributed."""
    return [node(one, dist) for one in nodes]


def node(one: Any, dist: bool) -> Any:
    """Return one layer or container, or a list of them."""
    if isinstance(one, list):
        return network(one, dist)
    kind, given = one
    if kind in CONTAINERS:
        return getattr(nd, kind)(network(given, dist))
    given = dict(given)
    if "activation" in given:
        given["activation"] = getattr(nd, given["activation"])()
    return getattr(nd, f"{kind}Layer{'Dist' if dist else ''}")(**given)


def model(case: Case, dist: bool) -> Any:
    """Return the model of a case, not built yet."""
    if dist and case.twin:
        return nd.distribute(_model(case, dist=False, scheme=case.scheme, executed=True))
    return _model(case, dist, case.scheme if dist else "halo", executed=dist)


def _model(case: Case, dist: bool, scheme: str, executed: bool) -> Any:
    name, given = case.optimizer
    return (nd.ConvnetDist if dist else nd.Convnet)(
        network(case.network, dist),
        cost=getattr(nd, case.cost)(),
        optimizer=getattr(nd, name)(**given),
        seed=case.seed,
        backend=backend_of(case.backend if case.backend in KERNELS else "numpy"),
        dtype=case.dtype,
        scheme=scheme,
        **({field: getattr(case, field) for field in EXECUTION} if executed else {}),
    )


def grid_shape(grid: Grid) -> nd.GridShape:
    """Return a grid for plans."""
    replicas, planes, rows, cols = grid
    return nd.GridShape(replicas, rows, cols, planes)


def process_grid(comm: Any, grid: Grid) -> nd.ProcessGrid:
    """Return a grid of ranks."""
    replicas, planes, rows, cols = grid
    return nd.ProcessGrid(comm, replicas=replicas, rows=rows, cols=cols, planes=planes)


def is_exact(case: Case) -> bool:
    """Tell whether its grids must give the numbers of one process."""
    schemes = [layer.scheme for layer in model(case, dist=True).leaves]
    return all(scheme.exact for scheme in schemes) or all(grid_shape(g).tiles == 1 for g in (case.grid, case.other))


def refusal(case: Case) -> nd.UserError | None:
    """Return why a case cannot be, if so: a layer that does not fit its input, or a scheme its layer."""
    try:
        output = model(case, dist=False).plan(case.shape)
        if not output or not leaves(case.network):
            return nd.ConfigError("no layers")
        for grid in (case.grid, case.other):
            model(case, dist=True).plan(case.shape, grid_shape(grid), case.batch)
            if case.batch < grid[0]:
                return nd.ConfigError("fewer samples than replicas")
    except nd.UserError as error:
        return error
    return None
