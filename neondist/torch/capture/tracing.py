"""Context in which PyTorch traces a module, and translation of PyTorch's errors."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode, _push_mode

from ...errors import ConfigError
from ..ir.errors import CaptureError
from ..ir.registry import TRACING_LOCK

_TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")  # not torchvision
_STDLIB_FOLDER = sysconfig.get_path("stdlib")
InputSpecs = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shapes and dtypes of a module's inputs."""
SHAPE_REMEDY = (
    "a module's computation may depend on the shapes of tensors, but not on their values: instead of selecting"
    " elements, use torch.where, or multiply by the mask and divide by its sum"
)
_VALUE_READ_ERRORS = "FakeTensor.__format__", ".numpy() is not supported"
_WRONG_ARGUMENT_ERRORS = "missing a required argument", "too many positional arguments"
_DICTIONARY_ERRORS = (
    "too many indices for tensor", "invalid data type 'str'", "values expected sparse", "'keys'", "'items'", "'get'"
)  # fmt: skip
_TRANSFORM_ERRORS = "Cannot access data pointer", "Cannot access storage", "Expected FakeTensor, got"
DTYPE_ERROR_PATTERN = re.compile("dtype|scalar type|Input type|predicate to be bool|[Ll]ong, |[Ii]nteger")
_OUTPUT_CLASS_PATTERN = re.compile("Found <class '([^']+)'> in output, which is not a known type")
_FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+), in')


@contextmanager
def tracing(subject: str, shapes: InputSpecs) -> Iterator[None]:
    """Serialise tracing and neutralise the caller's settings; errors in the context are raised as ConfigError."""
    with (
        TRACING_LOCK,
        _suppress_logs(),
        torch.inference_mode(False),
        torch.enable_grad(),
        suspend_hooks_and_modes(),
        _disable_caches_and_validation(),
    ):
        try:
            yield
        except Exception as error:
            raise ConfigError(_describe_error(subject, shapes, error)) from error


@contextmanager
def suspend_hooks_and_modes() -> Iterator[None]:
    """Suspend this thread's saved-tensor hooks and dispatch modes, such as those of `torch.utils.checkpoint`.

    PyTorch's `_disable_current_modes` would also suspend the modes of an export in another thread.
    """
    autograd, hooks = torch._C._autograd, list[Any]()
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Create ordinary tensors even in inference_mode: inference tensors allow no gradients or in-place changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _suppress_logs() -> Iterator[None]:
    """Suppress PyTorch's warnings and log messages; the ConfigError contains the message of the error."""
    loggers_by_name = logging.root.manager.loggerDict
    loggers = [loggers_by_name[name] for name in list(loggers_by_name) if name.partition(".")[0] == "torch"]
    enabled_loggers = [log for log in loggers if isinstance(log, logging.Logger) and not log.disabled]
    for log in enabled_loggers:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in enabled_loggers:
            log.disabled = False


@contextmanager
def hide_printed_graph() -> Iterator[None]:
    """Remove from stderr the graph that torch.export prints when it fails."""
    graph, stderr = "", io.StringIO()
    try:
        with redirect_stderr(stderr):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        sys.stderr.write(stderr.getvalue().replace(graph, "") if graph else stderr.getvalue())


@contextmanager
def allow_self_assignment() -> Iterator[None]:
    """Let modules assign a buffer to itself, which torch.export rejects because no operator computes the value."""

    def alias_if_traced(module: nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        is_traced = isinstance(value, FakeTensor) and module._buffers.get(name) is value
        return torch.ops.aten.alias(value) if is_traced else None

    hook: Any = alias_if_traced  # PyTorch declares hooks without results
    with register_module_buffer_registration_hook(hook):
        yield


@contextmanager
def _disable_caches_and_validation() -> Iterator[None]:
    """Keep traced tensors, which have no values, out of PyTorch's caches and of the validation of distributions."""
    set_validation: Any = Distribution.set_default_validate_args
    cache: Any = parametrize
    was_caching_casts, was_validating = torch.is_autocast_cache_enabled(), Distribution._validate_args
    parametrize_cache = cache._cache_enabled, cache._cache
    torch.set_autocast_cache_enabled(False)
    set_validation(False)
    cache._cache_enabled, cache._cache = 0, {}
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_caching_casts)
        set_validation(was_validating)
        cache._cache_enabled, cache._cache = parametrize_cache


@contextmanager
def register_dataclasses_of_outputs(module: nn.Module) -> Iterator[None]:
    """Register the dataclasses that a module returns, which torch.export and `gather` otherwise reject."""

    def register(outputs: Any) -> None:
        for leaf in pytree.tree_leaves(outputs):
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                torch.export.register_dataclass(type(leaf))
                register(leaf)

    with module.register_forward_hook(lambda _module, _inputs, outputs: register(outputs)):
        yield


def _describe_error(subject: str, shapes: InputSpecs, error: Exception) -> str:
    input_shapes = ", ".join(str(tuple(shape)) for shape, _ in shapes)
    frames = user_frames("".join(traceback.format_exception(error)))
    location = (isinstance(error, CaptureError) and error.source) or next(iter(frames[::-1]), "")
    source = f"{location}: " if location else ""
    name = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    why = first_line if isinstance(error, CaptureError) else f"{name}: {first_line}"
    if isinstance(error, TypeError) and any(text in first_line for text in _WRONG_ARGUMENT_ERRORS):
        why = f"{why}; give one input per required argument of forward, or wrap the module"
    if any(text in first_line for text in _DICTIONARY_ERRORS):
        why = f"{why}; inputs are tensors: if forward takes a dictionary, wrap the module in one that builds it"
    if not isinstance(error, CaptureError) and DTYPE_ERROR_PATTERN.search(first_line):
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for _, dtype in shapes)
        why = (
            f"{why}; inputs have dtype {dtypes}: if the module needs others, pass dtype= (a list for several inputs),"
            " or, in a model-definition file, return them from feed"
        )
    if "DataDependent" in name or any(text in first_line for text in _VALUE_READ_ERRORS):
        why = (
            "an if, a float(), an .item(), a .numpy() or a format string needs the value of a tensor; a module's"
            " computation may depend on the shapes of tensors, but not on their values: use torch.where instead"
        )
        if subject == "criterion":
            why += (
                "; compute what depends only on the target, such as its distance map, beforehand, and pass it as a part"
                " of the target; or use nd.AutoDist, with which a criterion gets whole outputs"
            )
    # numbers of selected elements are size-like, unlike values of elements
    if "DynamicOutputShape" in name or "PendingUnbackedSymbol" in name or "(Size-like symbols: u" in first_line:
        operator = f" of {first_line}" if first_line.startswith("aten.") else ""
        why = f"the shape of a result{operator} depends on the values of tensors; {SHAPE_REMEDY}"
    if output_class := _OUTPUT_CLASS_PATTERN.search(first_line):
        why = (
            f"the output contains an object of class {output_class[1]}; return tensors, or tuples, lists, dictionaries"
            " or dataclasses of tensors"
        )
    if "UncapturedHigherOrderOp" in name:
        why = "torch.cond and PyTorch's other higher-order operators cannot be captured; use torch.where instead"
    if any(text in first_line for text in _TRANSFORM_ERRORS):
        why = (
            "a torch.func transform, copy.deepcopy or a memory address cannot be captured; compute with ordinary"
            " operators instead"
        )
    return f"{source}{subject} cannot be captured for inputs of shape {input_shapes}: {why}"


def user_frames(traceback_text: str) -> list[str]:
    """Return 'file:line' of the frames outside PyTorch, neondist and the standard library, the innermost last."""
    package = os.path.dirname(os.path.dirname(__file__))
    excluded_prefixes = (_TORCH_FOLDER, package, "<")
    return [
        f"{file}:{line}"
        for file, line in _FRAME_PATTERN.findall(traceback_text)
        if not file.startswith(excluded_prefixes) and (not file.startswith(_STDLIB_FOLDER) or "site-packages" in file)
    ]
