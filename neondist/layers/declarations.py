"""Checks of what a custom layer declares, before it is planned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from numbers import Integral

from ..comm import GROUP_NAMES
from ..errors import ConfigError
from ..geometry import Window
from ..registry.arguments import check_value
from ..registry.fields import resolve_type_hints
from .base import Layer, LayerDescription
from .functions import Activation
from .layout import Parameter, Shape, Shard, Tiled, check_storable
from .reduction import Reduction


def check_signatures(layer: Layer) -> None:
    """Raise ConfigError if `forward` or `backward` cannot be called with a context and an array."""
    for name, argument in (("forward", "view"), ("backward", "dy")):
        signature = inspect.signature(getattr(layer, name))
        try:
            signature.bind(None, None)
        except TypeError:
            raise ConfigError(
                f"{name}{signature}: must take the context of the call and an array; define"
                f" {name}(self, ctx, {argument}) (docs/adding_a_layer.md)"
            ) from None


def check_declarations(layer: Layer, input_shape: Shape) -> None:
    """Raise ConfigError if a declaration of the layer has an invalid type or value."""
    window = layer.window_for(input_shape)
    if window is not None and not isinstance(window, Window):
        raise ConfigError(f"window, or window_for, is {window!r}; expected an nd.Window, or None")
    parameters_and_state = layer.parameters_for(input_shape), layer.state_for(input_shape)
    output_shape, reductions = layer.output_shape_for(input_shape), layer.reductions_for(input_shape)
    if not (isinstance(output_shape, tuple) and all(isinstance(n, Integral) and int(n) > 0 for n in output_shape)):
        raise ConfigError(
            f"output shape {output_shape!r}; expected a tuple of positive integers from output_shape_for and"
            " output_channels_for"
        )
    for declared, name in zip(parameters_and_state, ("parameters_for", "state_for"), strict=True):
        if not (
            isinstance(declared, Mapping)
            and all(isinstance(key, str) and isinstance(p, Parameter) for key, p in declared.items())
        ):
            raise ConfigError(f"{name} returns {declared!r}; expected a dict of name to nd.Parameter")
        for key, parameter in declared.items():
            check_storable(name, key)
            _check_parameter(layer, f"{name}: '{key}'", parameter, input_shape, output_shape)
    if repeated := sorted(parameters_and_state[0].keys() & parameters_and_state[1].keys()):
        raise ConfigError(f"parameters_for and state_for both declare '{repeated[0]}'; rename one of them")
    if not (isinstance(reductions, Sequence) and all(isinstance(entry, Reduction) for entry in reductions)):
        raise ConfigError(f"reductions_for returns {reductions!r}; expected a list of nd.Reduction")
    for reduction in reductions:
        direction, group, *_ = reduction
        if direction not in ("forward", "backward") or group not in (None, *GROUP_NAMES):
            raise ConfigError(
                f"reductions_for returns a reduction in direction {direction!r} over {group!r}; expected 'forward'"
                f" or 'backward', and one of {', '.join(GROUP_NAMES)}, or None"
            )
        for field, hint in resolve_type_hints(Reduction).items():
            check_value(f"reductions_for: {field}", getattr(reduction, field), hint)
    _check_reduction_methods(layer, [reduction.direction for reduction in reductions])
    check_value("activation", layer.activation, Activation | None)
    if layer.distributed:
        _check_results_independent_of_tiling(layer, input_shape, output_shape, reductions)


def _check_parameter(layer: Layer, name: str, parameter: Parameter, input_shape: Shape, output: Shape) -> None:
    """Raise ConfigError unless the parameter can be divided as its layout requires."""
    layout, shape = parameter.layout, parameter.shape
    if isinstance(layout, Tiled) and (layout.ndim, shape[: layout.ndim]) != (len(output) - 1, output[:-1]):
        raise ConfigError(
            f"{name}: shape {shape} with the layout {layout}; its first axes must be the output's spatial axes,"
            f" {output[:-1]}"
        )
    if isinstance(layout, Shard) and (layout.input_shape, shape[:1]) != (input_shape, (prod(input_shape),)):
        raise ConfigError(
            f"{name}: shape {shape} with the layout {layout}; the layout must have the input shape {input_shape},"
            f" and the first axis its {prod(input_shape)} elements"
        )
    if isinstance(layout, Shard) and len(input_shape) == 1 and layer.layout is not Shard:
        raise ConfigError(
            f"{name}: each rank stores the rows of its range of the vector, but receives the whole vector; set"
            " layout = nd.Shard in the class"
        )


def _check_results_independent_of_tiling(
    layer: Layer, input_shape: Shape, output: Shape, reductions: Sequence[Reduction]
) -> None:
    """Raise ConfigError if outputs or gradients depend on the tiles."""
    window, reduced_directions = layer.window_for(input_shape), {entry.direction for entry in reductions if entry.group}
    extent, is_image = input_shape[:-1], len(output) > 1
    if extent and is_image and not layer.adds_output_halo:
        expected_extent = extent if window is None else window.output_extent(extent)
        if output[:-1] != tuple(expected_extent):
            raise ConfigError(
                f"output_shape_for returns the extent {output[:-1]}, but the window gives {tuple(expected_extent)};"
                " declare the window that the layer reads (for upsampling, derive it from nd.UpsampleLayer)"
            )
    if extent and not is_image and "forward" not in reduced_directions:
        raise ConfigError(
            f"the output {output} has no spatial axes, so it must be the same on all tiles of an image;"
            " compute it in reduce, declare the reduction in reductions_for, and return ctx.reduced"
        )
    if not extent and is_image and layer.has_input_gradient and "backward" not in reduced_directions:
        raise ConfigError(
            f"the input {input_shape} has no spatial axes, so its gradient is a sum over the tiles of the output;"
            " compute it in reduce_backward, declare the reduction in reductions_for, and return ctx.reduced"
        )


def _check_reduction_methods(layer: Layer, directions: Sequence[str]) -> None:
    """Raise ConfigError unless each method of a reduction is declared and each declared reduction has a method."""
    cls, declares_reductions = type(layer), type(layer).reductions_for is not LayerDescription.reductions_for
    for direction, method in (("forward", "reduce"), ("backward", "reduce_backward")):
        defines_method = getattr(cls, method) is not getattr(Layer, method)
        if direction in directions and not defines_method:
            raise ConfigError(
                f"reductions_for declares a reduction before {direction}, but {cls.__name__} has no method"
                f" {method}; define it, or leave out the declaration"
            )
        if defines_method and not declares_reductions:
            raise ConfigError(
                f"{method} is never called, because {cls.__name__} has no method reductions_for; declare the"
                " reduction there"
            )
        if directions.count(direction) > 1:
            raise ConfigError(f"reductions_for declares several reductions before {direction}; combine them in one")
