"""Storage faults, or the end of the process, at every open, write, fsync, rename and unlink of kinds of commands.

`python storage_faults.py FOLDER SHARE [FIRST] [kill] [JOB ...] [and SHARE ...]` tries one in SHARE of all calls of
these or all jobs and prints a table; exit code 1 if one was not taken well. The process preloads faulty_disk.c and
forks for each, so that nothing is imported anew.
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

HERE = Path(__file__).parent
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "ENOENT", "EMFILE", "EBUSY"]
NET = """!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [6, 5, 2], classes: 3, train: 6, test: 3}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
batch_size: 4
epochs: 2
checkpoint: {every_steps: 1, keep: 2}
"""
GB = """!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [6, 5, 1], classes: 3, train: 4, test: 3}
model: !GBDist
  layers: [!LocalFilteringLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
batch_size: 4
epochs: 1
"""
MODULE = """!FitExperiment
dtype: float64
dataset: !Synthetic {shape: [6, 5, 1], classes: 3, train: 6, test: 3, validation: 0.4}
model: !TorchModel {factory: 'nets:net', loss: !TorchLoss {}, optimizer: !TorchOptimizer {name: Adam}}
batch_size: 2
epochs: 2
checkpoint: {every_steps: 1, keep: 2}
"""
NETS = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(24, 3))
"""
LIBRARIES = ["h5py", "psutil", "yaml", "rich.progress", "threadpoolctl", "neondist.cli", "neondist.train"]
LIBRARIES += ["neondist.io.environment", "neondist.backends.kernels", "neondist.data.convert", "neondist.torch"]
# the name, what has to be there, and the words
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
RESUME = {"old": "run net.yaml --output w/old --resume auto", "gb": "run gb.yaml --output w/gb --resume auto"}
# the commands that go on with one that was killed; of others the same
GOES_ON = {
    "fresh": ("run net.yaml --output w/out --resume", "run net.yaml --output w/out --resume auto"),
    "GB": ("run gb.yaml --output w/gb --resume", "run gb.yaml --output w/gb --resume auto"),
    "module": tuple(f"run module.yaml --import nets.py --output w/m --resume{how}" for how in ("", " auto")),
}
CLOCK = re.compile(r'"(seconds|samples_per_second)": [^,}]*')


def contents(folder):
    """Return what is in the files of a folder, but for clocks and for pictures."""
    import h5py
    import numpy as np

    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                arrays = {}
                file.visititems(lambda key, one, to=arrays: to.update({key: one[()]} if hasattr(one, "shape") else {}))
            found[name] = {
                key: one.tobytes() for key, one in arrays.items() if getattr(one, "dtype", "S").kind in "iuf"
            }
        elif path.suffix == ".jsonl":
            found[name] = CLOCK.sub("", path.read_text()) if path.name != "ledger.jsonl" else path.read_text()
        elif path.suffix == ".npz":
            with np.load(path) as file:
                found[name] = {key: file[key].tobytes() for key in file.files}
        else:
            found[name] = path.read_bytes() if path.suffix in (".npy", ".yaml", ".safetensors") else None
    return found


def difference(wanted, found):
    """Return which file differs, or ''."""
    for name in sorted({*wanted, *found}):
        if name not in found or name not in wanted:
            return f"{name} is {'missing' if name in wanted else 'left'}"
        if wanted[name] != found[name]:
            return f"{name} is another"
    return ""


def built(folder):
    """Compile the shim."""
    library = folder / "faulty_disk.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(HERE / "faulty_disk.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Bench:
    """A folder in which commands run, each in a fork, with one fault at most."""

    def __init__(self, folder):
        import numpy as np

        for name in LIBRARIES:  # here, and not in each fork
            importlib.import_module(name)
        self.folder, self.disk = folder, ctypes.CDLL(None)
        self.disk.faulty_disk_name.restype = ctypes.c_char_p
        os.chdir(folder)
        Path("net.yaml").write_text(NET)
        Path("gb.yaml").write_text(GB)
        Path("module.yaml").write_text(MODULE)
        Path("nets.py").write_text(NETS)
        np.save("x.npy", np.random.default_rng(0).random((3, 6, 5, 2)))
        np.save("labels.npy", np.arange(3))
        for name, words in (("old", "run net.yaml --output kept/old"), ("gb", "run gb.yaml --output kept/gb")):
            assert self.call(words)[0] == 0, name
        for path in Path("kept/gb").glob("checkpoint*.h5"):  # as if it had been killed in pretraining
            path.unlink()

    def call(self, words, fault=0, number=0):
        """Run a command in a fork; return its exit code, what it said, the number of calls and the one that failed."""
        reader, writer = os.pipe()
        with open(self.folder / "said", "w+b") as said:
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    os.close(reader)
                    os.dup2(said.fileno(), 1)
                    os.dup2(said.fileno(), 2)
                    sys.stdout, sys.stderr = (os.fdopen(os.dup(at), "w", closefd=False) for at in (1, 2))
                    signal.alarm(600)
                    code = self._work(words, fault, number, writer)
                finally:
                    os._exit(code)
            os.close(writer)
            with os.fdopen(reader) as pipe:
                count, _, name = pipe.read().partition(" ")
            status = os.waitpid(pid, 0)[1]
            said.seek(0)
            text = said.read().decode(errors="replace")
        return os.waitstatus_to_exitcode(status), text, int(count or 0), name

    def _work(self, words, fault, number, writer):
        import traceback

        from neondist.cli import main

        code = 1
        try:
            self.disk.faulty_disk_arm(os.fsencode(self.folder / "w"), fault, number)
            os.chdir(self.folder)
            code = main([str(self.folder / w) if w.startswith("w/") else w for w in words.split()])
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        os.write(writer, b"%d %s" % (self.disk.faulty_disk_count(), self.disk.faulty_disk_name()))
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def lay(self, kept):
        """Put the earlier runs that a command needs into the folder w."""
        shutil.rmtree("w", ignore_errors=True)
        os.mkdir("w")
        for name in kept:
            shutil.copytree(f"kept/{name}", f"w/{name}")

    def killed(self, job, kept, words, results):
        """Return what is wrong with what follows on a command that was killed, or ''."""
        for going_on in GOES_ON.get(job, (words,)):
            found = Path("killed")
            shutil.rmtree(found, ignore_errors=True)
            shutil.copytree("w", found)
            code, said, *_ = self.call(going_on)
            if code == 2 and going_on.endswith("--resume") and not any(found.iterdir()):
                continue  # there is no folder yet
            if code:
                return f"{going_on}: exit code {code}: {said}"
            if differs := difference(results, contents(Path("w"))):
                return f"{going_on}: {differs}"
            shutil.rmtree("w")
            shutil.copytree(found, "w")
        return ""

    def verdict(self, kept, code, said):
        """Return what is wrong with how a command took a fault, or ''."""
        if code < 0:
            return f"signal {-code}"
        if "Traceback" in said or "Exception" in said:
            return "traceback"
        if code not in (0, 2):
            return f"exit code {code}"
        told = [line for line in said.splitlines() if line.startswith("error: ")]
        if code == 2 and len(told) != 1:
            return "not one message"
        left = [path for path in Path("w").rglob("*") if re.search(r"\.partial$|\.tmp$", path.name)]
        if left:
            return f"left {left[0].name}"
        for name in kept:
            code, said, *_ = self.call(RESUME[name])
            if code:
                return f"cannot be resumed: {said.strip().splitlines()[-1]}"
        return ""


def tried(bench, share, first=0, kill=False, jobs=()):
    """Try one in `share` faults, or ends of the process; return how many were not taken well."""
    rows, wrong = {}, []
    for job in jobs or JOBS:
        kept, words = JOBS[job]
        bench.lay(kept)
        code, said, calls, _ = bench.call(words)
        assert code == 0, (job, said)
        results = contents(Path("w")) if kill else {}
        found, slowest = Counter(), 0.0
        for at, fault in enumerate(range(1 + first % share, calls + 1, share)):
            name = ERRORS[(at + first) % len(ERRORS)]
            bench.lay(kept)
            began = time.monotonic()
            code, said, _, failed = bench.call(words, fault, 0 if kill else getattr(errno, name))
            slowest = max(slowest, time.monotonic() - began)
            problem = bench.killed(job, kept, words, results) if kill else bench.verdict(kept, code, said)
            found["faults"] += 1
            found["exit 0"] += code == 0
            found["exit 2"] += code == 2
            if problem:
                wrong.append(f"{job}: fault {fault}, {name} at {failed}: {problem}\n{said}")
                print(wrong[-1], file=sys.stderr, flush=True)
                found["wrong"] += 1
        rows[job] = (calls, found, slowest)
        print(job, calls, dict(found), f"{slowest:.1f} s", file=sys.stderr, flush=True)
    print(f"{'job':12} {'calls':>6} {'faults':>6} {'exit 0':>6} {'exit 2':>6} {'wrong':>6} {'slowest':>8}")
    for job, (calls, found, slowest) in rows.items():
        numbers = " ".join(f"{found[key]:6}" for key in ("faults", "exit 0", "exit 2", "wrong"))
        print(f"{job:12} {calls:6} {numbers} {slowest:7.1f}s")
    print(f"{sum(found['faults'] for _, found, _ in rows.values())} faults, {len(wrong)} wrong")
    for each in wrong:
        print(each)
    return len(wrong)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if "FAULTY_DISK" not in os.environ:
        env = os.environ | {"FAULTY_DISK": "1", "LD_PRELOAD": str(built(folder)), "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    with contextlib.suppress(KeyError):
        del os.environ["LD_PRELOAD"]
    bench, wrong = Bench(folder), 0
    for _, words in itertools.groupby(sys.argv[2:], lambda word: word == "and"):
        words = list(words)
        numbers = [int(word) for word in words if word.isdecimal()]
        if numbers:
            jobs = [word for word in words[len(numbers) :] if word != "kill"]
            wrong += tried(bench, *numbers, kill="kill" in words, jobs=jobs)
    sys.exit(bool(wrong))
