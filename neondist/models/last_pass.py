"""Which forward pass the arrays that layers keep are of: bprop goes back through no other."""

from __future__ import annotations

from typing import Any

from ..errors import PassError, ShapeError

AGAIN = "run fprop of its batch right before bprop"


class LastPass:
    """Takes note of a model's forward passes, and of what takes their arrays away.

    Every rank notes the same, so that all of them raise, or none does.
    """

    def __init__(self) -> None:
        self._samples, self._trains, self._between = 0, False, False
        self._gone = f"there was no fprop yet; {AGAIN}"

    def begin(self, training: bool) -> None:
        """Note that a pass begins to overwrite the arrays of the one before."""
        self._between = not training and (self._between or self._trains)
        self._trains, self._gone = False, f"the last fprop did not end; {AGAIN}"

    def end(self, training: bool, samples: int) -> None:
        """Note that it is done, for so many samples of this rank."""
        self._samples, self._trains, self._gone = samples, training, ""

    def forget(self, why: str = "it was forgotten") -> None:
        """Note that nobody can or will go back through the last pass any more."""
        self._trains, self._between, self._gone = False, False, f"{why} since the last fprop; {AGAIN}"

    def check(self, dy: Any) -> None:
        """Raise an error, on every rank, if `dy` cannot be the gradient of what the last fprop returned."""
        if self._between:
            self.forget("there was no other")
            raise PassError(
                "bprop: an fprop with training=False came after the one with training=True, and the layers keep its"
                f" arrays now; {AGAIN}"
            )
        if self._gone:
            raise PassError(f"bprop: {self._gone}")
        if len(dy) != self._samples:
            raise ShapeError(f"dy has {len(dy)} samples, but the last fprop had {self._samples}; {AGAIN}")
