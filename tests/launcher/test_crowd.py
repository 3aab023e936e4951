"""Refusal of more ranks than a machine supports, or than an image has cells."""

import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT

from neondist.cli import main
from neondist.errors import LaunchError
from neondist.launcher.launch import reject_too_many_ranks, warn_of_too_many_threads
from neondist.system import memory, threads


@pytest.fixture
def machine(monkeypatch):
    """Emulate a machine with four cores and 2 GB of free memory."""
    monkeypatch.setattr(threads, "count_cores", lambda process=0: 4)
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 << 30)


def test_cores(machine):
    reject_too_many_ranks(2, {})
    with pytest.raises(LaunchError, match=r"-n 65: too few cores .* at most 64 on 4 cores; --force"):
        reject_too_many_ranks(65, {})


def test_oversubscription_warning(machine, monkeypatch, capsys):
    for name in threads.THREAD_COUNT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    warn_of_too_many_threads(8, {})
    assert capsys.readouterr().err == ""
    warn_of_too_many_threads(9, {})
    assert "9 ranks x 1 thread on 4 cores mostly wait for each other; use -n 4" in capsys.readouterr().err
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    warn_of_too_many_threads(2, {"OMP_NUM_THREADS": "2"})
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    warn_of_too_many_threads(2, {"OMP_NUM_THREADS": "4"})
    assert "2 ranks x 4 threads on 4 cores" in (text := capsys.readouterr().err)
    assert "use -n 1, or set OMP_NUM_THREADS=2, or use more machines" in text
    warn_of_too_many_threads(60, {"SLURM_JOB_NUM_NODES": "8"})
    assert capsys.readouterr().err == ""


def test_memory(machine):
    with pytest.raises(LaunchError, match=r"-n 40: that many ranks need 2.68 GB .* 2.15 GB are free; give at most 32"):
        reject_too_many_ranks(40, {})


@pytest.mark.parametrize("env", [{"SLURM_JOB_NUM_NODES": "8"}, {"PBS_NODEFILE": "x"}])
def test_allocations_have_no_limits(machine, env):
    reject_too_many_ranks(1000, env)


@needs_mpirun
def test_rank_limits_of_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    assert main(["run", "toy.yaml", "-n", "20000"]) == 2
    assert "error: -n 20000: too few cores for that many ranks; give at most" in capsys.readouterr().err
    monkeypatch.setattr(threads, "count_cores", lambda process=0: 10_000)
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert main(["run", "toy.yaml", "-n", "121"]) == 2
    assert "error: 121 ranks for images of 120 cells, so some ranks would have no cells" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["toy.yaml"]
