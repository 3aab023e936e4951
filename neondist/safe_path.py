"""Python processes that do not import from their working directory, as with `python -P` since 3.11.

Otherwise a file queue.py or mpi4py.py in that directory would shadow the real module on every rank. This file is also
the script of such a process: `python safe_path.py [--parent-pid=PID] MODULE WORD...`.
"""

from __future__ import annotations

import os
import sys

_PARENT_PID_OPTION = "--parent-pid="
_PR_SET_PDEATHSIG = 1


def python_command(module: str, *words: object, ends_with_parent: bool = False) -> list[str]:
    """Return the command line that runs a module of neondist, or neondist itself, in a new process.

    With `ends_with_parent` the child gets SIGTERM when this process is killed (Linux). The child requests the signal
    itself: a `preexec_fn` occasionally crashes or hangs between fork and exec if this process has gRPC threads.
    """
    parent_option = [f"{_PARENT_PID_OPTION}{os.getpid()}"] if ends_with_parent else []
    return [sys.executable, __file__, *parent_option, module, *map(str, words)]


def terminate_with_parent(parent_pid: int) -> None:
    """Receive SIGTERM when the parent is killed (Linux); exit now if the parent has already died."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent died before the call to prctl
        os._exit(1)


def _run_module() -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # this script's folder
    package_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if package_root not in sys.path:
        sys.path.append(package_root)  # a checkout that is not installed
    if sys.argv[1].startswith(_PARENT_PID_OPTION):
        import signal

        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no import traceback if interrupted early
        terminate_with_parent(int(sys.argv.pop(1)[len(_PARENT_PID_OPTION) :]))
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module()
