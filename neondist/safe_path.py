"""Python processes that import nothing from the folder they are started in, as `python -P` does from 3.11 on.

A file called queue.py or mpi4py.py that lies there by chance would else take the place of the real one on every rank.
This file is also what such a process begins with: `python safe_path.py [--parent=PROCESS] MODULE WORD...`.
"""

from __future__ import annotations

import os
import sys

_PARENT = "--parent="
_PR_SET_PDEATHSIG = 1


def command(module: str, *words: object, bound: bool = False) -> list[str]:
    """Return the words that run a module of neondist, or neondist itself, in a process of its own.

    With `bound` it gets a SIGTERM when this process is killed (Linux). It asks for that itself: what a `preexec_fn`
    runs between fork and exec crashes or hangs now and then, where this process has threads of gRPC.
    """
    parent = [f"{_PARENT}{os.getpid()}"] if bound else []
    return [sys.executable, __file__, *parent, module, *map(str, words)]


def end_with(parent: int) -> None:
    """Get a SIGTERM when the parent is killed (Linux); end now if this process has another one by then."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def _run() -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # this script's folder
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)  # a checkout that is not installed
    if sys.argv[1].startswith(_PARENT):
        import signal

        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import, if its job ends so soon
        end_with(int(sys.argv.pop(1)[len(_PARENT) :]))
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
