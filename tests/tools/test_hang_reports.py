"""Reports of commands that do not end."""

import subprocess
import sys

import pytest
from processes import communicate, is_alive

CHILD = """
import os, threading
def wait_for_ever():
    print("as process", os.getpid(), flush=True)
    threading.Event().wait()
threading.Thread(target=wait_for_ever).start()
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}]); {}"


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("", "has exited with 0, but other processes hold its pipes"),
        ("import time; time.sleep(600)", "is still running"),
    ],
    ids=["orphan", "child"],
)
def test_hanging_command_is_reported(statement, state):
    words = [sys.executable, "-c", PARENT.format(CHILD, statement)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    if not statement:
        process.wait(60)
    with pytest.raises(AssertionError, match=f"{state} after 0.5 s\n") as error:
        communicate(process, 0.5)
    assert "in wait_for_ever" in str(error.value)
    pid = int(line.split()[-1])
    assert f"{pid} of " in str(error.value)
    assert not is_alive(pid)


def test_output_of_a_command():
    words = [sys.executable, "-c", "import sys; print('out'); sys.exit('err')"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (communicate(process), process.returncode) == (("out\n", "err\n"), 1)
