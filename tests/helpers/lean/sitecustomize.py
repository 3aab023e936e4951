"""Import hook of test subprocesses that hides packages with a long import time; see tests/conftest.py."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = os.environ.get("NEONDIST_TESTS_HIDE", "").split()


class HidingFinder(PathFinder):
    """Path finder without the hidden packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


if HIDDEN:
    sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
