"""A prediction that is killed, or refused, before any one of the calls that make, name and remove its files.

Whenever that is, the output is the earlier one, the complete one or not there, and the same command goes on.
"""

import errno
import os
import shutil
import sys
import traceback
from contextlib import contextmanager

import numpy as np
import pytest

resource = pytest.importorskip("resource")

import neondist as nd  # noqa: E402
from neondist.comm import ProcessGrid  # noqa: E402
from neondist.errors import OutputError  # noqa: E402
from neondist.train.inference import predict_module  # noqa: E402
from neondist.train.inference.images import open_images  # noqa: E402

SHAPE, KILLED, REFUSED, WRONG = (10, 12, 3), 9, 2, 1
PACKAGES = {".nii": "nibabel", ".nii.gz": "nibabel", ".tif": "tifffile", ".ome.tif": "tifffile", ".png": "PIL"}
PACKAGES |= {".zarr": "zarr", ".ome.zarr": "zarr"}
KINDS = {one: {} for one in (".h5", ".nc", ".nii", ".nii.gz", ".tif", ".ome.tif", ".zarr", ".ome.zarr")}
KINDS |= {".npy": {"raw": True, "classes": True}, ".png": {"classes": True}}
NAMED = {(".npy", True), (".zarr", True), (".nii.gz", False)}
"""of which all calls are tried that come after the last part"""
SHARE, SEED = int(os.environ.get("NEONDIST_SHARE", 37)), int(os.environ["NEONDIST_SEED"])  # 1: of all others, too
MAKE = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Parts:
    """Two rows of five, each the image's cells themselves."""

    parts, output_shape, dtype, collective, about = 2, SHAPE, np.dtype("float32"), False, ["rows"]

    def __init__(self, images):
        self.images = images

    def like(self):
        return self.images.source

    def ordered(self, parts):
        return parts

    def read(self, part):
        return self.images.read(*self.place(part), "float32")

    def outputs(self, part, x):
        return x

    def place(self, part):
        return range(1), nd.Box((5 * part, 0), (5 * part + 5, SHAPE[1]))

    def cells(self, part):
        return 5 * SHAPE[1]


class Network:
    """Stand-in for a trained network in `predict_module`."""

    @contextmanager
    def opened(self, source, grid, block, before):
        images = open_images(source, SHAPE)
        yield Parts(images), images, {}
        images.close()


def predicted(folder, suffix, source="x.npy", **how):
    place = folder / "out"
    kinds = KINDS[suffix] | how
    predict_module(Network(), folder / source, place / f"y{suffix}", ProcessGrid.serial(), **kinds)


def forked(folder, action, at=0, fault=None):
    """Call an action in a fork that ends, or is refused, at one of its calls; exit code, the calls, its message."""
    said = folder / "said"
    pid = os.fork()
    if not pid:
        calls, code = list[str](), WRONG

        def count(event, given):
            if event not in MAKE or not isinstance(given[0], (str, bytes, os.PathLike)):
                return
            path = os.fsdecode(given[0])
            if event == "open" and not (given[2] or 0) & WRITES:
                return
            if path.startswith(str(folder / "out")) or not path.startswith("/"):  # of a tree, relative to its folders
                calls.append(f"{event} {path}")
                if len(calls) == at and fault is None:
                    os._exit(KILLED)
                if len(calls) == at:
                    raise OSError(fault, os.strerror(fault))

        sys.dont_write_bytecode = True  # of a module that is imported under a limit, every later run would read a part
        try:
            sys.addaudithook(count)
            action()
            code = 0
        except OutputError as error:
            calls.append(str(error))
            code = REFUSED
        except BaseException:
            calls.append(traceback.format_exc())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            try:
                said.write_text("\n".join(calls))
            finally:
                os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, [] if code == KILLED else said.read_text().split("\n")


def limited(action, size):
    """Call an action that can write files of so many bytes at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    action()


def contents(folder):
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def lay(folder, files):
    shutil.rmtree(folder / "out", ignore_errors=True)
    for name, raw in files.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_bytes(raw)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.long
def test_ends_before_every_call(tmp_path, suffix, overwrite):
    pytest.importorskip(PACKAGES.get(suffix, "numpy"))
    x = np.random.default_rng(0).random(SHAPE, "float32")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "older.npy", 1 - x)
    earlier = {}
    if overwrite:
        assert forked(tmp_path, lambda: predicted(tmp_path, suffix, "older.npy"))[0] == 0
        earlier = contents(tmp_path / "out")

    def run():
        predicted(tmp_path, suffix, overwrite=overwrite)

    lay(tmp_path, earlier)
    code, calls = forked(tmp_path, run)
    assert code == 0, calls
    results = contents(tmp_path / "out")
    assert {name.split(".")[0].split("/")[0] for name in results} <= {"y", "y-raw", "y-classes"}
    journal = [at for at, one in enumerate(calls) if one.endswith(".journal") and one.startswith("open")]
    tried = [(at, fault) for at in range(1, len(calls) + 1) for fault in (None, errno.ENOSPC)]
    naming = [(at, None) for at in range(journal[-1] + 2, len(calls) + 1)] if (suffix, overwrite) in NAMED else []
    wrong = []
    for at, fault in [*naming, *tried[SEED % SHARE :: SHARE]]:
        lay(tmp_path, earlier)
        code, said = forked(tmp_path, run, at, fault)
        before = contents(tmp_path / "out")
        whole = {name: one for name, one in before.items() if "partial" not in name and "replaced" not in name}
        if code == WRONG or any(whole.get(name) not in (None, earlier.get(name), results[name]) for name in results):
            wrong.append((at, fault, calls[at - 1], code, said[-30:], sorted(before)))
        if before != results:
            code, said = forked(tmp_path, run)
            there = code == REFUSED and "exists already" in said[-1] and not overwrite  # it was complete
            if (code and not there) or contents(tmp_path / "out") != results:
                left = sorted(contents(tmp_path / "out"))
                wrong.append((at, fault, calls[at - 1], "then", code, said[-1:], sorted(before), left))
    listed = "\n".join([f"{len(wrong)} wrong", *map(str, wrong)])
    assert not wrong, listed.replace(f"{tmp_path}/out/", "")


@pytest.mark.parametrize("suffix", KINDS)
def test_a_disk_that_is_full(tmp_path, suffix):
    """The file is refused in one message, whatever of it does not fit any more, and the same command goes on."""
    pytest.importorskip(PACKAGES.get(suffix, "numpy"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random(SHAPE, "float32"))
    refused, wrong = 0, []
    for size in (20, 100, 250, 500, 900):
        lay(tmp_path, {})
        code, said = forked(tmp_path, lambda size=size: limited(lambda: predicted(tmp_path, suffix), size))
        names = [one.name for one in (tmp_path / "out").iterdir() if "partial" not in one.name]
        refused += code == REFUSED
        if code not in (0, REFUSED) or (
            code and ("cannot be" not in said[-1] or len(names) == len(KINDS[suffix] or "y"))
        ):
            wrong.append((size, code, said[-30:], names))
        if code and (then := forked(tmp_path, lambda: predicted(tmp_path, suffix)))[0]:
            wrong.append((size, "then", *then))
    assert refused > 1
    assert not wrong, "\n".join(map(str, wrong))
