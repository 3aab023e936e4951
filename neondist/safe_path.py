"""Python processes that import nothing from the folder they are started in, as `python -P` does from 3.11 on.

A file called queue.py or mpi4py.py that lies there by chance would else take the place of the real one on every rank.
This file is also what such a process begins with: `python safe_path.py MODULE WORD...`.
"""

from __future__ import annotations

import os
import sys


def command(module: str, *words: object) -> list[str]:
    """Return the words that run a module of neondist, or neondist itself, in a process of its own."""
    return [sys.executable, __file__, module, *map(str, words)]


def _run() -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # this script's folder
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)  # a checkout that is not installed
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
