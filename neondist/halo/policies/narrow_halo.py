"""The exact exchange for layers whose products have operands of 16 bits."""

from __future__ import annotations

from ...arrays.precision import ComputePrecision
from .base import ExchangePolicy
from .halo import Halo


def halo_in(scheme: ExchangePolicy | None, precision: ComputePrecision) -> ExchangePolicy | None:
    """Return the exact exchange for a layer that looks at numbers rounded so alone; another scheme as it is."""
    if type(scheme) is not Halo or not scheme.exact:
        return scheme
    found = Halo(**scheme.arguments() | {"dtype": precision.name if precision.narrow else None})
    found.exact = True
    return found
