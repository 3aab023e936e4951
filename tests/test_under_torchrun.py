"""Tests of tests/torchrun on ranks of torch.distributed without MPI, and failures of such jobs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from availability import needs_mpirun
from common_checks import max_relative_difference

import neondist as nd
from neondist.comm import mpi
from neondist.errors import LaunchError
from neondist.launcher.mpirun import find_mpirun

TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"
RANKS = 1, 4

pytest.importorskip("torch", reason="torch.distributed comes with PyTorch")


def run_command(command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def run_on_ranks(ranks, *arguments, **environment):
    return run_command([sys.executable, HELPERS / "torch_ranks.py", str(ranks), *map(str, arguments)], **environment)


@pytest.mark.long
def test_under_torchrun():
    hidden = {
        "NEONDIST_MPI_TEST": "torch",
        "NEONDIST_TESTS_HIDE": "matplotlib mpi4py",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = "-p", "no:cacheprovider", "--color=no"
    process = run_on_ranks(",".join(map(str, RANKS)), *options, TESTS / "torchrun", **hidden)
    output = process.stdout[-8000:] + process.stderr[-4000:]
    assert process.returncode == 0, output
    passed = re.findall(r"(\d+) passed", process.stdout)
    assert len(passed) == sum(RANKS), output
    assert min(map(int, passed)) >= 20, output


@needs_mpirun
@pytest.mark.long
def test_training_equals_mpi(tmp_path):
    folders = {name: tmp_path / name for name in ("mpi", "torch")}
    for folder in folders.values():
        folder.mkdir()
    mpirun, script = find_mpirun(os.environ), HELPERS / "small_training.py"
    environment = {**mpirun.environment(), "NEONDIST_TESTS_HIDE": "matplotlib torch"}
    for process in (
        run_command([*mpirun.command(4), sys.executable, script, "mpi", folders["mpi"]], **environment),
        run_on_ranks(4, script, "torch", folders["torch"]),
    ):
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    for rank in range(4):
        with np.load(folders["mpi"] / f"{rank}.npz") as expected, np.load(folders["torch"] / f"{rank}.npz") as actual:
            assert len(expected.files) > 10
            assert max_relative_difference(dict(actual), dict(expected)) < 1e-12


EXIT_SCRIPT = """
import numpy as np
from neondist.comm import Message
from neondist.errors import RemoteError
from neondist.torch.exchange.transport import world

comm = world()
part = comm.split(0, -comm.rank)
comm.allgather(0)
if comm.rank == 1:
    comm.abort(0)
array, box = np.zeros(1000), (slice(0, 500),)
for call in (
    lambda: [comm.allreduce(array) for _ in range(3)],
    lambda: part.allreduce(array.astype(np.int16)),
    lambda: comm.allgather(array),
    lambda: comm.create_exchange([], [Message(1, array, box)]).run(),
):
    try:
        call()
    except RemoteError as error:
        print(error, flush=True)
"""


@pytest.mark.long
def test_exit_of_a_rank_raises_on_all_others(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(EXIT_SCRIPT)
    start = time.monotonic()
    process = run_on_ranks(3, script)
    for rank in (0, 2):
        message = f"rank {rank} of 3: another rank has exited or does not respond"
        assert process.stdout.count(message) == 4, process.stdout + process.stderr
    assert time.monotonic() - start < 60


ERROR_SCRIPT = """
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
def test_error_on_one_rank_ends_the_job(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(ERROR_SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = run_command([*torchrun, script])
    assert process.returncode == 1, process.stdout + process.stderr
    assert "ValueError: only here" in process.stderr


def test_world_without_torchrun_or_process_group(monkeypatch):
    from neondist.torch.exchange.transport import world

    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        LaunchError, match=r"lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start the script with `torchrun"
    ):
        world()
    for name, value in {"WORLD_SIZE": "two", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"does not start with RANK=0, WORLD_SIZE=two"):
        world()


def test_mpi_error_under_torchrun(monkeypatch):
    def fail_import():
        raise ImportError("No module named 'mpi4py'")

    monkeypatch.setattr(mpi, "_start_mpi", fail_import)
    with pytest.raises(LaunchError, match=r"load your cluster's MPI module$"):
        nd.ProcessGrid()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"MPI module; under torchrun use nd.ProcessGrid\(ndt.world\(\)\)"):
        nd.ProcessGrid()
    monkeypatch.setattr(mpi, "_start_mpi", lambda: SimpleNamespace(COMM_WORLD=None))
    monkeypatch.setattr(mpi, "MPITransport", lambda comm, max_count: SimpleNamespace(size=1))
    with pytest.raises(LaunchError, match="torchrun has started 2 ranks, but MPI sees one: under torchrun use"):
        nd.ProcessGrid()
