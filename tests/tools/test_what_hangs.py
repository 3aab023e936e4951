"""Commands that tests wait for: one that does not end says where it hangs."""

import subprocess
import sys

import pytest
from processes import alive, finish

CHILD = """
import os, threading
def wait_for_ever():
    print("as process", os.getpid(), flush=True)
    threading.Event().wait()
threading.Thread(target=wait_for_ever).start()
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}]); {}"


@pytest.mark.parametrize(
    ("then", "state"),
    [
        ("", "has ended with 0, but not all that write to its pipes have"),
        ("import time; time.sleep(600)", "runs still"),
    ],
    ids=["orphan", "child"],
)
def test_a_command_that_does_not_end_tells_why(then, state):
    words = [sys.executable, "-c", PARENT.format(CHILD, then)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    if not then:
        process.wait(60)
    with pytest.raises(AssertionError, match=f"{state} after 0.5 s\n") as told:
        finish(process, 0.5)
    assert "in wait_for_ever" in str(told.value)
    pid = int(line.split()[-1])
    assert f"{pid} of " in str(told.value)
    assert not alive(pid)


def test_what_a_command_says():
    words = [sys.executable, "-c", "import sys; print('out'); sys.exit('err')"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (finish(process), process.returncode) == (("out\n", "err\n"), 1)
