"""Packed and missing values as declared by attributes of NetCDF (NUG, CF) and of xarray's Zarr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError

_DEFAULT_FILL_VALUES = {
    "i2": -32767, "u2": 65535, "i4": -2147483647, "u4": 4294967295, "i8": -9223372036854775806,
    "u8": 18446744073709551614, "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip

PACKING_ATTRIBUTES = frozenset(
    ("_FillValue", "missing_value", "valid_min", "valid_max", "valid_range", "scale_factor", "add_offset", "_Unsigned")
)
"""Attributes that declare how numbers are stored."""


class Packing:
    """Conversion of the stored numbers of a variable to values.

    Packed numbers become floats of the dtype to which NumPy promotes them with `scale_factor` and `add_offset`; missing
    values become NaN. Integers with neither of these attributes are not converted, and their missing values are kept,
    until `convert_integers` is called.

    Parameters
    ----------
    where : str
        Name of the variable, for messages.
    stored_dtype : numpy.dtype
    attributes : mapping
        Attributes by name: numbers as arrays, text as str, None if unreadable.
    has_default_fill : bool
        Whether NetCDF's default fill value marks missing cells if no fill value is declared, as in netCDF4. There is no
        default for bytes, nor for signed numbers that are read as unsigned.

    Attributes
    ----------
    dtype : numpy.dtype
        Type of the values.

    Raises
    ------
    DataError
        If an attribute is not a number, or is ambiguous.
    """

    def __init__(
        self, where: str, stored_dtype: Any, attributes: Mapping[str, Any], has_default_fill: bool = False
    ) -> None:
        self._where, self._attributes = where, attributes
        stored_dtype = np.dtype(stored_dtype)
        self._signed_dtype, self._stored_dtype = stored_dtype, self._apply_unsigned(stored_dtype)
        self._scale, self._offset = self._scalar_attribute("scale_factor"), self._scalar_attribute("add_offset")
        pack_dtypes = [one.dtype for one in (self._scale, self._offset) if one is not None]
        float_dtypes = [dtype if dtype.kind == "f" else np.dtype(np.float64) for dtype in pack_dtypes]
        self.dtype = self._stored_dtype.newbyteorder("=")
        self._missing_values, self._valid_min, self._valid_max = np.empty(0, self._stored_dtype), None, None
        if float_dtypes and stored_dtype.kind in "iub":
            self.dtype = np.result_type(np.float32, self.dtype, *float_dtypes)
        elif float_dtypes and stored_dtype.kind == "f":
            self.dtype = np.result_type(self.dtype, *float_dtypes)
        self._has_default_fill, self._is_packed = has_default_fill, bool(float_dtypes)
        if self.dtype.kind == "f":
            self._set_missing_values()

    def convert_integers(self) -> None:
        """Convert integers with neither scale nor offset, too, so that their missing values become NaN."""
        if self.dtype.kind != "f":
            self.dtype = np.result_type(np.float32, self.dtype)
            self._set_missing_values()

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Return the values of stored numbers."""
        raw = raw.view(self._stored_dtype)
        if self.dtype.kind != "f":
            return raw
        is_missing = np.isin(raw, self._missing_values)
        if self._valid_min is not None:
            is_missing |= raw < self._valid_min
        if self._valid_max is not None:
            is_missing |= raw > self._valid_max
        values = raw.astype(self.dtype)
        if self._scale is not None:
            values *= self.dtype.type(self._scale)
        if self._offset is not None:
            values += self.dtype.type(self._offset)
        values[is_missing] = np.nan
        return values

    def _apply_unsigned(self, stored_dtype: np.dtype) -> np.dtype:
        if "_Unsigned" not in self._attributes or stored_dtype.kind not in "iu":
            return stored_dtype
        text = self._attributes["_Unsigned"]
        unsigned_flag = text.strip("\0 ").lower() if isinstance(text, str) else ""
        if unsigned_flag not in ("true", "false"):
            raise self._invalid_attribute("_Unsigned", "is neither 'true' nor 'false'", "c,true")
        if unsigned_flag == "false" and stored_dtype.kind == "u":
            raise self._invalid_attribute("_Unsigned", "is 'false', but the stored integers are unsigned", "c,true")
        return np.dtype(stored_dtype.str.replace("i", "u")) if unsigned_flag == "true" else stored_dtype

    def _set_missing_values(self) -> None:
        fill_values = self._representable(self._numeric_attribute("_FillValue"))
        default = _DEFAULT_FILL_VALUES.get(self._stored_dtype.str[1:])
        if (
            self._has_default_fill
            and not fill_values
            and default is not None
            and self._stored_dtype == self._signed_dtype
        ):
            fill_values = self._representable(np.array(default))
        fill_values += self._representable(self._numeric_attribute("missing_value"))
        self._missing_values = np.array(fill_values, self._stored_dtype.newbyteorder("="))  # np.isin fails for ">u8"
        name = "valid_range" if "valid_range" in self._attributes else "valid_min"
        bounds = {name: self._numeric_attribute(name)}
        if name == "valid_range":
            if bounds[name].size != 2:
                raise self._invalid_attribute(name, "does not have two numbers", "d,LOW,HIGH")
            low, high = bounds[name].ravel()
        else:
            bounds["valid_max"] = self._numeric_attribute("valid_max")
            low, high = self._scalar_attribute("valid_min"), self._scalar_attribute("valid_max")
        for bound, values in bounds.items():
            if self._is_packed and self._stored_dtype.kind in "iu" and values.size and values.dtype.kind == "f":
                problem = "is not an integer, so it could refer to packed integers or to unpacked values"
                raise self._invalid_attribute(bound, problem, "s,PACKED")
        self._valid_min, self._valid_max = self._stored_bound(low), self._stored_bound(high)

    def _stored_bound(self, value: Any) -> Any:
        """Return a bound in terms of stored numbers, or None."""
        if value is None or np.isnan(value):
            return None
        if self._stored_dtype.kind == "f":
            with np.errstate(over="ignore"):
                return self._stored_dtype.type(value)
        stored = int(value)
        if stored < 0 and self._stored_dtype != self._signed_dtype:
            stored += 1 << 8 * self._stored_dtype.itemsize
        return stored

    def _representable(self, candidates: np.ndarray) -> list[Any]:
        """Return candidates in the stored type, except floats that would overflow and integers that would change."""
        if self._stored_dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                converted = candidates.ravel().astype(self._stored_dtype)
            return list(converted[np.isfinite(converted) == np.isfinite(candidates.ravel())])
        exact_integers = []
        for number in candidates.ravel().tolist():
            if isinstance(number, float) and not number.is_integer():
                continue
            integer = int(number)
            signed_range = np.iinfo(self._signed_dtype) if self._signed_dtype.kind != "b" else np.iinfo(np.uint8)
            if self._stored_dtype != self._signed_dtype and signed_range.min <= integer < 0:
                integer += 1 << 8 * self._stored_dtype.itemsize
            if (
                self._stored_dtype.kind == "b"
                or np.iinfo(self._stored_dtype).min <= integer <= np.iinfo(self._stored_dtype).max
            ):
                exact_integers.append(integer)
        return exact_integers

    def _numeric_attribute(self, name: str) -> np.ndarray:
        if name not in self._attributes:
            return np.empty(0)
        value = self._attributes[name]
        if value is None or isinstance(value, str):
            raise self._invalid_attribute(name, "is not a number", "d,NUMBER")
        return np.asarray(value)

    def _scalar_attribute(self, name: str) -> Any:
        """Return an attribute that is one finite number, or None if it is missing."""
        if name not in self._attributes:
            return None
        values = self._numeric_attribute(name)
        if values.size != 1 or (name in ("scale_factor", "add_offset") and not np.isfinite(values).all()):
            raise self._invalid_attribute(name, "is not a single finite number", "d,NUMBER")
        return values.ravel()[0]

    def _invalid_attribute(self, name: str, problem: str, ncatted_value: str) -> DataError:
        return DataError(
            f"{self._where}: its attribute {name} {problem}; remove or correct it, for instance: ncatted -a"
            f" {name},VARIABLE,o,{ncatted_value} FILE"
        )
