"""Packed and missing values as declared by attributes of NetCDF (NUG, CF) and of xarray's Zarr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError

_DEFAULT = {
    "i2": -32767, "u2": 65535, "i4": -2147483647, "u4": 4294967295, "i8": -9223372036854775806,
    "u8": 18446744073709551614, "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip

OF_VALUES = frozenset(
    ("_FillValue", "missing_value", "valid_min", "valid_max", "valid_range", "scale_factor", "add_offset", "_Unsigned")
)
"""Attributes that declare how numbers are stored."""


class Packing:
    """Conversion of the stored numbers of a variable to values.

    Packed integers become floats of the type of `scale_factor` and `add_offset`, packed floats of at least their own
    type; missing values become NaN. Integers without a scale are not converted, and their missing values are kept.

    Parameters
    ----------
    where : str
        Name of the variable, for messages.
    stored : numpy.dtype
    attributes : mapping
        Numbers as arrays, text as str, None for unreadable ones.
    prefilled : bool
        Whether NetCDF's default fill value marks missing cells if no fill value is declared, as in netCDF4. There is no
        default for bytes, and for signed numbers that are read as unsigned.

    Attributes
    ----------
    dtype : numpy.dtype
        Of the values.

    Raises
    ------
    DataError
        If an attribute is not a number, or is ambiguous.
    """

    def __init__(self, where: str, stored: Any, attributes: Mapping[str, Any], prefilled: bool = False) -> None:
        self._where, self._attributes = where, attributes
        stored = np.dtype(stored)
        self._signed, self._stored = stored, self._with_sign(stored)
        self._scale, self._offset = self._scalar("scale_factor"), self._scalar("add_offset")
        packing = [one.dtype for one in (self._scale, self._offset) if one is not None]
        self.dtype = self._stored.newbyteorder("=")
        self._missing, self._low, self._high = np.empty(0, self._stored), None, None
        if packing and stored.kind in "iub":
            floats = [kind if kind.kind == "f" else np.dtype(np.float64) for kind in packing]
            self.dtype = np.result_type(np.float32, self.dtype, *floats)
        elif packing and stored.kind == "f":
            self.dtype = np.result_type(self.dtype, *(kind if kind.kind == "f" else np.float64 for kind in packing))
        if self.dtype.kind == "f":
            self._find_missing(prefilled, bool(packing))

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Return the values of stored numbers."""
        raw = raw.view(self._stored)
        if self.dtype.kind != "f":
            return raw
        missing = np.isin(raw, self._missing)
        if self._low is not None:
            missing |= raw < self._low
        if self._high is not None:
            missing |= raw > self._high
        values = raw.astype(self.dtype)
        if self._scale is not None:
            values *= self.dtype.type(self._scale)
        if self._offset is not None:
            values += self.dtype.type(self._offset)
        values[missing] = np.nan
        return values

    def _with_sign(self, stored: np.dtype) -> np.dtype:
        """Return the type of the stored numbers according to `_Unsigned`."""
        if "_Unsigned" not in self._attributes or stored.kind not in "iu":
            return stored
        text = self._attributes["_Unsigned"]
        unsigned = text.strip("\0 ").lower() if isinstance(text, str) else ""
        if unsigned not in ("true", "false") or (unsigned == "false" and stored.kind == "u"):
            raise self._invalid("_Unsigned", f"is neither 'true' nor 'false' but {stored}", "c,true")
        return np.dtype(stored.str.replace("i", "u")) if unsigned == "true" else stored

    def _find_missing(self, prefilled: bool, packed: bool) -> None:
        fill = self._representable(self._numbers("_FillValue"))
        default = _DEFAULT.get(self._stored.str[1:])
        if prefilled and not fill and default is not None and self._stored == self._signed:
            fill = self._representable(np.array(default))
        self._missing = np.array(fill + self._representable(self._numbers("missing_value")), self._stored)
        name = "valid_range" if "valid_range" in self._attributes else "valid_min"
        bounds = {name: self._numbers(name)}
        if name == "valid_range":
            if bounds[name].size != 2:
                raise self._invalid(name, "does not have two numbers", "d,LOW,HIGH")
            low, high = bounds[name].ravel()
        else:
            bounds["valid_max"] = self._numbers("valid_max")
            low, high = self._scalar("valid_min"), self._scalar("valid_max")
        for bound, values in bounds.items():
            if packed and self._stored.kind in "iu" and values.size and values.dtype.kind == "f":
                problem = f"is {values.dtype} for packed {self._stored}, and could refer to packed numbers or to values"
                raise self._invalid(bound, problem, "s,PACKED")
        self._low, self._high = self._bound(low), self._bound(high)

    def _bound(self, value: Any) -> Any:
        """Return a bound in terms of stored numbers, or None."""
        if value is None or np.isnan(value):
            return None
        if self._stored.kind == "f":
            with np.errstate(over="ignore"):
                return self._stored.type(value)
        bound = int(value)
        if bound < 0 and self._stored != self._signed:
            bound += 1 << 8 * self._stored.itemsize
        return bound

    def _representable(self, numbers: np.ndarray) -> list[Any]:
        """Return the numbers that the stored type represents exactly, without rounding or wrap-around of integers."""
        if self._stored.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                cast = numbers.ravel().astype(self._stored)
            return list(cast[np.isfinite(cast) == np.isfinite(numbers.ravel())])
        exact = []
        for number in numbers.ravel().tolist():
            if isinstance(number, float) and not number.is_integer():
                continue
            whole = int(number)
            signed = np.iinfo(self._signed) if self._signed.kind != "b" else np.iinfo(np.uint8)
            if self._stored != self._signed and signed.min <= whole < 0:
                whole += 1 << 8 * self._stored.itemsize
            if self._stored.kind == "b" or np.iinfo(self._stored).min <= whole <= np.iinfo(self._stored).max:
                exact.append(whole)
        return exact

    def _numbers(self, name: str) -> np.ndarray:
        if name not in self._attributes:
            return np.empty(0)
        value = self._attributes[name]
        if value is None or isinstance(value, str):
            raise self._invalid(name, "is not a number", "d,NUMBER")
        return np.asarray(value)

    def _scalar(self, name: str) -> Any:
        """Return an attribute that is one finite number, or None if it is missing."""
        if name not in self._attributes:
            return None
        values = self._numbers(name)
        if values.size != 1 or (name in ("scale_factor", "add_offset") and not np.isfinite(values).all()):
            raise self._invalid(name, "is not a single finite number", "d,NUMBER")
        return values.ravel()[0]

    def _invalid(self, name: str, problem: str, remedy: str) -> DataError:
        return DataError(
            f"{self._where}: its attribute {name} {problem}; remove or correct it, for instance: ncatted -a"
            f" {name},VARIABLE,o,{remedy} FILE"
        )
