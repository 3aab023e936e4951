"""Slurm batch script that requeues itself until the run is complete."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Sequence

from ...errors import LaunchError
from ...system.signals import STOPPED_EXIT_CODE
from .submission import Submission

STOP_SIGNAL_LEAD_SECONDS = 120
"""Seconds before the time limit at which a job stops with a checkpoint."""
MAX_REQUEUES = 100
_SCRIPT_TEMPLATE = """\
#!/bin/bash
{directives}
set -u
cd -- {folder} || exit 2

# USR1 is sent {lead} s before the time limit, TERM by preemption and scancel: the run writes a checkpoint and ends
run='' signals=0 over=0
stop() {{ # twice: a signal between fork and exec is lost
    signals=$((signals + 1))
    if [ "$run" ]; then kill -USR1 "$run"; (sleep 1; kill -USR1 "$run") > /dev/null 2>&1 & fi
}}
trap 'over=1; stop' USR1
trap stop TERM

restarts=${{SLURM_RESTART_COUNT:-0}}
echo "job $SLURM_JOB_ID, start $((restarts + 1)), $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST"
{hosts}code={stopped}
if [ "$signals" -eq 0 ]; then
    {command} \\
        -n "$SLURM_NTASKS" {options} --resume auto &
    run=$!
    if [ "$signals" -gt 0 ]; then stop; fi
    wait "$run"; code=$?
fi
while [ "$run" ] && [ "$signals" -gt 0 ]; do # a signal interrupts wait, not the run
    signals=0
    wait "$run"; again=$?
    [ "$again" -eq 127 ] || code=$again
done

if [ "$over" -eq 1 ] && [ "$code" -eq {killed} ]; then code={stopped}; fi # the run had no signal handler yet
if [ "$code" -eq {stopped} ] && [ "$over" -eq 1 ] && [ "$restarts" -lt {attempts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


# a file per job, rewritten at each start: a requeued job may run on other nodes
_HOST_FILE_TEMPLATE = """\
hosts=hosts-$SLURM_JOB_ID
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:{slots}/' > "$hosts" || exit 2
"""


def batch_script(job: Submission, python: str, folder: str, output: str) -> str:
    """Return a batch script that runs an experiment, and resumes it after each requeue.

    Parameters
    ----------
    job : Submission
    python : str
        Path of an interpreter with neondist, the same on all nodes.
    folder : str
        Working directory.
    output : str
        Folder of the run.
    """
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        "--requeue",
        f"--signal=B:USR1@{STOP_SIGNAL_LEAD_SECONDS}",
        "--open-mode=append",
    ]
    options = ["--output", output, *job.restart_options()]
    hosts = _HOST_FILE_TEMPLATE.format(slots=job.ranks_per_node) if job.needs_servers and job.nodes > 1 else ""
    if job.rank_bounds is not None:
        directives.append("--no-kill")  # a lost node does not end the job
        options += ["--elastic", f"{job.rank_bounds[0]}:{job.rank_bounds[1]}"]
    return _SCRIPT_TEMPLATE.format(
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        folder=shlex.quote(folder),
        command=shlex.join([python, "-m", "neondist", *job.run_arguments()]),
        options=shlex.join(options) + (' --hosts-from "$hosts"' if hosts else ""),
        hosts=hosts,
        lead=STOP_SIGNAL_LEAD_SECONDS,
        stopped=STOPPED_EXIT_CODE,
        killed=128 + signal.SIGUSR1,
        attempts=MAX_REQUEUES,
    )


def submit_script(script: str, sbatch: Sequence[str] = ("sbatch",)) -> str:
    """Submit a script to Slurm, and return the output of sbatch.

    Raises
    ------
    LaunchError
        Slurm is not available, or rejects the script.
    """
    try:
        process = subprocess.run(
            sbatch, input=script, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
        )
    except OSError as error:
        raise LaunchError(
            f"--apply: {sbatch[0]} cannot be run ({error.strerror}); run this on a submit host, or write the script"
            " with --output and copy it there"
        ) from error
    if process.returncode:
        message = " ".join((process.stderr.strip() or f"exit code {process.returncode}").split())
        raise LaunchError(f"--apply: sbatch rejected the script: {message}")
    return process.stdout.strip()
