"""From the words on the command line to an experiment: its file, `--set`, and `--import` of the user's own classes."""

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
from ..config import load_experiment, place
from ..errors import ConfigError, LaunchError, UserError
from ..launcher.launch import FORCE
from ..launcher.workers import SERVERS
from ..registry import suggest

_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads


def load(arguments: argparse.Namespace) -> Any:
    """Return the experiment of `file`, with `--import` and `--set` applied."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    modules = [import_module(module) for module in arguments.modules]
    experiment = load_experiment(arguments.file, arguments.settings, modules=modules)
    if SERVERS in os.environ and experiment.server_strategy is not None:
        experiment.grid |= {"replicas": 1}  # this process's; the others are workers of their own
    return experiment


def validated(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    """Return the experiment once it is right on every rank: file, data and grid; collective."""

    from ..models import made_of_layers

    def check(experiment: Any) -> None:
        experiment.validate(ranks)
        what, remedy = getattr(arguments, "of_layers", None) or ("", "")
        if what:
            made_of_layers(experiment.model, what, remedy)
        replicas, cells = experiment.grid.get("replicas", 1) or ranks, prod(experiment.dataset.sample_shape[:-1])
        if ranks > replicas * cells and not arguments.force:
            raise LaunchError(
                f"{ranks} ranks for images of {cells} cells: some ranks would have no cells; give at most"
                f" {replicas * cells}"
                f" ranks, or more replicas; {FORCE}"
            )

    return loaded(arguments, world, check)


def loaded(arguments: argparse.Namespace, world: Transport, check: Callable[[Any], None] | None = None) -> Any:
    """Return the experiment of the file, once it passes `check` on every rank; collective."""
    from ..comm import agree

    experiment: Any = None
    error: Exception | None = None
    try:
        experiment = load(arguments)
        if check is not None:
            check(experiment)
    except UserError as problem:
        error = place(problem)  # now, because the message travels to the other ranks and its subject does not
    except Exception as problem:
        error = problem
    agree(world, error)
    return experiment


def import_module(name: str, option: str = "--import ") -> str:
    """Import a module by its dotted name, or a .py file by its path, and return its name; twice does nothing more.

    Parameters
    ----------
    name : str
    option : str
        What messages begin with, before the name.

    Raises
    ------
    ConfigError
        The module is not there, or fails while it is imported; the message says where.
    """
    with _ONE_AT_A_TIME:
        return _import(name, option)


def load_factory(text: str, option: str) -> Callable[..., Any]:
    """Return what FILE.py:NAME, or MODULE:NAME, is; ConfigError, with the option, if it is not a function."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"{option}{text}: does not name a function; expected FILE.py:NAME or MODULE:NAME")
    module = sys.modules[import_module(place, option)]
    found = getattr(module, name, None)
    if not callable(found):
        members = inspect.getmembers(module, callable)
        own = [n for n, one in members if getattr(one, "__module__", None) == module.__name__]
        remedy = f"; name one of {', '.join(own)}" if own else "; define a class or a function"
        if found is not None:
            raise ConfigError(f"{option}{text}: {name} is a {type(found).__name__}{remedy}")
        raise ConfigError(f"{option}{text}: {place} has no '{name}'{suggest(name, own) or remedy}")
    made: Callable[..., Any] = found
    return made


def _import(name: str, option: str) -> str:
    path = Path(name)
    is_file = path.suffix == ".py" or os.sep in name or (path.suffix != "" and path.is_file())
    if is_file and not path.is_file():
        raise ConfigError(f"{option}{name}: no such file; give the path of a .py file, or a module's name")
    if is_file and path.suffix != ".py":
        raise ConfigError(f"{option}{name}: is not a Python file; give the path of a .py file, or a module's name")
    try:
        if is_file:
            _import_file(path)
        else:
            _reach(Path.cwd())
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        sys.modules.pop(path.stem if is_file else name, None)
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            what = "no module of this name; give a module's name, or the path of a .py file"
        else:
            what = f"{_line(error)}{type(error).__name__}: {error}; a module must import without errors"
        raise ConfigError(f"{option}{name}: {what}") from error
    return path.stem if is_file else name


def _import_file(path: Path) -> None:
    known = sys.modules.get(path.stem)
    if getattr(known, "__file__", None) == str(path.absolute()):
        return  # a second time it would make other classes of the same names
    _reach(path.resolve().parent)  # as for a script: files next to it can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


def _reach(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _line(error: BaseException) -> str:
    """Return 'FILE:LINE: ' of the user's code that failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if len(frames) > 1 + (frames[-1].filename == __file__) else ""
