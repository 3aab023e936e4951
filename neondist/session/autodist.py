"""Distribution of a single-process script by a resource spec, a scope for its models, and a decorated step."""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, TypeVar

import numpy as np

from .. import safe_path
from ..cluster import ResourceSpec
from ..comm import ProcessGrid, SingleTransport
from ..errors import ConfigError, LaunchError
from ..geometry import grid_shape
from ..models import Model
from ..models.whole_batches import distribute_created_models
from ..registry import suggest
from ..strategies import Strategy, StrategyBuilder, as_strategy
from ..strategies.auto import AutoStrategy, resolve_grid
from ..system.job import detect_job
from ..terminal.script_errors import install_script_error_hook
from ..train import Hook
from ..version import find_module_spec
from .distributed_session import DistributedSession

Function = TypeVar("Function", bound=Callable[..., Any])
_GRID_KEYS = "replicas", "rows", "cols", "planes"


class AutoDist:
    """Distribution of the training step of a script written for a single process.

    Inside an MPI job, AutoDist joins it. Otherwise, `python script.py` reruns the script on all devices of the resource
    spec, like `neondist launch`, and exits with that job's exit code; without a spec, it uses a single process. On
    entry to the scope, all ranks adopt rank 0's random states of Python, NumPy and PyTorch. Only rank 0 prints. Invalid
    input, if the error is not caught, ends the script on all ranks with one message and exit code 2.

    Parameters
    ----------
    resource_spec : ResourceSpec, path or mapping, optional
    strategy : StrategyBuilder, Strategy or str
        A builder of `nd.strategies`, its name, or the path of a strategy file.
    grid : ProcessGrid or mapping, optional
        Replicas and tiles, such as {'replicas': 2, 'rows': 2}. Default: the grid of a planned strategy, if it has one;
        otherwise one replica per rank.

    Attributes
    ----------
    resources : ResourceSpec or None
    grid : ProcessGrid

    Raises
    ------
    ConfigError
        If the resource spec is invalid or the strategy is unknown.
    GridError
        If the grid does not match the number of ranks.
    LaunchError
        If the job cannot be started.

    Examples
    --------
    >>> d = nd.AutoDist("resources.yaml", "PS")  # doctest: +SKIP
    >>> with d.scope():  # doctest: +SKIP
    ...     model = Net()
    >>> @d.function  # doctest: +SKIP
    ... def train_step(x, y): ...
    """

    def __init__(
        self,
        resource_spec: ResourceSpec | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        strategy: StrategyBuilder | Strategy | str = "AllReduce",
        grid: ProcessGrid | Mapping[str, int] | None = None,
    ) -> None:
        install_script_error_hook()
        job = detect_job(os.environ)
        if not (resource_spec is None or isinstance(resource_spec, ResourceSpec)):
            resource_spec = ResourceSpec(resource_spec)
        self.resources = resource_spec
        self._requested_strategy = as_strategy(strategy)
        if not isinstance(self._requested_strategy, StrategyBuilder | Strategy):
            raise ConfigError(f"strategy: expected a builder, its name or a strategy, got {strategy!r}")
        if isinstance(self._requested_strategy, AutoStrategy) and self.resources is not None:
            nodes = self.resources.ranks_by_node, self.resources.lowest_bandwidth
            self._requested_strategy = self._requested_strategy.on_nodes(*nodes)
        factors = None if isinstance(grid, ProcessGrid) else _grid_factors(grid, self._requested_strategy)
        is_standalone = job is None and not (isinstance(grid, ProcessGrid) and grid.size > 1)
        if is_standalone and self.resources is not None and self.resources.replicas > 1:
            if factors is not None:
                grid_shape(self.resources.replicas, **factors)
            _relaunch_with_launcher(self.resources)
        if isinstance(grid, ProcessGrid):
            self.grid = grid
        else:
            self.grid = ProcessGrid(SingleTransport() if job is None else None, **(factors or {}))
        self._scoped_models: list[Model] = []
        self._module_scope: Any = None
        self._partitioned_steps: Any = None
        self._scope_entered = self._has_divided_steps = self._inside_function = False
        if self.grid.rank and not self.grid.world.shares_process:
            self.grid.on_close(_mute_stdout())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Distribute the models created in this context: PyTorch modules or serial neondist models."""
        self._scope_entered = True
        with ExitStack() as stack:
            if find_module_spec("torch") is not None:
                from ..torch.module.module_scope import ModuleScope

                self._module_scope = self._module_scope or ModuleScope(self.grid)
                stack.enter_context(self._module_scope.collect_modules())
            stack.enter_context(distribute_created_models(self.grid, self._requested_strategy, self._scoped_models))
            self._share_random_states()
            yield

    def function(self, function: Function) -> Function:
        """Decorate a function of whole batches, such as a training step, so that its model calls run distributed.

        Losses from torch.nn are computed on tiles; all other operations receive whole outputs. The result is whole and
        the same on every rank. Outside such functions every rank runs PyTorch modules as in a single process; neondist
        models stay distributed.

        Raises
        ------
        ConfigError
            If no scope has been entered, or the function is a generator or coroutine. In a call: if a model was created
            outside the scope, or the strategy cannot be executed.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if not self._scope_entered:
            raise ConfigError(
                f"{_source_line(function)}: {name}: function() called outside a scope; call it inside or after the"
                " `with d.scope():` in which the models are created"
            ).mark_raised_on_all_ranks()
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or not callable(function):
            raise ConfigError(f"{_source_line(function)}: {name}: expected a function, not a generator or coroutine")

        @functools.wraps(function)
        def call_distributed(*args: Any, **kwargs: Any) -> Any:
            if self._inside_function or self._module_scope is None:
                return function(*args, **kwargs)
            return self._call_with_distributed_modules(function, args, kwargs)

        return call_distributed  # type: ignore[return-value]

    @property
    def strategy(self) -> StrategyBuilder | Strategy:
        """The strategy built for the PyTorch modules, or else the first built model, of the scopes so far.

        Before one exists, the `strategy` argument.
        """
        if plan := self._plan_module_parameters():
            return plan.strategy
        plans = [model.compiled for model in self._scoped_models if getattr(model, "compiled", None) is not None]
        return plans[0].parameters.strategy if plans else self._requested_strategy

    def session(
        self, checkpoint_dir: str | os.PathLike[str] | None = None, hooks: Sequence[Hook] = (), **settings: Any
    ) -> DistributedSession:
        """Return a session that trains the model of the scope; checkpoints include the optimiser and schedulers.

        Parameters
        ----------
        checkpoint_dir, hooks, **settings : as for DistributedSession

        Raises
        ------
        ConfigError
            If the scope has no model, or its PyTorch modules are not one model with one optimiser.
        """
        models: list[Any] = list(self._scoped_models)
        if self._module_scope is not None and self._module_scope.models:
            from ..torch.training.scope_script import ScopeScriptAdapter

            self._divide_steps_among_owners()
            models += ScopeScriptAdapter.create(self._module_scope, self._partitioned_steps)
        if not models:
            raise ConfigError(
                "session: there is no model; create one inside `with d.scope():` first"
            ).mark_raised_on_all_ranks()
        folder = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        return DistributedSession(model=models, checkpoint_dir=folder, hooks=hooks, **settings)

    def _call_with_distributed_modules(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from ..torch.module.tiled_output import gather_outputs

        self._divide_steps_among_owners()
        self._inside_function = True
        try:
            with self._module_scope.distribute(function):
                return gather_outputs(function(*args, **kwargs))
        finally:
            self._inside_function = False

    def _plan_module_parameters(self) -> Any:
        """Return the plan of the modules' parameters; None if there are no parameters."""
        parameters = {} if self._module_scope is None else self._module_scope.parameters
        if not parameters:
            return None
        from ..torch.module.parameters import plan_parameters, sparse_embedding_weights

        sparse_weights = set().union(*map(sparse_embedding_weights, self._module_scope.models))
        return plan_parameters(parameters, self.grid.shape, self._requested_strategy, sparse_weights)

    def _divide_steps_among_owners(self) -> None:
        """Divide optimiser steps among owners if the strategy requires it; do nothing after the first call."""
        if self._has_divided_steps:
            return
        self._has_divided_steps = True
        plan = self._plan_module_parameters()
        if plan is None:
            return
        if any(rule.compressor for rule in plan.strategy.parameters.values()):
            raise ConfigError(
                f"strategy: {plan.strategy.builder}: scripts need uncompressed gradients, such as for clipping;"
                " leave out the compressor, or use ndt.DistributedOptimizer"
            ).mark_raised_on_all_ranks()
        if plan.shares and self.grid.size > 1:
            from ..torch.training.partitioned_steps import PartitionedOptimizerSteps

            self._partitioned_steps = PartitionedOptimizerSteps(self._module_scope.parameters, self.grid, plan)

    def _share_random_states(self) -> None:
        """Broadcast the random states of rank 0, so that weights and shuffles are the same on every rank."""
        world = self.grid.world
        if world.size == 1 or world.shares_process:
            return
        torch = sys.modules.get("torch")
        states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state().numpy()
        python_state, numpy_state, torch_state = world.bcast(states if world.rank == 0 else None)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch.from_numpy(torch_state))


@contextmanager
def scope(
    resources: ResourceSpec | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    strategy: StrategyBuilder | Strategy | str = "AllReduce",
    grid: ProcessGrid | Mapping[str, int] | None = None,
) -> Iterator[AutoDist]:
    """Distribute the models created in this context; shorthand for `AutoDist` and its scope.

    Parameters
    ----------
    resources, strategy, grid : as for AutoDist

    Yields
    ------
    AutoDist
        Its `function` decorates the training step.

    Raises
    ------
    ConfigError, GridError, LaunchError
        As for AutoDist.

    Examples
    --------
    >>> with nd.scope("resources.yaml", "PS") as d:  # doctest: +SKIP
    ...     model = Net()
    >>> @d.function  # doctest: +SKIP
    ... def train_step(x, y): ...
    """
    d = AutoDist(resources, strategy, grid)
    with d.scope():
        yield d


def _grid_factors(grid: object, strategy: StrategyBuilder | Strategy) -> dict[str, Any]:
    """Return the factors of a grid; default: those of a planned strategy, or else one replica per rank."""
    if not (grid is None or isinstance(grid, Mapping)):
        raise ConfigError(f"grid: expected a ProcessGrid or a mapping such as {{'replicas': 2}}, got {grid!r}")
    for name in grid or {}:
        if name not in _GRID_KEYS:
            raise ConfigError(f"grid: unknown key '{name}'{suggest(str(name), _GRID_KEYS)}")
    return resolve_grid(strategy, dict(grid or {})) or {"replicas": None}


def _source_line(function: object) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "function"


def _mute_stdout() -> Callable[[], None]:
    """Redirect stdout to the null device; return the function that restores it."""
    with ExitStack() as stack:
        devnull = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(devnull))
        return stack.pop_all().close


def _relaunch_with_launcher(resources: ResourceSpec) -> None:
    """Replace this process with `neondist launch RESOURCES.yaml` with this script and its arguments."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file or not os.path.isfile(file):
        raise LaunchError(
            "AutoDist reruns the script on all devices, but this process has no script; write a script and run"
            " `python script.py`, or start the ranks with mpirun"
        )
    if resources.path is None:
        raise LaunchError("resource_spec: a job can only be started from a resource file; give AutoDist its path")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = safe_path.python_command("neondist", "launch", str(resources.path), os.path.abspath(file), *sys.argv[1:])
    os.execv(command[0], command)
