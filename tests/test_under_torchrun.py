"""Start the tests of tests/torchrun on ranks of torch.distributed, which find no MPI; and what ends such a job."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from present import needs_mpirun
from support import worst

import neondist as nd
from neondist.comm import mpi
from neondist.errors import LaunchError
from neondist.launcher.mpirun import find_mpirun

HERE = Path(__file__).parent
HELPERS = HERE / "helpers"
RANKS = 1, 4

pytest.importorskip("torch", reason="torch.distributed comes with PyTorch")


def started(command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def on_ranks(ranks, *arguments, **environment):
    return started([sys.executable, HELPERS / "torch_ranks.py", str(ranks), *map(str, arguments)], **environment)


@pytest.mark.long
def test_under_torchrun():
    hidden = {
        "NEONDIST_MPI_TEST": "torch",
        "NEONDIST_TESTS_HIDE": "matplotlib mpi4py",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = "-p", "no:cacheprovider", "--color=no"
    done = on_ranks(",".join(map(str, RANKS)), *options, HERE / "torchrun", **hidden)
    said = done.stdout[-8000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == sum(RANKS), said
    assert min(map(int, passed)) >= 20, said


@needs_mpirun
@pytest.mark.long
def test_a_network_learns_the_same_as_over_mpi(tmp_path):
    folders = {name: tmp_path / name for name in ("mpi", "torch")}
    for folder in folders.values():
        folder.mkdir()
    mpirun, script = find_mpirun(os.environ), HELPERS / "small_training.py"
    environment = {**mpirun.environment(), "NEONDIST_TESTS_HIDE": "matplotlib torch"}
    for done in (
        started([*mpirun.command(4), sys.executable, script, "mpi", folders["mpi"]], **environment),
        on_ranks(4, script, "torch", folders["torch"]),
    ):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for rank in range(4):
        with np.load(folders["mpi"] / f"{rank}.npz") as one, np.load(folders["torch"] / f"{rank}.npz") as other:
            assert len(one.files) > 10
            assert worst(dict(other), dict(one)) < 1e-12


ENDS = """
import numpy as np
from neondist.comm import Message
from neondist.errors import RemoteError
from neondist.torch.exchange.transport import world

comm = world()
part = comm.split(0, -comm.rank)
comm.allgather(0)
if comm.rank == 1:
    comm.abort(0)
array, here = np.zeros(1000), (slice(0, 500),)
for wait in (
    lambda: [comm.allreduce(array) for _ in range(3)],
    lambda: part.allreduce(array.astype(np.int16)),
    lambda: comm.allgather(array),
    lambda: comm.exchange([], [Message(1, array, here)]).run(),
):
    try:
        wait()
    except RemoteError as error:
        print(error, flush=True)
"""


@pytest.mark.long
def test_a_rank_that_ends_is_an_error_on_all_others(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    before = time.monotonic()
    done = on_ranks(3, script)
    for rank in (0, 2):
        told = f"rank {rank} of 3: another rank has exited or does not respond"
        assert done.stdout.count(told) == 4, done.stdout + done.stderr
    assert time.monotonic() - before < 60


FAILS = """
import sys
import numpy as np
import neondist as nd
from neondist.torch.exchange.transport import world

with nd.ProcessGrid(world()) as grid:
    array = np.zeros(5)
    request = grid.world.iallreduce(array)
    if grid.rank == 1:
        raise ValueError("only here")
    request.wait()
    grid.world.allgather(array)
"""


@pytest.mark.long
def test_an_error_on_one_rank_ends_a_job_of_torchrun(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = started([*torchrun, script])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: only here" in done.stderr


def test_neither_torchrun_nor_a_process_group(monkeypatch):
    from neondist.torch.exchange.transport import world

    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing .*: start with `torchrun"):
        world()
    for name, value in {"WORLD_SIZE": "two", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"does not start with RANK=0, WORLD_SIZE=two"):
        world()


def test_mpi_says_what_ranks_of_torchrun_need(monkeypatch):
    def missing():
        raise ImportError("No module named 'mpi4py'")

    monkeypatch.setattr(mpi, "_start_mpi", missing)
    with pytest.raises(LaunchError, match=r"load your cluster's MPI module$"):
        nd.ProcessGrid()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"MPI module; under torchrun use nd.ProcessGrid\(ndt.world\(\)\)"):
        nd.ProcessGrid()
    monkeypatch.setattr(mpi, "_start_mpi", lambda: SimpleNamespace(COMM_WORLD=None))
    monkeypatch.setattr(mpi, "MPITransport", lambda comm, most: SimpleNamespace(size=1))
    with pytest.raises(LaunchError, match="torchrun has started 2 ranks, but MPI sees one: under torchrun use"):
        nd.ProcessGrid()
