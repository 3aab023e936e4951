"""Sandbox that runs the commands of the documentation as printed, on a few MNIST digits."""

import gzip
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

from cli_runs import run_in_process

from neondist.data.datasets.mnist import EMBEDDED_FOLDER
from neondist.launcher.mpirun import find_mpirun

ROOT = Path(__file__).parents[2]
DIGIT_COUNTS = {"train": 128, "t10k": 32}


class DocSandbox:
    """Folder with the yaml/ and examples/ of the repository, and `neondist`, `python` and `mpirun` on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.digits, tools = folder / "checkout", folder / "digits", folder / "bin"
        for directory in (self.folder, self.digits, tools):
            directory.mkdir(parents=True)
        for name in ("yaml", "examples"):
            (self.folder / name).symlink_to(ROOT / name)
        write_digits(self.digits)
        mpirun = find_mpirun(os.environ)
        options = mpirun.command(1)[3:]  # without '-n 1'
        for name, command in {
            "python": [sys.executable],
            "neondist": [sys.executable, "-m", "neondist"],
            "mpirun": [mpirun.path, *options],
        }.items():
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (tools / name).chmod(0o755)
        path = os.pathsep.join([str(tools), os.environ.get("PATH", "")])
        self.env = {**os.environ, **mpirun.environment(), "PATH": path, "OMP_NUM_THREADS": "1"}

    def write(self, name: str, text: str) -> None:
        """Write a file of the documentation; its MNIST dataset is replaced by the small one."""
        (self.folder / name).write_text(text.replace("nd.MNIST()", f"nd.MNIST({str(self.digits)!r})"))

    def run(self, command: str, timeout: float = 180.0) -> subprocess.CompletedProcess:
        """Run a command line and return its result, with stdout and stderr as one text.

        `neondist` runs in this process with virtual ranks, scripts on two ranks instead of three or four.
        """
        command = re.sub("^(mpirun -n|torchrun --nproc-per-node) [34] ", r"\1 2 ", self._use_small_dataset(command))
        kind, *words = shlex.split(command, comments=True)
        if kind == "neondist":
            if "-n" in words and words[0] != "check":
                index = words.index("-n")
                words[index : index + 2] = ["--virtual", words[index + 1]] if words[0] == "run" else []
            code, out, err = run_in_process(self.folder, *words)
            return subprocess.CompletedProcess(command, code, out + err)
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _use_small_dataset(self, command: str) -> str:
        words = shlex.split(command, comments=True)
        trains = words[:2] == ["neondist", "run"] and not any(word.startswith("dataset") for word in words)
        if trains and "!MNIST" in (self.folder / words[2]).read_text():
            return f"{command} --set dataset.path={self.digits}"
        if words[-1].endswith("mnist_script.py"):
            return f"{command} {self.digits}"
        return command


def write_digits(folder: Path) -> None:
    """Write the first of the embedded digits in the official file format."""
    for source in EMBEDDED_FOLDER.glob("*.gz"):
        raw = gzip.decompress(source.read_bytes())
        count = next(count for name, count in DIGIT_COUNTS.items() if source.name.startswith(name))
        head = 16 if "images" in source.name else 8
        sample = 28 * 28 if "images" in source.name else 1
        subset = raw[:4] + struct.pack(">i", count) + raw[8:head] + raw[head : head + count * sample]
        (folder / source.name).write_bytes(gzip.compress(subset))
