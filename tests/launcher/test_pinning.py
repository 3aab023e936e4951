"""Binding of ranks to cores of their own."""

import os
import subprocess
import sys

import pytest

from neondist.launcher import launch, pinning
from neondist.launcher.mpirun import Mpirun
from neondist.system import threads
from neondist.system.job import Job

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not support CPU affinity"
)

OWN_CPU = min(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else 0


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch, tmp_path):
    """Emulate two sockets with two cores of two threads each; sibling threads are numbered last."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(threads, "CPU_QUOTA_FILE", tmp_path / "none")
    monkeypatch.setattr(pinning, "CPU_TOPOLOGY_DIR", tmp_path)
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "core_id").write_text(f"{cpu // 2 % 2}\n")


def list_cpus(ranks, **env):
    return launch.rank_environment(Mpirun("/x/mpirun", "Open MPI"), ranks, env).get(pinning.CPUS_VARIABLE)


def test_cores_and_sockets_stay_together():
    assert list_cpus(4) == "0,4,2,6,1,5,3,7"


def test_order_without_topology(monkeypatch, tmp_path):
    monkeypatch.setattr(pinning, "CPU_TOPOLOGY_DIR", tmp_path / "none")
    assert list_cpus(3) == "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("ranks", "env"),
    [(9, {}), (2, {"OMP_NUM_THREADS": "5"}), (9, {"OMP_NUM_THREADS": "1"}), (2, {"NEONDIST_PIN": "no"})],
)
def test_ranks_are_unbound_with_few_cores_or_on_request(ranks, env):
    assert list_cpus(ranks, **env) is None


def test_threads_per_rank_are_counted():
    assert list_cpus(4, OMP_NUM_THREADS="2") is not None


def test_ranks_are_unbound_under_a_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "CPU_QUOTA_FILE", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert list_cpus(2) is None
    assert "quota" in pinning.unpinned_reason({})


@pytest.mark.parametrize(("ranks", "shares"), [(2, [[0, 4, 2, 6], [1, 5, 3, 7]]), (3, [[0, 4, 2], [6, 1, 5], [3, 7]])])
def test_ranks_bind_to_their_shares(monkeypatch, ranks, shares):
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus))
    env = {pinning.CPUS_VARIABLE: list_cpus(ranks)}
    for rank in range(ranks):
        bound.clear()
        pinning.pin_rank(Job(ranks, rank, ranks), env)
        assert bound
        assert all(cpus == shares[rank] for cpus in bound)


def test_jobs_of_other_launchers_are_unbound(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    pinning.pin_rank(Job(2, 1, 2), {})


def test_all_threads_of_a_process_are_bound():
    code = (
        "import os, threading, sys\n"
        "from neondist.launcher import pinning\nfrom neondist.system.job import Job\n"
        "stop, affinities = threading.Event(), []\n"
        "thread = threading.Thread(target=lambda: (stop.wait(60), affinities.append(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        f"pinning.pin_rank(Job(1, 0, 1), {{pinning.CPUS_VARIABLE: '{OWN_CPU}'}})\n"
        "stop.set(); thread.join(); print(*affinities, os.sched_getaffinity(0))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.strip() == f"{{{OWN_CPU}}} {{{OWN_CPU}}}"
