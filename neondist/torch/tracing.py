"""Circumstances in which PyTorch traces a module, and what its errors come to."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

import torch
from torch.distributions import Distribution

from ..errors import ConfigError
from .errors import NotRecorded
from .graph import DEVICES, autocast
from .registry import TRACING

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # not torchvision
_PYTHON = sysconfig.get_path("stdlib")
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]
"""Of a module's inputs."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


@contextmanager
def tracing(what: str, shapes: Shapes) -> Iterator[None]:
    """Let PyTorch trace, whatever the caller has set, and one at a time; its errors become ConfigError."""
    with TRACING, _quiet(), torch.inference_mode(False), torch.enable_grad(), _no_autocast(), _no_validation():
        try:
            yield
        except Exception as error:
            raise ConfigError(_explained(what, shapes, error)) from error


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Create tensors that any later pass may use: those of inference_mode allow neither gradients nor writes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Let PyTorch neither warn, nor write about what an error will say."""
    known = logging.root.manager.loggerDict
    loggers = [known[name] for name in list(known) if name.partition(".")[0] == "torch"]
    talking = [log for log in loggers if isinstance(log, logging.Logger) and not log.disabled]
    for log in talking:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in talking:
            log.disabled = False


@contextmanager
def no_graph() -> Iterator[None]:
    """Leave out of stderr the graph that torch.export prints when it fails."""
    graph, printed = "", io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        sys.stderr.write(printed.getvalue().replace(graph, "") if graph else printed.getvalue())


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device, enabled in zip(DEVICES, autocast(), strict=True):
            if enabled:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _no_validation() -> Iterator[None]:
    """Let torch.distributions not check the values of its arguments, which there are none of."""
    checks: Any = Distribution.set_default_validate_args
    before = Distribution._validate_args
    checks(False)
    try:
        yield
    finally:
        checks(before)


def _explained(what: str, shapes: Shapes, error: Exception) -> str:
    given = ", ".join(str(tuple(shape)) for shape, _ in shapes)
    frames = user_frames("".join(_traceback(error)))
    place = (isinstance(error, NotRecorded) and error.source) or next(iter(frames[::-1]), "")
    source = f"{place}: " if place else ""
    name = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    why = first if isinstance(error, NotRecorded) else f"{name}: {first}"
    if "DataDependent" in name:
        why = (
            "an if, a float() or an .item() needs the value of a tensor; a module's computation may depend on the"
            " shapes of tensors, but not on their values: use torch.where instead"
        )
    return f"{source}{what} cannot be captured for inputs of shape {given}: {why}"


def _traceback(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception(error)


def user_frames(text: str) -> list[str]:
    """Return 'file:line' of the frames that are not PyTorch's nor ours, the innermost last."""
    here = os.path.dirname(__file__)
    others = (_TORCH, here, "<")
    return [
        f"{file}:{line}"
        for file, line in _FRAME.findall(text)
        if not file.startswith(others) and (not file.startswith(_PYTHON) or "site-packages" in file)
    ]
