"""Products with 16-bit operands, emulated in float32: the same results, but slower.

Operands are rounded to bfloat16 or float16, products are exact, and sums are float32; outputs and input gradients of
convolutions are rounded again. `matmul`, which other kernels use for sums, does not round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from ..arrays.precision import FLOAT32, ComputePrecision
from .kernels import Kernels
from .windows import Sides

Ints = Sequence[int]


class HalfPrecisionKernels(Kernels):
    """Kernels with 16-bit operands; arrays stay float32."""

    precision: ComputePrecision

    def conv_forward(
        self,
        x: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: Any | None = None,
        zero_widths: Sides | None = None,
    ) -> Any:
        """Return the valid convolution plus bias (N, *out, C_out)."""
        x, weights, bias = self._round(x), self._round(weights), None if bias is None else self._round(bias)
        return self._round(super().conv_forward(x, weights, stride, dilation, groups, bias, zero_widths))

    def conv_backward_input(
        self, dy: Any, weights: Any, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides | None = None
    ) -> Any:
        """Return the gradient of x (N, *extent, C_in), without the cells of `crop`."""
        dy, weights = self._round(dy), self._round(weights)
        return self._round(super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop))

    def conv_backward_weights(
        self, x: Any, dy: Any, kernel: Ints, stride: Ints, dilation: Ints, groups: int, zero_widths: Sides | None = None
    ) -> Any:
        """Return the gradient of the weights, not rounded, since it is accumulated."""
        x, dy = self._round(x), self._round(dy)
        return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zero_widths)

    def conv_into(self, *args: Any) -> None:
        """Write the convolution plus bias into y by `write_output`, through the methods above."""
        Kernels.conv_into(self, *args)

    def conv_backward_into(self, *args: Any) -> tuple[Any, Any]:
        """Return the gradients of weights and bias, and write the gradient of x, through the methods above."""
        return Kernels.conv_backward_into(self, *args)

    def product(self, a: Any, b: Any) -> Any:
        """Return the matrix product, not rounded, since ranks sum their partial products."""
        return self.matmul(self._round(a), self._round(b))

    @property
    def exact(self) -> Kernels:
        """The same kernels without rounding."""
        kernels = copy(self)
        kernels.precision = FLOAT32
        return kernels

    def _round(self, array: Any) -> Any:
        return self.round_operand(array, self.precision) if self.precision.has_16_bit_operands else array

    def _relu_gradient_writer(self, dx: Any, x: Any | None = None) -> Callable[[Any, tuple], None]:
        if x is None:
            return super()._relu_gradient_writer(dx)
        return lambda part, index: self.relu_backward(self._round(x[index]), part, dx[index])
