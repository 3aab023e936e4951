"""Storage faults, or the end of the process, at every open, write, fsync, rename and unlink of several commands.

`python storage_faults.py FOLDER SHARE [FIRST] [kill] [JOB ...] [and SHARE ...]` injects a fault at one in SHARE of all
calls of these or all jobs and prints a table; the exit code is 1 if any fault is handled incorrectly. The process
preloads faulty_disk.c and forks for each command, so that modules are imported only once.
"""

import contextlib
import ctypes
import errno
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "ENOENT", "EMFILE", "EBUSY"]
CONVNET_YAML = """!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [6, 5, 2], classes: 3, train: 6, test: 3}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
batch_size: 4
epochs: 2
checkpoint: {every_steps: 1, keep: 2}
"""
GB_YAML = """!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [6, 5, 1], classes: 3, train: 4, test: 3}
model: !GBDist
  layers: [!LocalFilteringLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
batch_size: 4
epochs: 1
"""
MODULE_YAML = """!FitExperiment
dtype: float64
dataset: !Synthetic {shape: [6, 5, 1], classes: 3, train: 6, test: 3, validation: 0.4}
model: !TorchModel {factory: 'nets:net', loss: !TorchLoss {}, optimizer: !TorchOptimizer {name: Adam}}
batch_size: 2
epochs: 2
checkpoint: {every_steps: 1, keep: 2}
"""
MODULE_SOURCE = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(24, 3))
"""
LIBRARIES = ["h5py", "psutil", "yaml", "rich.progress", "threadpoolctl", "neondist.cli", "neondist.train"]
LIBRARIES += ["neondist.io.environment", "neondist.backends.kernels", "neondist.data.convert", "neondist.torch"]
# by name: earlier runs that are needed, and the command
JOBS = {
    "fresh": ((), "run net.yaml --output w/out"),
    "overwrite": (("old",), "run net.yaml --output w/old --overwrite"),
    "resume": (("old",), "run net.yaml --output w/old --resume --set epochs=3"),
    "two ranks": (("old",), "run net.yaml --output w/old --resume --set epochs=3 --virtual 2"),
    "GB": ((), "run gb.yaml --output w/gb"),
    "GB resumed": (("gb",), "run gb.yaml --output w/gb --resume --set model.num_pretrain_epochs=2"),
    "predict npy": (("old",), "predict net.yaml --checkpoint w/old/checkpoint.h5 --input x.npy --output w/y.npy"),
    "predict h5": (("old",), "predict net.yaml --checkpoint w/old/checkpoint.h5 --input x.npy --output w/y.h5"),
    "evaluate": (("old",), "evaluate net.yaml --checkpoint w/old/checkpoint.h5"),
    "module": ((), "run module.yaml --import nets.py --output w/m"),
    "convert": ((), "data convert x.npy labels.npy --to w/data.h5"),
}
RESUME_COMMANDS = {"old": "run net.yaml --output w/old --resume auto", "gb": "run gb.yaml --output w/gb --resume auto"}
# commands that continue a killed job; by default, the job itself
CONTINUATIONS = {
    "fresh": ("run net.yaml --output w/out --resume", "run net.yaml --output w/out --resume auto"),
    "GB": ("run gb.yaml --output w/gb --resume", "run gb.yaml --output w/gb --resume auto"),
    "module": tuple(f"run module.yaml --import nets.py --output w/m --resume{how}" for how in ("", " auto")),
}
TIMES_PATTERN = re.compile(r'"(seconds|samples_per_second)": [^,}]*')


def read_contents(folder):
    """Return the contents of the files in a folder, without times and images."""
    import h5py
    import numpy as np

    result = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                arrays = {}
                file.visititems(
                    lambda key, item, arrays=arrays: arrays.update({key: item[()]} if hasattr(item, "shape") else {})
                )
            result[name] = {
                key: item.tobytes() for key, item in arrays.items() if getattr(item, "dtype", "S").kind in "iuf"
            }
        elif path.suffix == ".jsonl":
            result[name] = TIMES_PATTERN.sub("", path.read_text()) if path.name != "ledger.jsonl" else path.read_text()
        elif path.suffix == ".npz":
            with np.load(path) as file:
                result[name] = {key: file[key].tobytes() for key in file.files}
        else:
            result[name] = path.read_bytes() if path.suffix in (".npy", ".yaml", ".safetensors") else None
    return result


def find_difference(expected, actual):
    """Return a description of the first file that differs, or ''."""
    for name in sorted({*expected, *actual}):
        if name not in actual or name not in expected:
            return f"{name} is {'missing' if name in expected else 'left over'}"
        if expected[name] != actual[name]:
            return f"{name} differs"
    return ""


def compile_shim(folder):
    """Compile the preloaded library and return its path."""
    library = folder / "faulty_disk.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(FOLDER / "faulty_disk.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


class CommandSandbox:
    """Folder in which commands run, each in a forked process with at most one fault."""

    def __init__(self, folder):
        import numpy as np

        for name in LIBRARIES:  # once, not in each child
            importlib.import_module(name)
        self.folder, self.disk = folder, ctypes.CDLL(None)
        self.disk.faulty_disk_name.restype = ctypes.c_char_p
        os.chdir(folder)
        Path("net.yaml").write_text(CONVNET_YAML)
        Path("gb.yaml").write_text(GB_YAML)
        Path("module.yaml").write_text(MODULE_YAML)
        Path("nets.py").write_text(MODULE_SOURCE)
        np.save("x.npy", np.random.default_rng(0).random((3, 6, 5, 2)))
        np.save("labels.npy", np.arange(3))
        for name, command in (("old", "run net.yaml --output kept/old"), ("gb", "run gb.yaml --output kept/gb")):
            assert self.call(command)[0] == 0, name
        for path in Path("kept/gb").glob("checkpoint*.h5"):  # as after a kill during pretraining
            path.unlink()

    def call(self, command, fault=0, error_code=0):
        """Run a command in a forked process; return exit code, output, number of calls and the failed call."""
        reader, writer = os.pipe()
        with open(self.folder / "output", "w+b") as file:
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    os.close(reader)
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                    sys.stdout, sys.stderr = (
                        os.fdopen(os.dup(descriptor), "w", closefd=False) for descriptor in (1, 2)
                    )
                    signal.alarm(600)
                    code = self._work(command, fault, error_code, writer)
                finally:
                    os._exit(code)
            os.close(writer)
            with os.fdopen(reader) as pipe:
                count, _, name = pipe.read().partition(" ")
            status = os.waitpid(pid, 0)[1]
            file.seek(0)
            text = file.read().decode(errors="replace")
        return os.waitstatus_to_exitcode(status), text, int(count or 0), name

    def _work(self, command, fault, error_code, writer):
        import traceback

        from neondist.cli import main

        code = 1
        try:
            self.disk.faulty_disk_arm(os.fsencode(self.folder / "w"), fault, error_code)
            os.chdir(self.folder)
            code = main([str(self.folder / word) if word.startswith("w/") else word for word in command.split()])
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        os.write(writer, b"%d %s" % (self.disk.faulty_disk_count(), self.disk.faulty_disk_name()))
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def restore_runs(self, kept):
        """Copy the earlier runs that a command needs to the folder w."""
        shutil.rmtree("w", ignore_errors=True)
        os.mkdir("w")
        for name in kept:
            shutil.copytree(f"kept/{name}", f"w/{name}")

    def check_continuations(self, job, kept, command, results):
        """Return the failure of a command that continues a killed job, or ''."""
        for continuation in CONTINUATIONS.get(job, (command,)):
            backup = Path("killed")
            shutil.rmtree(backup, ignore_errors=True)
            shutil.copytree("w", backup)
            code, output, *_ = self.call(continuation)
            if code == 2 and continuation.endswith("--resume") and not any(backup.iterdir()):
                continue  # the job had not created its folder
            if code:
                return f"{continuation}: exit code {code}: {output}"
            if difference := find_difference(results, read_contents(Path("w"))):
                return f"{continuation}: {difference}"
            shutil.rmtree("w")
            shutil.copytree(backup, "w")
        return ""

    def check_outcome(self, kept, command, code, output):
        """Return the failure of a command with a fault, or ''."""
        if code < 0:
            return f"signal {-code}"
        if "Traceback" in output or "Exception" in output:
            return "traceback"
        if code not in (0, 2):
            return f"exit code {code}"
        messages = [line for line in output.splitlines() if line.startswith("error: ")]
        if code == 2 and len(messages) != 1:
            return "no error message, or several"
        leftovers = _find_leftovers()
        if leftovers and all(
            f"{path.name} keeps the completed blocks; repeat the command" in output for path in leftovers
        ):
            code, output, *_ = self.call(command)
            if code:
                return f"cannot be repeated: {output.strip().splitlines()[-1]}"
            leftovers = _find_leftovers()
        if leftovers:
            return f"leaves {leftovers[0].name}"
        for name in kept:
            code, output, *_ = self.call(RESUME_COMMANDS[name])
            if code:
                return f"cannot be resumed: {output.strip().splitlines()[-1]}"
        return ""


def _find_leftovers():
    """Return the incomplete files in the folder w."""
    return [path for path in Path("w").rglob("*") if re.search(r"\.partial$|\.tmp$", path.name)]


def try_faults(sandbox, share, first=0, kill=False, jobs=()):
    """Inject one in `share` faults, or kill the process there; return the number of failures."""
    rows, failures = {}, []
    for job in jobs or JOBS:
        kept, command = JOBS[job]
        sandbox.restore_runs(kept)
        code, output, calls, _ = sandbox.call(command)
        assert code == 0, (job, output)
        results = read_contents(Path("w")) if kill else {}
        counts, slowest = Counter(), 0.0
        for index, fault in enumerate(range(1 + first % share, calls + 1, share)):
            name = ERRORS[(index + first) % len(ERRORS)]
            sandbox.restore_runs(kept)
            start = time.monotonic()
            code, output, _, failed = sandbox.call(command, fault, 0 if kill else getattr(errno, name))
            slowest = max(slowest, time.monotonic() - start)
            if kill:
                problem = sandbox.check_continuations(job, kept, command, results)
            else:
                problem = sandbox.check_outcome(kept, command, code, output)
            counts["faults"] += 1
            counts["exit 0"] += code == 0
            counts["exit 2"] += code == 2
            if problem:
                failures.append(f"{job}: fault {fault}, {name} at {failed}: {problem}\n{output}")
                print(failures[-1], file=sys.stderr, flush=True)
                counts["wrong"] += 1
        rows[job] = (calls, counts, slowest)
        print(job, calls, dict(counts), f"{slowest:.1f} s", file=sys.stderr, flush=True)
    print(f"{'job':12} {'calls':>6} {'faults':>6} {'exit 0':>6} {'exit 2':>6} {'wrong':>6} {'slowest':>8}")
    for job, (calls, counts, slowest) in rows.items():
        numbers = " ".join(f"{counts[key]:6}" for key in ("faults", "exit 0", "exit 2", "wrong"))
        print(f"{job:12} {calls:6} {numbers} {slowest:7.1f}s")
    print(f"{sum(counts['faults'] for _, counts, _ in rows.values())} faults, {len(failures)} wrong")
    for failure in failures:
        print(failure)
    return len(failures)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if "FAULTY_DISK" not in os.environ:
        env = os.environ | {"FAULTY_DISK": "1", "LD_PRELOAD": str(compile_shim(folder)), "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    with contextlib.suppress(KeyError):
        del os.environ["LD_PRELOAD"]
    sandbox, failures = CommandSandbox(folder), 0
    for _, group in itertools.groupby(sys.argv[2:], lambda word: word == "and"):
        group = list(group)
        numbers = [int(word) for word in group if word.isdecimal()]
        if numbers:
            jobs = [word for word in group[len(numbers) :] if word != "kill"]
            failures += try_faults(sandbox, *numbers, kill="kill" in group, jobs=jobs)
    sys.exit(bool(failures))
