"""Early setup before slow imports: standard streams and signal handlers of a command, HOME, and a rank's heartbeat."""

import os
import sys
from typing import TextIO

from .heartbeat import connect_to_supervisor
from .signals import install_command_handlers, is_neondist_command


def _open_null_device() -> TextIO:
    file = open(os.devnull, "r+")  # noqa: SIM115 - for the life of the process
    os.set_inheritable(file.fileno(), True)
    return file


# files opened later would take the numbers of closed streams, and receive the output of libraries
if is_neondist_command():
    sys.stdin = sys.stdin or _open_null_device()
    sys.stdout = sys.stdout or _open_null_device()
    sys.stderr = sys.stderr or _open_null_device()
# Open MPI does not start without HOME, as in systemd units; expanduser returns "~" for users without a passwd entry
os.environ.setdefault("HOME", os.path.join("/", os.path.expanduser("~")))
connect_to_supervisor(os.environ)
install_command_handlers()
