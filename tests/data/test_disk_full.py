"""Full disks: one error message, the old file unchanged, no partial file, and a process that continues."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from fuzz import classify_call, classify_command, run_isolated
from small_datasets import write_mnist

import neondist as nd

CAPACITY = 1 << 20


@contextlib.contextmanager
def small_disk(folder):
    """Mount a small tmpfs, or skip the test."""
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={CAPACITY}", "tmpfs", str(folder)], capture_output=True
    )
    if result.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def file_size_limit(folder):
    """Limit the size of the files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


FULL_DISKS = pytest.mark.parametrize(
    "limit_space",
    [
        pytest.param(
            small_disk, marks=pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="no root")
        ),
        file_size_limit,
    ],
)


def check_refused_twice(limit_space, folder, write, old_content):
    """Check that a child process is refused twice, exits normally and leaves only the old file."""
    folder.mkdir()
    with limit_space(folder):
        (folder / "x.h5").write_bytes(old_content)
        for message in run_isolated([1, 2], lambda _: write()):
            assert message.startswith("refused: "), message
            assert "No space left" in message or "File too large" in message
        assert os.listdir(folder) == ["x.h5"]
        assert (folder / "x.h5").read_bytes() == old_content
        assert os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize > CAPACITY // 2


@FULL_DISKS
@pytest.mark.parametrize("options", [[], ["--compress"]])
@pytest.mark.long
def test_convert(tmp_path, limit_space, options):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (60, 200, 200), dtype=np.uint8))
    np.save(tmp_path / "y.npy", np.arange(60))
    words = [tmp_path / "x.npy", tmp_path / "y.npy", "--to"]
    np.save(tmp_path / "small.npy", np.zeros((4, 9, 9), np.uint8))
    np.save(tmp_path / "few.npy", np.arange(4))
    assert (
        classify_command("data", "convert", tmp_path / "small.npy", tmp_path / "few.npy", "--to", tmp_path / "old.h5")
        == "fine"
    )
    folder = tmp_path / "disk"
    old_content = (tmp_path / "old.h5").read_bytes()
    check_refused_twice(
        limit_space, folder, lambda: classify_command("data", "convert", *words, folder / "x.h5", *options), old_content
    )


@FULL_DISKS
def test_tile_cache(tmp_path, limit_space):
    write_mnist(tmp_path / "mnist", counts=(3, 2))
    nd.MNIST(tmp_path / "mnist", serialized_path=tmp_path / "old.h5").open_splits(nd.ProcessGrid.serial())
    write_mnist(tmp_path / "mnist", counts=(3000, 20))
    folder = tmp_path / "disk"

    def write():
        return classify_call(
            lambda: nd.MNIST(tmp_path / "mnist", serialized_path=folder / "x.h5").open(nd.ProcessGrid.serial())
        )

    check_refused_twice(limit_space, folder, write, (tmp_path / "old.h5").read_bytes())
