"""Ranks of `neondist run -n N` keep to cores of their own."""

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

OWN = min(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else 0


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch, tmp_path):
    """Two sockets of two cores with two threads each, numbered as Linux does: siblings last."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "none")
    monkeypatch.setattr(pinning, "TOPOLOGY", tmp_path)
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "core_id").write_text(f"{cpu // 2 % 2}\n")


def told(ranks, **env):
    return launch.environment(Mpirun("/x/mpirun", "Open MPI"), ranks, env).get(pinning.CPUS)


def test_cores_and_sockets_stay_together():
    assert told(4) == "0,4,2,6,1,5,3,7"


def test_without_topology_by_number(monkeypatch, tmp_path):
    monkeypatch.setattr(pinning, "TOPOLOGY", tmp_path / "none")
    assert told(3) == "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("ranks", "env"),
    [(9, {}), (2, {"OMP_NUM_THREADS": "5"}), (9, {"OMP_NUM_THREADS": "1"}), (2, {"NEONDIST_PIN": "no"})],
)
def test_unbound_where_cores_are_too_few_or_the_user_says_so(ranks, env):
    assert told(ranks, **env) is None


def test_the_users_threads_count():
    assert told(4, OMP_NUM_THREADS="2") is not None


def test_unbound_under_a_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert told(2) is None
    assert "quota" in pinning.explain_unpinned({})


@pytest.mark.parametrize(("ranks", "parts"), [(2, [[0, 4, 2, 6], [1, 5, 3, 7]]), (3, [[0, 4, 2], [6, 1, 5], [3, 7]])])
def test_every_rank_takes_its_part(monkeypatch, ranks, parts):
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus))
    env = {pinning.CPUS: told(ranks)}
    for rank in range(ranks):
        bound.clear()
        pinning.pin(Job(ranks, rank, ranks), env)
        assert bound
        assert all(cpus == parts[rank] for cpus in bound)


def test_a_job_of_ones_own_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    pinning.pin(Job(2, 1, 2), {})


def test_all_threads_of_a_process_are_bound():
    code = (
        "import os, threading, sys\n"
        "from neondist.launcher import pinning\nfrom neondist.system.job import Job\n"
        "stop, found = threading.Event(), []\n"
        "thread = threading.Thread(target=lambda: (stop.wait(60), found.append(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        f"pinning.pin(Job(1, 0, 1), {{pinning.CPUS: '{OWN}'}})\n"
        "stop.set(); thread.join(); print(*found, os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == f"{{{OWN}}} {{{OWN}}}"
