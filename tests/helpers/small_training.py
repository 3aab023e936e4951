"""Train a small network on four ranks, two replicas of two tiles: `small_training.py mpi|torch FOLDER`.

Each rank saves its results.
"""

import sys
from pathlib import Path

import numpy as np
from invariance import train

import neondist as nd

transport, folder = sys.argv[1:]
if transport == "mpi":
    from neondist.comm.mpi import world_transport as world
else:
    from neondist.torch.exchange.transport import world

with nd.ProcessGrid(world(), replicas=2) as grid:
    np.savez(Path(folder, f"{grid.rank}.npz"), **train("fully convolutional", grid))
