"""Hides from a test's subprocesses what takes each of them seconds to import; see tests/conftest.py."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = os.environ.get("NEONDIST_TESTS_HIDE", "").split()


class Lean(PathFinder):
    """Finds what is on the path, without what is hidden."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


if HIDDEN:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Lean
