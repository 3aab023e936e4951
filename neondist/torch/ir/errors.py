"""Errors of `distribute` and `from_torch`, with the user's source position."""

from __future__ import annotations

import inspect
from typing import Any

from ...errors import UserError


class UnsupportedOperator(UserError):
    """An operator of the module has no rule, or no layer, that reproduces the single-process result.

    Attributes
    ----------
    operator : str
    module : str
        Path of the module that calls the operator.
    source : str
        The user's file and line.
    why : str
        The reason; empty: the operator has no rule.
    """

    def __init__(self, where: Any, why: str = "", *, action: str = "be distributed", remedy: str = "") -> None:
        self.operator, self.module, self.source = where.operator, where.module, where.source
        self.why = why
        remedy = remedy or (
            f"pass gather_at=[{self.module!r}] to compute {'that' if self.module else 'the'} module on whole arrays on"
            " every rank; or define a rule with neondist.torch.rule"
        )
        super().__init__(
            f"{position_text(where)} cannot {action}{': ' + why if why else ' because it has no rule'}; {remedy}"
        )


class CaptureError(Exception):
    """Behaviour of a module that its captured program would not reproduce.

    Parameters
    ----------
    source : str
        File and line of the cause; default: the place where the error is raised.
    """

    def __init__(self, why: str, source: str = "") -> None:
        super().__init__(why)
        self.source = source


def position_text(position: Any) -> str:
    """Return a position in the user's program as text: file and line, operator, and module, as far as known."""
    source = f"{position.source}: " if position.source else ""
    return f"{source}{position.operator}" + (f" in module '{position.module}'" if position.module else "")


def definition_site(function: Any) -> str:
    """Return the file and line of a function's definition, or an empty string if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
