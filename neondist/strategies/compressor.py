"""Names of gradient compressors."""

from __future__ import annotations

import re

from ..errors import ConfigError

_SPELLINGS = "None, 'fp16', 'bf16', 'topk(SHARE)' with a share in (0, 1], or 'powersgd(RANK)' with a rank of at least 1"


def normalise_compressor(compressor: str | None) -> str | None:
    """Return a compressor's canonical text: None, 'fp16', 'bf16', 'topk(0.01)' or 'powersgd(4)'.

    Raises
    ------
    ConfigError
        If the name is unknown, or an argument is out of range.
    """
    if compressor is None:
        return None
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*", str(compressor))
    name, argument = match.groups() if match else ("", None)
    if name in ("fp16", "bf16") and argument is None:
        return name
    try:
        if name == "topk" and argument is not None and 0 < float(argument) <= 1:
            return f"topk({float(argument):g})"
        if name == "powersgd" and argument is not None and int(argument) >= 1:
            return f"powersgd({int(argument)})"
    except ValueError:
        pass
    raise ConfigError(f"compressor: invalid value '{compressor}'; expected {_SPELLINGS}")
