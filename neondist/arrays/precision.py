"""Precision of a model's products: the dtype of their operands, and loss scaling for float16 gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import ConfigError, NonFiniteError
from .namespace import namespace

PrecisionName: TypeAlias = Literal["float32", "tf32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ComputePrecision:
    """Dtype of the operands of convolutions and matrix products; sums and parameters have the model's dtype.

    Attributes
    ----------
    name : {'float32', 'tf32', 'bfloat16', 'float16'}
        'float32' leaves everything in the model's dtype. 'tf32' is the same except on GPUs, whose
        products then have operands of 19 bits.
    """

    name: str = "float32"

    @property
    def has_16_bit_operands(self) -> bool:
        """Whether operands have 16 bits."""
        return self.name in ("bfloat16", "float16")

    @property
    def itemsize(self) -> int:
        """Bytes of an operand in memory."""
        return 2 if self.has_16_bit_operands else 4

    def new_scaler(self) -> LossScaler | None:
        """Return a new loss scaler; None for precisions with the range of float32."""
        return LossScaler() if self.name == "float16" else None

    def check_parameter_dtype(self, dtype: np.dtype) -> None:
        """Raise ConfigError unless the precision supports parameters of this dtype."""
        if self != FLOAT32 and dtype != np.float32:
            raise ConfigError(
                f"precision: {self.name} requires float32 parameters, but dtype is {dtype}; leave out one of the two"
            )

    def round_to_operands(self, array: Any) -> Any:
        """Return float32 numbers rounded to the nearest operands (ties to even), as a new float32 array.

        Numbers out of range become infinite.
        """
        if self.name == "float16":
            with np.errstate(over="ignore", under="ignore"):
                return array.astype(np.float16).astype(np.float32)
        xp = namespace(array)
        float32_array = xp.array(array, np.float32, order="C")
        is_nan, bits = float32_array != float32_array, float32_array.view(np.uint32)
        bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
        return xp.where(is_nan, np.float32("nan"), float32_array)  # rounding may have made NaN infinite

    def encode(self, array: Any) -> Any:
        """Return the 16 bits (uint16) of each float32 number, rounded as by `round_to_operands`."""
        if self.name == "float16":
            with np.errstate(over="ignore", under="ignore"):
                return array.astype(np.float16).view(np.uint16)
        return (self.round_to_operands(array).view(np.uint32) >> 16).astype(np.uint16)

    def decode(self, codes: Any) -> Any:
        """Return the float32 numbers of codes made by `encode`."""
        if self.name == "float16":
            return codes.view(np.float16).astype(np.float32)
        return (codes.astype(np.uint32) << 16).view(np.float32)


FLOAT32, BFLOAT16, FLOAT16 = (ComputePrecision(name) for name in ("float32", "bfloat16", "float16"))


@dataclass
class LossScaler:
    """Multiplier of the loss that prevents underflow of 16-bit gradients, updated as in `torch.amp.GradScaler`.

    The scale doubles after `GROWTH_INTERVAL_STEPS` consecutive steps without overflow, and halves at each overflow. As
    a power of two, it changes only gradients that would underflow or overflow.

    Attributes
    ----------
    scale : float
    finite_steps : int
        Consecutive steps without an overflow since the scale last changed.
    skipped_steps : int
        Steps skipped in the current epoch.
    """

    scale: float = 2.0**16
    finite_steps: int = 0
    skipped_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Update the scale after a step; `overflow` must be the same on all ranks.

        Raises
        ------
        NonFiniteError
            The scale would fall below 1: the gradients overflow at any scale.
        """
        if overflow:
            self.scale, self.finite_steps, self.skipped_steps = self.scale / 2, 0, self.skipped_steps + 1
            if self.scale < 1:
                raise NonFiniteError(
                    "precision: float16: the loss scale has fallen below 1, and gradients still overflow; lower"
                    " the learning rate, normalise the data, or set precision: bfloat16"
                ).mark_raised_on_all_ranks()
            return
        self.finite_steps += 1
        if self.finite_steps == GROWTH_INTERVAL_STEPS:
            self.scale, self.finite_steps = min(2 * self.scale, MAX_LOSS_SCALE), 0

    def reset_skipped_steps(self) -> None:
        """Reset the count of skipped steps."""
        self.skipped_steps = 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good": self.finite_steps, "skipped": self.skipped_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`; raise ValueError with the reason if `state` is invalid."""
        if set(state) != {"scale", "good", "skipped"}:
            raise ValueError("'loss_scale' must have exactly the fields 'scale', 'good' and 'skipped'")
        scale, finite_steps, skipped_steps = (state[name] for name in ("scale", "good", "skipped"))
        if any(type(count) is not int or not 0 <= count < 1 << 62 for count in (finite_steps, skipped_steps)):
            raise ValueError("'loss_scale' has invalid counts")
        if type(scale) not in (int, float) or not 1 <= scale <= MAX_LOSS_SCALE or math.frexp(scale)[0] != 0.5:
            raise ValueError("'loss_scale' is not a power of two of at least 1")
        self.scale, self.finite_steps, self.skipped_steps = float(scale), finite_steps, skipped_steps


GROWTH_INTERVAL_STEPS = 2000  # consecutive steps without an overflow after which the scale doubles
MAX_LOSS_SCALE = 2.0**127  # the largest power of two in float32


def parse_dtype(field: str, dtype: Any) -> np.dtype:
    """Return a NumPy dtype in native byte order; ConfigError for `field` if the value is not one."""
    try:
        return np.dtype(dtype).newbyteorder("=")
    except TypeError:
        raise ConfigError(f"{field}: {dtype!r} is not a NumPy dtype; give a name such as 'float32'") from None
