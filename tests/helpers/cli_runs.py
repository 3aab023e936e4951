"""Running the command as users do."""

import contextlib
import io
import os
import re
import subprocess
import sys

from present import needs_mpirun as needs_mpirun  # for the tests here
from processes import finish

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


def start(words, cwd, **env):
    return subprocess.Popen(
        words, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def neondist(*argv):
    return [sys.executable, "-m", "neondist", *map(str, argv)]


def under_mpirun(ranks, *argv):
    return [*find_mpirun(os.environ).command(ranks), *neondist(*argv)]


def own(err):
    """Return what is on stderr without mpirun's notices, which no filter has left out: blocks between rules, events."""
    notices = r"^-{40,}\n.*?^-{40,}\n|^(\[warn\] Epoll|\[[^\]\s]+:\d+\] )[^\n]*\n"
    return re.sub(notices, "", err.replace("\0", ""), flags=re.DOTALL | re.MULTILINE)


def call(words, cwd, **env):
    """Return exit code, stdout and stderr."""
    process = start(words, cwd, **env)
    try:
        out, err = finish(process)
    finally:
        process.kill()
    return process.returncode, out, err


def here(folder, *argv):
    """Return exit code, stdout and stderr of the command in this process, which has imported all that it needs."""
    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(word) for word in argv])
    finally:
        os.chdir(before)
    return code, out.getvalue(), err.getvalue()


def mpirun_env():
    return find_mpirun(os.environ).environment()


def losses(out):
    return re.findall(r"train loss ([\d.]+)  test loss ([\d.]+)", out)
