"""Loading of the experiment on the command line, with `--set`, and with `--import` for user-defined classes."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from ..comm import Transport
from ..config import add_location, load_experiment
from ..errors import ConfigError, LaunchError, UserError
from ..launcher.launch import FORCE_HINT
from ..launcher.workers import SERVERS_VARIABLE
from ..registry import suggest
from ..terminal.console import counted

DEFINITION_REMEDY = (
    "train it with neondist train MODEL.py (on several machines: mpirun --hostfile F neondist train ...)"
)
_IMPORT_LOCK = threading.Lock()  # ranks may be threads


def load_from_arguments(arguments: argparse.Namespace) -> Any:
    """Return the experiment of `file`, with `--import` and `--set` applied."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    if arguments.file.endswith(".py"):
        raise ConfigError(
            f"{arguments.file}: is a Python file, not a YAML experiment; give a FILE.yaml with its model as !TorchModel"
            f" {{factory: {Path(arguments.file).stem}:NAME}}, and --import {arguments.file}, or {DEFINITION_REMEDY}"
        )
    modules = [import_module(module) for module in arguments.modules]
    experiment = load_experiment(arguments.file, arguments.settings, modules=modules)
    if SERVERS_VARIABLE in os.environ and experiment.server_strategy is not None:
        experiment.grid |= {"replicas": 1}  # other replicas are separate workers
    return experiment


def load_and_validate(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    """Return the experiment after validating file, data and grid on every rank. Collective."""

    from ..models import require_layer_model

    def check_model(experiment: Any) -> None:
        experiment.validate(ranks)
        feature, remedy = getattr(arguments, "layers_only_feature", None) or ("", "")
        if feature:
            require_layer_model(experiment.model, feature, remedy)
        replicas, cells = experiment.grid.get("replicas", 1) or ranks, prod(experiment.dataset.sample_shape[:-1])
        if ranks > replicas * cells and not arguments.force:
            raise LaunchError(
                f"{ranks} ranks for images of {counted(cells, 'cell')}, so some ranks would have no cells; give at most"
                f" {counted(replicas * cells, 'rank')}, or more replicas; {FORCE_HINT}"
            )

    return load_experiment_on_all_ranks(arguments, world, check_model)


def load_experiment_on_all_ranks(
    arguments: argparse.Namespace, world: Transport, check: Callable[[Any], None] | None = None
) -> Any:
    """Return the experiment of the file after `check` on every rank. Collective."""
    from ..comm import raise_if_any_failed

    experiment: Any = None
    error: Exception | None = None
    try:
        experiment = load_from_arguments(arguments)
        if check is not None:
            check(experiment)
    except UserError as problem:
        error = add_location(problem)  # now, because other ranks receive only the message, not its subject
    except Exception as problem:
        error = problem
    raise_if_any_failed(world, error)
    return experiment


def import_module(name: str, message_prefix: str = "--import ") -> str:
    """Import a module by its dotted name, or a .py file by its path, and return its name; idempotent.

    Parameters
    ----------
    name : str
    message_prefix : str
        Prefix of the name in error messages.

    Raises
    ------
    ConfigError
        The module does not exist or fails to import; the message names the line.
    """
    with _IMPORT_LOCK:
        return _import_name_or_file(name, message_prefix)


def load_factory(text: str, message_prefix: str) -> Callable[..., Any]:
    """Return the callable FILE.py:NAME or MODULE:NAME; ConfigError, with the prefix, if there is none."""
    module_name, colon, name = text.rpartition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{message_prefix}{text}: does not name a function; expected FILE.py:NAME or MODULE:NAME")
    module = sys.modules[import_module(module_name, message_prefix)]
    member = getattr(module, name, None)
    if not callable(member):
        members = inspect.getmembers(module, callable)
        own_names = [n for n, value in members if getattr(value, "__module__", None) == module.__name__]
        remedy = f"; specify one of {', '.join(own_names)}" if own_names else "; define a class or a function"
        if member is not None:
            raise ConfigError(f"{message_prefix}{text}: {name} is a {type(member).__name__}{remedy}")
        raise ConfigError(f"{message_prefix}{text}: {module_name} has no '{name}'{suggest(name, own_names) or remedy}")
    factory: Callable[..., Any] = member
    return factory


def _import_name_or_file(name: str, message_prefix: str) -> str:
    path = Path(name)
    is_file = path.suffix == ".py" or os.sep in name or (path.suffix != "" and path.is_file())
    if is_file and not path.is_file():
        raise ConfigError(f"{message_prefix}{name}: no such file; give the path of a .py file, or a module's name")
    if is_file and path.suffix != ".py":
        raise ConfigError(
            f"{message_prefix}{name}: is not a Python file; give the path of a .py file, or a module's name"
        )
    try:
        if is_file:
            _import_file(path)
        else:
            _add_to_sys_path(Path.cwd())
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        sys.modules.pop(path.stem if is_file else name, None)
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            problem = "no module of this name; give a module's name, or the path of a .py file"
        else:
            problem = f"{_failing_location(error)}{type(error).__name__}: {error}; a module must import without errors"
        raise ConfigError(f"{message_prefix}{name}: {problem}") from error
    return path.stem if is_file else name


def _import_file(path: Path) -> None:
    loaded_module = sys.modules.get(path.stem)
    if getattr(loaded_module, "__file__", None) == str(path.absolute()):
        return  # reloading would define different classes with the same names
    _add_to_sys_path(path.resolve().parent)  # Python also adds the folder of a script to the path
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


def _add_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _failing_location(error: BaseException) -> str:
    """Return 'FILE:LINE: ' of the failing user code; '' if it is not known."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if len(frames) > 1 + (frames[-1].filename == __file__) else ""
