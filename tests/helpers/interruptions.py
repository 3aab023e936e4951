"""Interruptions of jobs that record completed parts in a journal."""

from contextlib import contextmanager

import pytest

from neondist.io.journal import ProgressJournal


class Killed(Exception):
    """Stand-in for the death of a process."""


@contextmanager
def interrupt_after_part(error=Killed):
    """Raise an error whenever a job has recorded a part."""
    add = ProgressJournal.record_part

    def add_and_raise(self, number):
        add(self, number)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressJournal, "record_part", add_and_raise)
        yield
