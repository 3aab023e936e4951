"""Exact exchange for layers with 16-bit operands."""

from __future__ import annotations

from ...arrays.precision import ComputePrecision
from .base import ExchangePolicy
from .halo import Halo


def halo_in_precision(scheme: ExchangePolicy | None, precision: ComputePrecision) -> ExchangePolicy | None:
    """Return exact halo exchange in the precision of a layer's operands; other schemes are returned unchanged."""
    if type(scheme) is not Halo or not scheme.exact:
        return scheme
    halo = Halo(**scheme.arguments() | {"dtype": precision.name if precision.has_16_bit_operands else None})
    halo.exact = True
    return halo
