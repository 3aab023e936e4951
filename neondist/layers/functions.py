"""Activation functions; the backward pass uses only the output, so that no input is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..arrays.namespace import namespace
from ..backends import Kernels
from ..registry import Registered


class Activation(Registered, ABC):
    """Activation function, applied cell by cell.

    Attributes
    ----------
    elementwise : bool
        Whether the function acts on each channel independently. Set in the class that defines `fprop`.
    is_relu : bool
        Whether the function is max(z, 0). Set in the same class.
    """

    elementwise = is_relu = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Restore the generic `fprop_into` and `bprop_contiguous` in classes that override only `fprop` and `bprop`."""
        super().__init_subclass__(**kwargs)
        for plain, fast in (("fprop", "fprop_into"), ("bprop", "bprop_contiguous")):
            if plain in vars(cls) and fast not in vars(cls):
                setattr(cls, fast, getattr(Activation, fast))

    @abstractmethod
    def fprop(self, z: Any) -> Any:
        """Return the outputs for z (any shape, channels last); z may be overwritten."""

    @abstractmethod
    def bprop(self, y: Any, dy: Any) -> Any:
        """Return the gradient of z, given the outputs y and their gradient."""

    def fprop_into(self, z: Any, y: Any, kernels: Kernels) -> None:
        """Write the outputs for z into y (of any strides); z may be overwritten."""
        kernels.copy(self.fprop(z), y)

    def bprop_contiguous(self, y: Any, dy: Any, kernels: Kernels) -> Any:
        """Return the gradient of z as a contiguous array; y and dy may have any strides, and are not modified."""
        return kernels.xp.ascontiguousarray(self.bprop(y, dy))


class Identity(Activation):
    """The input itself."""

    elementwise = True

    def fprop(self, z: Any) -> Any:
        """Return z."""
        return z

    def bprop(self, y: Any, dy: Any) -> Any:
        """Return dy."""
        return dy


class ReLU(Activation):
    """Rectified linear unit max(z, 0); the gradient at 0 is 0. `RectLin` is an alias."""

    _aliases = ("RectLin",)

    elementwise = is_relu = True

    def fprop(self, z: Any) -> Any:
        """Return max(z, 0)."""
        return namespace(z).maximum(z, 0, out=z)

    def bprop(self, y: Any, dy: Any) -> Any:
        """Return dy where y is positive."""
        return dy * (y > 0)

    def fprop_into(self, z: Any, y: Any, kernels: Kernels) -> None:
        """Write max(z, 0) into y."""
        kernels.relu(z, y)

    def bprop_contiguous(self, y: Any, dy: Any, kernels: Kernels) -> Any:
        """Return dy where y is positive, from the sign of y alone."""
        return kernels.relu_backward(y, dy)


RectLin = ReLU


class Logistic(Activation):
    """1 / (1 + exp(-z))."""

    elementwise = True

    def fprop(self, z: Any) -> Any:
        """Return the logistic function, through tanh so that nothing overflows."""
        z *= 0.5
        namespace(z).tanh(z, out=z)
        z *= 0.5
        z += 0.5
        return z

    def bprop(self, y: Any, dy: Any) -> Any:
        """Return dy y (1 - y)."""
        return dy * y * (1 - y)


class Tanh(Activation):
    """Hyperbolic tangent."""

    elementwise = True

    def fprop(self, z: Any) -> Any:
        """Return tanh z."""
        return namespace(z).tanh(z, out=z)

    def bprop(self, y: Any, dy: Any) -> Any:
        """Return dy (1 - y²)."""
        return dy * (1 - y * y)


class Softmax(Activation):
    """Softmax over the channels. CrossEntropy includes a softmax: do not use both."""

    def fprop(self, z: Any) -> Any:
        """Return the softmax over the last axis."""
        z -= z.max(axis=-1, keepdims=True)
        namespace(z).exp(z, out=z)
        z /= z.sum(axis=-1, keepdims=True)
        return z

    def bprop(self, y: Any, dy: Any) -> Any:
        """Return y (dy - sum over channels of y dy)."""
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))
