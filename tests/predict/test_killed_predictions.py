"""Predictions that are killed, or refused, at any call that creates, renames or removes their files.

At any call, the output is the earlier one, the complete one or absent, and the same command continues.
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

SHAPE, KILLED_EXIT_CODE, REFUSED_EXIT_CODE, WRONG_OUTPUT_EXIT_CODE = (10, 12, 3), 9, 2, 1
PACKAGE_BY_SUFFIX = {".nii": "nibabel", ".nii.gz": "nibabel", ".tif": "tifffile", ".ome.tif": "tifffile", ".png": "PIL"}
PACKAGE_BY_SUFFIX |= {".zarr": "zarr", ".ome.zarr": "zarr"}
SINK_OPTIONS_BY_SUFFIX = {
    suffix: {} for suffix in (".h5", ".nc", ".nii", ".nii.gz", ".tif", ".ome.tif", ".zarr", ".ome.zarr")
}
SINK_OPTIONS_BY_SUFFIX |= {".npy": {"raw": True, "classes": True}, ".png": {"classes": True}}
EXHAUSTIVE_CASES = {(".npy", True), (".zarr", True), (".nii.gz", False)}
"""Cases in which all calls after the last part are tried."""
CASE_INTERVAL, SEED = (
    int(os.environ.get("NEONDIST_SHARE", 37)),
    int(os.environ["NEONDIST_SEED"]),
)  # 1: all calls of all cases
FILE_AUDIT_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Parts:
    """Two parts of five rows, whose outputs are the cells of the image."""

    num_parts, output_shape, dtype, is_collective, identity_for_resume = 2, SHAPE, np.dtype("float32"), False, ["rows"]

    def __init__(self, images):
        self.images = images

    def source_aligned_with_output(self):
        return self.images.source

    def order_parts_for_reading(self, parts):
        return parts

    def read_local_input(self, part):
        return self.images.read(*self.local_output_samples_and_box(part), "float32")

    def compute_local_output(self, part, x):
        return x

    def local_output_samples_and_box(self, part):
        return range(1), nd.Box((5 * part, 0), (5 * part + 5, SHAPE[1]))

    def count_cells(self, part):
        return 5 * SHAPE[1]


class Network:
    """Stand-in for a trained network in `predict_module`."""

    @contextmanager
    def open_prediction_method(self, source, grid, block, resumed_method):
        images = open_images(source, SHAPE)
        yield Parts(images), images, {}
        images.close()


def run_prediction(folder, suffix, source="x.npy", **options):
    target_folder = folder / "out"
    arguments = SINK_OPTIONS_BY_SUFFIX[suffix] | options
    predict_module(Network(), folder / source, target_folder / f"y{suffix}", ProcessGrid.serial(), **arguments)


def run_in_fork(folder, action, at=0, fault=None):
    """Call an action in a fork; kill it, or raise an error, at one of its calls. Return the exit code and the calls."""
    log = folder / "calls"
    pid = os.fork()
    if not pid:
        calls, code = list[str](), WRONG_OUTPUT_EXIT_CODE

        def audit(event, arguments):
            if event not in FILE_AUDIT_EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
                return
            path = os.fsdecode(arguments[0])
            if event == "open" and not (arguments[2] or 0) & WRITE_FLAGS:
                return
            in_tree = not path.startswith("/")  # relative to a folder of the output
            if in_tree or path.startswith(str(folder / "out")):
                calls.append(f"{event} {path}")
                if len(calls) == at and fault is None:
                    os._exit(KILLED_EXIT_CODE)
                if len(calls) == at:
                    raise OSError(fault, os.strerror(fault))

        sys.dont_write_bytecode = True  # a size limit would truncate the bytecode of imported modules
        try:
            sys.addaudithook(audit)
            action()
            code = 0
        except OutputError as error:
            calls.append(str(error))
            code = REFUSED_EXIT_CODE
        except BaseException:
            calls.append(traceback.format_exc())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            try:
                log.write_text("\n".join(calls))
            finally:
                os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, [] if code == KILLED_EXIT_CODE else log.read_text().split("\n")


def run_with_size_limit(action, size):
    """Call an action with a limit to the size of the files that it writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    action()


def read_files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_files(folder, files):
    shutil.rmtree(folder / "out", ignore_errors=True)
    for name, raw in files.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_bytes(raw)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", SINK_OPTIONS_BY_SUFFIX)
@pytest.mark.long
def test_interruption_before_every_call(tmp_path, suffix, overwrite):
    pytest.importorskip(PACKAGE_BY_SUFFIX.get(suffix, "numpy"))
    x = np.random.default_rng(0).random(SHAPE, "float32")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "older.npy", 1 - x)
    earlier = {}
    if overwrite:
        assert run_in_fork(tmp_path, lambda: run_prediction(tmp_path, suffix, "older.npy"))[0] == 0
        earlier = read_files(tmp_path / "out")

    def run():
        run_prediction(tmp_path, suffix, overwrite=overwrite)

    write_files(tmp_path, earlier)
    code, calls = run_in_fork(tmp_path, run)
    assert code == 0, calls
    results = read_files(tmp_path / "out")
    assert {name.split(".")[0].split("/")[0] for name in results} <= {"y", "y-raw", "y-classes"}
    journal = [at for at, call in enumerate(calls) if call.endswith(".journal") and call.startswith("open")]
    interruptions = [(at, fault) for at in range(1, len(calls) + 1) for fault in (None, errno.ENOSPC)]
    after_last_part = (
        [(at, None) for at in range(journal[-1] + 2, len(calls) + 1)] if (suffix, overwrite) in EXHAUSTIVE_CASES else []
    )
    failures = []
    for at, fault in [*after_last_part, *interruptions[SEED % CASE_INTERVAL :: CASE_INTERVAL]]:
        write_files(tmp_path, earlier)
        code, log = run_in_fork(tmp_path, run, at, fault)
        before = read_files(tmp_path / "out")
        final_files = {
            name: content for name, content in before.items() if "partial" not in name and "replaced" not in name
        }
        if code == WRONG_OUTPUT_EXIT_CODE or any(
            final_files.get(name) not in (None, earlier.get(name), results[name]) for name in results
        ):
            failures.append((at, fault, calls[at - 1], code, log[-30:], sorted(before)))
        if before != results:
            code, log = run_in_fork(tmp_path, run)
            is_complete = code == REFUSED_EXIT_CODE and "already exists" in log[-1] and not overwrite
            if (code and not is_complete) or read_files(tmp_path / "out") != results:
                remaining = sorted(read_files(tmp_path / "out"))
                failures.append((at, fault, calls[at - 1], "then", code, log[-1:], sorted(before), remaining))
    listing = "\n".join([f"{len(failures)} failures", *map(str, failures)])
    assert not failures, listing.replace(f"{tmp_path}/out/", "")


@pytest.mark.parametrize("suffix", SINK_OPTIONS_BY_SUFFIX)
def test_prediction_on_a_full_disk(tmp_path, suffix):
    """One error message for each amount of free space; the same command then continues."""
    pytest.importorskip(PACKAGE_BY_SUFFIX.get(suffix, "numpy"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random(SHAPE, "float32"))
    refused, failures = 0, []
    for size in (20, 100, 250, 500, 900):
        write_files(tmp_path, {})

        def run(size=size):
            run_with_size_limit(lambda: run_prediction(tmp_path, suffix), size)

        code, log = run_in_fork(tmp_path, run)
        names = [path.name for path in (tmp_path / "out").iterdir() if "partial" not in path.name]
        refused += code == REFUSED_EXIT_CODE
        if code not in (0, REFUSED_EXIT_CODE) or (
            code and ("cannot be" not in log[-1] or len(names) == len(SINK_OPTIONS_BY_SUFFIX[suffix] or "y"))
        ):
            failures.append((size, code, log[-30:], names))
        if code and (retry := run_in_fork(tmp_path, lambda: run_prediction(tmp_path, suffix)))[0]:
            failures.append((size, "then", *retry))
    assert refused > 1
    assert not failures, "\n".join(map(str, failures))
