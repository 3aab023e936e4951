"""Modules created by factories, and the programs captured from them before distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...arrays.rng import key
from ...errors import ConfigError
from ..capture.capture import capture_module
from ..ir.registry import TRACING_LOCK
from .losses_and_optimizers import call_checked, unwrap_named_function


class ModuleFactory:
    """A function that returns a module, called once; the module is captured once for each shape and mode.

    Parameters
    ----------
    seed : int
        Seed for the module's initial weights, independent of other random numbers in this process.

    Attributes
    ----------
    rounded_parameter_names : list of str
        Parameters that the function creates in a dtype of higher precision than `dtype`.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], seed: int, dtype: torch.dtype
    ) -> None:
        self.function, self.arguments, self.seed, self.dtype = unwrap_named_function(function), arguments, seed, dtype
        self._programs: dict[Any, Any] = {}
        self.rounded_parameter_names: list[str] = []

    @cached_property
    def module(self) -> nn.Module:
        """The module.

        Raises
        ------
        ConfigError
            The function does not return a module.
        """
        with TRACING_LOCK, torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "weights") >> 1)
            module = call_checked("arguments", self.function, **self.arguments)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"factory: returned a {type(module).__name__}; it must return a torch.nn.Module")
        num_bits = torch.finfo(self.dtype).bits
        self.rounded_parameter_names = [
            name
            for name, p in module.named_parameters()
            if p.is_floating_point() and torch.finfo(p.dtype).bits > num_bits
        ]
        return module.to(self.dtype)

    def capture_program(self, shape: tuple[int, ...], training: bool, dtype: torch.dtype) -> Any:
        """Return the exported program for inputs of a global shape and dtype; set the module to the given mode."""
        module = self.module.train(training)
        if (shape, training) not in self._programs:
            self._programs[shape, training] = capture_module(module, [(shape, dtype)])
        return self._programs[shape, training]
