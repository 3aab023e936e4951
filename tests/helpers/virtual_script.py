"""Scripts of examples/ on virtual ranks of this process, which has imported PyTorch."""

import sys
import threading

import pytest
import torch
from torch_runs import share_captures

from neondist import ProcessGrid
from neondist.comm import loopback, mpi


def run_script(script, *arguments, ranks=1):
    """Run a script on virtual ranks and return the printed lines; every rank has its own namespace and world."""
    lines, local = [], threading.local()
    code = compile(script.read_text(encoding="utf-8"), str(script), "exec")

    def body(world):
        local.world = world
        names = {"__name__": script.stem, "__file__": str(script)}
        names["print"] = lambda *values, flush: lines.append(" ".join(values))
        exec(code, names)
        # a process would end here; log writers may keep the namespace alive
        for grid in {getattr(value, "grid", None) for value in names.values()}:
            if isinstance(grid, ProcessGrid):
                grid.close()

    with pytest.MonkeyPatch.context() as patch, share_captures():
        patch.setattr(mpi, "world_transport", lambda: local.world)
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        patch.setattr(sys, "excepthook", sys.excepthook)  # scripts leave their grid open
        previous = torch.get_default_dtype()
        try:
            loopback.run(ranks, body)
        finally:
            torch.set_default_dtype(previous)
    return lines
