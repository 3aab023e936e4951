"""Progress of predictions by the steps of rank profiles."""

from __future__ import annotations

from typing import Any

from ...geometry import GridShape
from ...terminal.progress_line import ProgressLine
from .rank_profile import LEAST_STEPS, RankProfile, profile_busiest_rank


class ProfileProgress:
    """A `ProfileFunction` that reports its steps as progress within a part.

    Parameters
    ----------
    progress : ProgressLine
    num_profiles : int
        Expected number of profiles in the part.
    """

    def __init__(self, progress: ProgressLine, num_profiles: int) -> None:
        self.progress, self.num_profiles = progress, num_profiles
        self._done, self._steps = 0, 0

    def __call__(self, experiment: Any, shape: GridShape, min_seconds: float) -> RankProfile:
        """Return the profile of a rank."""
        self._steps = 0
        result = profile_busiest_rank(experiment, shape, min_seconds, self._count_step)
        self._done += 1
        return result

    def _count_step(self) -> None:
        self._steps += 1
        done = self._done + min(1.0, self._steps / LEAST_STEPS)
        self.progress.set_part_fraction(done / max(self.num_profiles, self._done + 1))
