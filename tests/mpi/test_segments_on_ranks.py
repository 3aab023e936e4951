"""Open MPI's shared memory has no name any more once a grid has been made."""

import re
import sys
from pathlib import Path

import pytest

import neondist as nd


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_shared_memory_has_no_name():
    nd.ProcessGrid()
    maps = Path("/proc/self/maps").read_text()
    assert re.findall(r"(?m)/\S*/(?:sm|vader)_segment\.\S+$", maps) == []
    nd.ProcessGrid()  # a second one finds nothing to do
