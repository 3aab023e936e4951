"""Packed and missing values by the attributes of NetCDF (NUG, CF) and of xarray's Zarr."""

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
"""Attributes that say how numbers are stored."""


class Packing:
    """From the numbers of a variable as they are stored to their values.

    The values of packed integers are floats of the type of `scale_factor` and `add_offset`, of floats at least their
    own; missing ones are NaN. Integers without a scale stay as they are, and so do those among them that are missing.

    Parameters
    ----------
    where : str
        The variable, as messages name it.
    stored : numpy.dtype
    attributes : mapping
        Numbers as arrays, text as str; None for what cannot be read.
    prefilled : bool
        Whether cells without a fill value of their own are missing where they are NetCDF's, as netCDF4 has it. Bytes
        have none, nor have signed numbers that are taken for unsigned.

    Attributes
    ----------
    dtype : numpy.dtype
        Of the values.

    Raises
    ------
    DataError
        An attribute is not a number, or can be understood in two ways.
    """

    def __init__(self, where: str, stored: Any, attributes: Mapping[str, Any], prefilled: bool = False) -> None:
        self._where, self._attributes = where, attributes
        stored = np.dtype(stored)
        self._signed, self._stored = stored, self._with_sign(stored)
        self._scale, self._offset = self._one("scale_factor"), self._one("add_offset")
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
        gone = np.isin(raw, self._missing)
        if self._low is not None:
            gone |= raw < self._low
        if self._high is not None:
            gone |= raw > self._high
        values = raw.astype(self.dtype)
        if self._scale is not None:
            values *= self.dtype.type(self._scale)
        if self._offset is not None:
            values += self.dtype.type(self._offset)
        values[gone] = np.nan
        return values

    def _with_sign(self, stored: np.dtype) -> np.dtype:
        """Return the type of the stored numbers as `_Unsigned` says."""
        if "_Unsigned" not in self._attributes or stored.kind not in "iu":
            return stored
        text = self._attributes["_Unsigned"]
        unsigned = text.strip("\0 ").lower() if isinstance(text, str) else ""
        if unsigned not in ("true", "false") or (unsigned == "false" and stored.kind == "u"):
            raise self._unclear("_Unsigned", f"is neither 'true' nor 'false' but {stored}", "c,true")
        return np.dtype(stored.str.replace("i", "u")) if unsigned == "true" else stored

    def _find_missing(self, prefilled: bool, packed: bool) -> None:
        fill = self._exact(self._numbers("_FillValue"))
        default = _DEFAULT.get(self._stored.str[1:])
        if prefilled and not fill and default is not None and self._stored == self._signed:
            fill = self._exact(np.array(default))
        self._missing = np.array(fill + self._exact(self._numbers("missing_value")), self._stored)
        name = "valid_range" if "valid_range" in self._attributes else "valid_min"
        bounds = {name: self._numbers(name)}
        if name == "valid_range":
            if bounds[name].size != 2:
                raise self._unclear(name, "does not have two numbers", "d,LOW,HIGH")
            low, high = bounds[name].ravel()
        else:
            bounds["valid_max"] = self._numbers("valid_max")
            low, high = self._one("valid_min"), self._one("valid_max")
        for each, found in bounds.items():
            if packed and self._stored.kind in "iu" and found.size and found.dtype.kind == "f":
                told = f"is {found.dtype} for packed {self._stored}, and could refer to packed numbers or to values"
                raise self._unclear(each, told, "s,PACKED")
        self._low, self._high = self._bound(low), self._bound(high)

    def _bound(self, given: Any) -> Any:
        """Return a bound of stored numbers to compare them with, or None."""
        if given is None or np.isnan(given):
            return None
        if self._stored.kind == "f":
            with np.errstate(over="ignore"):
                return self._stored.type(given)
        bound = int(given)
        if bound < 0 and self._stored != self._signed:
            bound += 1 << 8 * self._stored.itemsize
        return bound

    def _exact(self, given: np.ndarray) -> list[Any]:
        """Return which of some numbers a stored one can be: of integers none is rounded, and none wraps round."""
        if self._stored.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                cast = given.ravel().astype(self._stored)
            return list(cast[np.isfinite(cast) == np.isfinite(given.ravel())])
        found = []
        for number in given.ravel().tolist():
            if isinstance(number, float) and not number.is_integer():
                continue
            whole = int(number)
            signed = np.iinfo(self._signed) if self._signed.kind != "b" else np.iinfo(np.uint8)
            if self._stored != self._signed and signed.min <= whole < 0:
                whole += 1 << 8 * self._stored.itemsize
            if self._stored.kind == "b" or np.iinfo(self._stored).min <= whole <= np.iinfo(self._stored).max:
                found.append(whole)
        return found

    def _numbers(self, name: str) -> np.ndarray:
        if name not in self._attributes:
            return np.empty(0)
        found = self._attributes[name]
        if found is None or isinstance(found, str):
            raise self._unclear(name, "is not a number", "d,NUMBER")
        return np.asarray(found)

    def _one(self, name: str) -> Any:
        """Return an attribute that is one finite number, or None where there is none."""
        if name not in self._attributes:
            return None
        found = self._numbers(name)
        if found.size != 1 or (name in ("scale_factor", "add_offset") and not np.isfinite(found).all()):
            raise self._unclear(name, "is not a single finite number", "d,NUMBER")
        return found.ravel()[0]

    def _unclear(self, name: str, what: str, remedy: str) -> DataError:
        return DataError(
            f"{self._where}: its attribute {name} {what}; remove or correct it, for instance: ncatted -a"
            f" {name},VARIABLE,o,{remedy} FILE"
        )
