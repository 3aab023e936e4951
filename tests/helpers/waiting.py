"""Waiting for conditions that depend on other processes and threads."""

import time


def wait_until(condition, seconds=60.0, describe=lambda: "the condition does not hold in time", interval=0.02):
    """Poll a condition until it holds, and return its value; fail with a description after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, describe()
        time.sleep(interval)
    return value
