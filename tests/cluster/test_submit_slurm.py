"""Batch script of `neondist submit --slurm`: run by bash and, if available, by Slurm."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from cli_runs import EXPERIMENT, run_in_process
from processes import communicate

from neondist.cluster.submit import Submission
from neondist.cluster.submit.slurm import MAX_REQUEUES, batch_script, submit_script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
# stands in for Python: prints its words; with `wait`, sleeps until a signal and exits as a stopped run
RUN_SCRIPT = """#!/bin/bash
printf '<%s>' "$@"; echo
[[ "$*" == *wait* ]] || exit ${CODE:-0}
trap 'kill $!; exit 75' USR1
sleep 60 & touch ready; wait $!
"""
SCONTROL_SCRIPT = """#!/bin/sh
if [ "$1" = show ]; then printf 'n1\\nn2\\n'; else echo "$@" >> requeued; fi
"""
CONFIG = os.environ.get("SLURM_CONF")
SPECIAL = 'it\'s a "b" $HOME `id` ; &'


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / SPECIAL
    folder.mkdir()
    (folder / "a b.yaml").write_text(EXPERIMENT)
    for name, text in (("run", RUN_SCRIPT), ("scontrol", SCONTROL_SCRIPT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def script_of(folder, *settings, **fields):
    job = Submission("a-b", "a b.yaml", 4, 2, settings=settings, **fields)
    return batch_script(job, str(folder / "run"), str(folder), "runs/a b")


def start_script(folder, script, **env):
    env = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n[1-2]", **env,
    }  # fmt: skip
    job = subprocess.Popen(["bash"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    job.stdin.write(script)
    job.stdin.flush()
    return job


def test_workers_with_servers_run_on_the_nodes_of_the_job(folder):
    script = script_of(folder, needs_servers=True)
    job = start_script(folder, script)
    out, _ = communicate(job)
    words = ["-m", "neondist", "run", "a b.yaml", "-n", "4", "--output", "runs/a b", "--hosts-from", "hosts-7"]
    assert out.splitlines()[-1] == "".join(f"<{word}>" for word in [*words, "--resume", "auto"])
    assert (folder / "hosts-7").read_text() == "n1:2\nn2:2\n"


def test_paths_that_are_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.yaml").write_text(EXPERIMENT)
    assert run_in_process(folder, "submit", "--slurm", "a.yaml", "--output", "job.sh")[0] == 0
    assert b"/caf\xe9' || exit" in (folder / "job.sh").read_bytes()
    assert submit_script(str(folder), ("cat",)) == str(folder)


def test_jobs_of_other_names_have_their_own_output_folders(tmp_path):
    (tmp_path / "a b.yaml").write_text(EXPERIMENT)
    for options, folder in (((), "'runs/a b'"), (("--name", "c"), "runs/c")):
        assert run_in_process(tmp_path, "submit", "--slurm", "a b.yaml", "--output", "job.sh", *options)[0] == 0
        assert f"--output {folder} " in (tmp_path / "job.sh").read_text()


@pytest.mark.parametrize("code", [0, 2, 75, 137])
def test_arguments_and_exit_codes_are_preserved(folder, code):
    script = script_of(folder, f"name={SPECIAL}", modules=("x y.py",), rank_bounds=(2, 4))
    job = start_script(folder, script, CODE=str(code))
    out, _ = communicate(job)
    assert job.returncode == code
    words = ["-m", "neondist", "run", "a b.yaml", "--set", f"name={SPECIAL}", "--import", "x y.py", "-n", "4",
             "--output", "runs/a b", "--restarts", "3", "--elastic", "2:4", "--resume", "auto"]  # fmt: skip
    assert out.splitlines()[-1] == "".join(f"<{word}>" for word in words)
    assert not (folder / "requeued").exists()  # the run's own time limit ends the job


@pytest.mark.parametrize(("number", "starts", "requeued"), [
    (signal.SIGUSR1, 0, "requeue 7\n"), (signal.SIGUSR1, MAX_REQUEUES - 1, "requeue 7\n"),
    (signal.SIGUSR1, MAX_REQUEUES, ""),
    (signal.SIGTERM, 0, ""),
])  # fmt: skip
def test_signals_end_the_run_with_a_checkpoint(folder, number, starts, requeued):
    """Requeue after the warning before the time limit, but not after the signal that ends a job."""
    script = script_of(folder, "wait=1")
    job = start_script(folder, script, SLURM_RESTART_COUNT=str(starts))
    while not (folder / "ready").exists():
        assert job.poll() is None, communicate(job)
        time.sleep(0.01)
    job.send_signal(number)
    out, _ = communicate(job)
    assert job.returncode == 75
    assert f"start {starts + 1}," in out
    assert (folder / "requeued").exists() == bool(requeued)
    if requeued:
        assert (folder / "requeued").read_text() == requeued


@pytest.mark.parametrize("moment", ["", "restarts=$", "    $run", "    run=$"])
def test_signal_before_the_run_handles_it(folder, moment):
    """Requeue the job although the signal kills the run or prevents its start.

    Parameters
    ----------
    moment : line of the script that follows the signal; '' if the run sends it
    """
    script, run = script_of(folder), shlex.quote(str(folder / "run"))
    (folder / "run").write_text(f"#!/bin/bash\n{'' if moment else 'kill -USR1 $PPID; '}exec sleep 60\n")
    if moment:
        before, after = script.split(line := f"\n{moment.replace('$run', run)}")
        script = f"{before}\nkill -USR1 $$\n{line}{after}"
    job = start_script(folder, script)
    communicate(job)
    assert job.returncode == 75
    assert (folder / "requeued").read_text() == "requeue 7\n"


def test_missing_slurm(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    code, out, err = run_in_process(folder, "submit", "--slurm", "a b.yaml", "--apply")
    assert (code, out, "sbatch cannot be run" in err) == (2, "", True), err
    (folder / "sbatch").write_text('#!/bin/sh\necho "sbatch: error: invalid partition specified: x" >&2; exit 1\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    code, _, err = run_in_process(folder, "submit", "--slurm", "a b.yaml", "--apply")
    assert (code, "invalid partition specified: x" in err) == (2, True), err


def find_obstacle():
    """Return the reason why Slurm cannot be used here, or ''."""
    if not all(map(shutil.which, ("sbatch", "sinfo", "scancel", "squeue"))):
        return "needs Slurm"
    try:
        process = subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "Slurm does not answer"
    return "Slurm does not answer" if process.returncode else ""


@pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
def test_requeued_job_resumes(folder, monkeypatch):
    """Submit to Slurm, and send the warning before the time limit by hand in the first run."""
    if CONFIG:  # tests run without Slurm's variables
        monkeypatch.setenv("SLURM_CONF", CONFIG)
    epochs = "epochs=2000"
    code, out, err = run_in_process(folder, "submit", "--slurm", "a b.yaml", "-n", 2, "--set", epochs, "--apply")
    assert code == 0, err
    number = re.fullmatch(r"Submitted batch job (\d+)\n", out)[1]
    log, metrics = folder / f"slurm-{number}.out", folder / "runs" / "a b" / "metrics.jsonl"

    def wait(condition):
        for _ in range(3000):
            if condition():
                return
            time.sleep(0.1)
        pytest.fail(log.read_text() if log.exists() else "not started")

    try:
        wait(lambda: metrics.exists() and metrics.read_text())
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
        wait(lambda: "start 2, 2 ranks" in log.read_text())
        before = metrics.read_text()
        wait(lambda: len(metrics.read_text()) > len(before))
    finally:
        subprocess.run(["scancel", number], check=True)
    wait(lambda: number not in subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout)
    text = log.read_text()
    assert "stopped at step" in text
    assert metrics.read_text().startswith(before)  # it continued from its checkpoint
    epochs = re.findall(r"^epoch (\d+)/2000", text, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(1, len(epochs) + 1)]
