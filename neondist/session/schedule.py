"""When checkpoints are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..registry import suggest
from ..registry.ranges import integer, real

KEYS = ("every_steps", "every_epochs", "every_minutes", "keep")


@dataclass(frozen=True)
class CheckpointSchedule:
    """When checkpoints are written, beside the last one at the end of the run.

    Attributes
    ----------
    every_steps, every_epochs : int, optional
        Whenever the run has done a multiple of so many steps or epochs. Where nothing is given: every epoch.
    every_minutes : float, optional
        Once so much time has gone by since the last one, after the step under way.
    keep : int
        Files that stay: with more than one, checkpoint-STEP.h5 for the last ones, beside checkpoint.h5, the newest.
    """

    every_steps: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None
    keep: int = 1

    @classmethod
    def of(cls, fields: Mapping[str, float | int | None] | None) -> CheckpointSchedule:
        """Return the schedule of the field `checkpoint` of an experiment; ConfigError if it cannot be used."""
        if not isinstance(fields, Mapping | None):
            raise ConfigError(
                f"checkpoint: {fields!r} cannot be used; give a mapping such as {{every_steps: 500, keep: 3}}"
            )
        given = {key: value for key, value in (fields or {}).items() if value is not None}
        for key in given:
            if key not in KEYS:
                raise ConfigError(f"checkpoint: unknown key '{key}'{suggest(str(key), KEYS)}")
        numbers = {key: integer(f"checkpoint: {key}", given[key], 1) for key in given if key != "every_minutes"}
        minutes = given.get("every_minutes")
        if minutes is not None:
            minutes = real("checkpoint: every_minutes", minutes, 0.0, open_low=True)
        if not any(key.startswith("every") for key in given):
            numbers["every_epochs"] = 1
        return cls(every_minutes=minutes, **numbers)

    def after_step(self, step: int) -> bool:
        """Tell whether one is due after so many steps."""
        return self.every_steps is not None and step % self.every_steps == 0

    def after_epoch(self, epoch: int) -> bool:
        """Tell whether one is due after so many epochs."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0
