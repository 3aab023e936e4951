"""Invocations of the `neondist` command."""

import contextlib
import io
import os
import re
import subprocess
import sys

from processes import communicate

from neondist.cli import main
from neondist.launcher.mpirun import find_mpirun

EXPERIMENT = """\
!FitExperiment
dataset: !Synthetic {shape: [12, 10, 1], classes: 3, train: 24, test: 12}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 2, kernel_size: 3, padding: 1, activation: !ReLU {}}
    - !MaxPoolingLayerDist {kernel_size: 2}
    - !FCLayerDist {out_features: 3}
  cost: !CrossEntropy {}
  optimizer: !SGD {learning_rate: 1e-3}
batch_size: 8
epochs: 2
dtype: float64
backend: numpy
seed: 1
"""


def start_command(command, cwd, **env):
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def build_command(*argv):
    return [sys.executable, "-m", "neondist", *map(str, argv)]


def build_mpirun_command(ranks, *argv):
    return [*find_mpirun(os.environ).command(ranks), *build_command(*argv)]


def strip_mpirun_notices(err):
    """Remove mpirun's own notices, blocks between rules and libevent warnings, from stderr."""
    notices = r"^-{40,}\n.*?^-{40,}\n|^(\[warn\] Epoll|\[[^\]\s]+:\d+\] )[^\n]*\n"
    return re.sub(notices, "", err.replace("\0", ""), flags=re.DOTALL | re.MULTILINE)


def run_command(command, cwd, **env):
    """Run a command and return its exit code, stdout, and stderr without output that appears only on busy machines."""
    process = start_command(command, cwd, **env)
    try:
        out, err = communicate(process)
    finally:
        process.kill()
    return process.returncode, out, strip_progress_lines(err)


def strip_progress_lines(err):
    """Return stderr without the progress lines that only a busy machine prints."""
    lines = r"(preparing, [^\n]* so far|\w+ \d+ of \d+, [^\n]*)  |step \d+: epoch [^\n]*|starting the ranks"
    return re.sub(rf"^({lines})\n", "", err, flags=re.MULTILINE)


def run_in_process(folder, *argv):
    """Run `neondist` in this process, which has its imports loaded; return exit code, stdout and stderr."""
    previous, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(word) for word in argv])
    finally:
        os.chdir(previous)
    return code, out.getvalue(), strip_progress_lines(err.getvalue())


def mpirun_environment():
    return find_mpirun(os.environ).environment()


def parse_losses(out):
    return re.findall(r"train loss ([\d.]+)  test loss ([\d.]+)", out)
