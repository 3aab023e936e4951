"""`--import`: modules with classes of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

from ..errors import ConfigError


def import_module(name: str) -> None:
    """Import a module by its dotted name, or a .py file by its path; what has been imported is left as it is.

    Raises
    ------
    ConfigError
        The module is not there, or fails while it is imported; the message says where.
    """
    path = Path(name)
    is_file = path.suffix == ".py" or os.sep in name
    if is_file and not path.is_file():
        raise ConfigError(f"--import {name}: no such file; give the path of a .py file, or a module's name")
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
        raise ConfigError(f"--import {name}: {what}") from error


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
