"""A script of examples/ on virtual ranks of the tests' process, which has imported PyTorch already."""

import sys
import threading

import pytest
import torch
from torch_runs import captured_once

from neondist.comm import loopback, mpi


def printed_by(script, *words, ranks=1):
    """Return the lines that the ranks of a script print; each has its own names, and the world for its MPI."""
    lines, local = [], threading.local()
    code = compile(script.read_text(encoding="utf-8"), str(script), "exec")

    def body(world):
        local.world = world
        names = {"__name__": script.stem, "__file__": str(script)}
        names["print"] = lambda *said, flush: lines.append(" ".join(said))
        exec(code, names)
        if hasattr(names.get("model"), "grid"):  # a process would end here; a writer of logs may keep the names
            names["model"].grid.close()

    with pytest.MonkeyPatch.context() as patch, captured_once():
        patch.setattr(mpi, "world", lambda: local.world)
        patch.setattr(sys, "argv", [str(script), *map(str, words)])
        patch.setattr(sys, "excepthook", sys.excepthook)  # the script's grid is open to the end
        before = torch.get_default_dtype()
        try:
            loopback.run(ranks, body)
        finally:
            torch.set_default_dtype(before)
    return lines
