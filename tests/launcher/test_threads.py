"""Threads per rank."""

import os
import subprocess
import sys

import pytest
from availability import needs_mpirun

from neondist.launcher.mpirun import find_mpirun
from neondist.system import threads

SCRIPT = """
import sys
if "numpy" in sys.argv: import numpy
from neondist.system import threads
threads.count_cores = lambda process=0: {own_cores} if process == 0 else {parent_cores}
limit = threads.limit_threads(4)
import os, numpy
from threadpoolctl import threadpool_info
pools = [p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"]
print(limit, os.environ.get("OMP_NUM_THREADS"), *pools)
"""


def limit_in_subprocess(own_cores, parent_cores, *argv, **env):
    env = {**{k: v for k, v in os.environ.items() if k not in threads.THREAD_COUNT_VARIABLES}, **env}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(own_cores=own_cores, parent_cores=parent_cores), *argv],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return process.stdout.split()


def test_cores_at_least_one():
    assert 1 <= threads.count_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(8, 1, 8), (8, 3, 2), (2, 2, 1), (2, 9, 1)])
def test_share(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr(threads, "count_cores", lambda process=0: cores)
    assert threads.threads_per_rank(ranks) == expected


@pytest.mark.parametrize("loaded", [[], ["numpy"]])
@pytest.mark.long
def test_share_of_the_parents_cores(loaded):
    limit, variable, *pools = limit_in_subprocess(8, 8, *loaded)
    assert (limit, variable) == ("2", "2")
    assert all(int(n) <= 2 for n in pools)


def test_bound_ranks_use_their_cores():
    assert limit_in_subprocess(1, 8)[:2] == ["1", "1"]


def test_user_settings_are_kept():
    assert limit_in_subprocess(8, 8, OMP_NUM_THREADS="7")[:2] == ["None", "7"]
    assert limit_in_subprocess(8, 8, MKL_NUM_THREADS="7")[:2] == ["None", "None"]


RANK_SCRIPT = """
import neondist as nd
from threadpoolctl import threadpool_info
most = [max(p["num_threads"] for p in threadpool_info())]
for _ in range(2):
    nd.ProcessGrid()
    most.append(max(p["num_threads"] for p in threadpool_info()))
print(*most, flush=True)
"""


@needs_mpirun
@pytest.mark.parametrize("settings", [{}, {"OMP_NUM_THREADS": "3"}])
@pytest.mark.long
def test_script_under_plain_mpirun(settings):
    """Expect ranks to share the cores, each of which would otherwise use all, and one warning."""
    mpirun = find_mpirun(os.environ)
    env = (
        {k: v for k, v in os.environ.items() if k not in threads.THREAD_COUNT_VARIABLES}
        | mpirun.environment()
        | settings
    )
    words = [*mpirun.command(2), sys.executable, "-c", RANK_SCRIPT]
    process = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    share = max(1, threads.count_cores() // 2)
    for line in process.stdout.splitlines():
        before, *after = map(int, line.split())
        assert after == [before if settings else min(share, before)] * 2
    assert process.stderr.count("2 ranks share the cores of this machine") == (not settings and before > share)


def test_container_quota(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "CPU_QUOTA_FILE", quota)
    for text, expected in [("150000 100000", 2), ("max 100000", None), ("10000 100000", 1), ("", None)]:
        quota.write_text(text)
        assert threads._read_cpu_quota() == expected
