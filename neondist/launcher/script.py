"""Rank that runs a user's script as `python SCRIPT WORD...` does; started by `neondist launch`."""

import os
import runpy
import sys

from ..system.heartbeat import send_to_supervisor
from .cleanup import restore_tmpdir
from .parent_watch import die_with_launcher, end_with_parent

if __name__ == "__main__":
    die_with_launcher(os.environ)
    end_with_parent()
    restore_tmpdir(os.environ)
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        send_to_supervisor(os.environ, "failed" if isinstance(end.code, str) else f"ended {end.code or 0}")
        raise
    except BaseException:
        send_to_supervisor(os.environ, "failed")
        raise
    send_to_supervisor(os.environ, "ended 0")
