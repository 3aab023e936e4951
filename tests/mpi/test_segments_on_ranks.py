"""Removal of the names of Open MPI's shared memory once a grid exists."""

import re
import sys
from pathlib import Path

import pytest

import neondist as nd


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_shared_memory_is_unlinked():
    nd.ProcessGrid()
    maps = Path("/proc/self/maps").read_text()
    assert re.findall(r"(?m)/\S*/(?:sm|vader)_segment\.\S+$", maps) == []
    nd.ProcessGrid()  # a second grid has nothing to remove
