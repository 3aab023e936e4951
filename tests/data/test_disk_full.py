"""A full disk: one message, the old file as it was, nothing half written, and the process goes on."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from dataset_toys import small_mnist
from fuzz import outcome, survive, typed

import neondist as nd

ROOM = 1 << 20


@contextlib.contextmanager
def mounted(folder):
    """Mount a small memory disk, or skip."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def limited(folder):
    """Let no file of this process grow beyond the room there is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


FULL = pytest.mark.parametrize(
    "full",
    [
        pytest.param(mounted, marks=pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="no root")),
        limited,
    ],
)


def refused_twice(full, folder, attempt, old):
    """A child tries twice, ends well, and leaves the old file and nothing else."""
    folder.mkdir()
    with full(folder):
        (folder / "x.h5").write_bytes(old)
        for said in survive([1, 2], lambda _: attempt()):
            assert said.startswith("refused: "), said
            assert "No space left" in said or "File too large" in said
        assert os.listdir(folder) == ["x.h5"]
        assert (folder / "x.h5").read_bytes() == old
        assert os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize > ROOM // 2


@FULL
@pytest.mark.parametrize("more", [[], ["--compress"]])
@pytest.mark.long
def test_convert(tmp_path, full, more):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (60, 200, 200), dtype=np.uint8))
    np.save(tmp_path / "y.npy", np.arange(60))
    small = [tmp_path / "x.npy", tmp_path / "y.npy", "--to"]
    np.save(tmp_path / "small.npy", np.zeros((4, 9, 9), np.uint8))
    np.save(tmp_path / "few.npy", np.arange(4))
    assert typed("data", "convert", tmp_path / "small.npy", tmp_path / "few.npy", "--to", tmp_path / "old.h5") == "fine"
    place = tmp_path / "disk"
    old = (tmp_path / "old.h5").read_bytes()
    refused_twice(full, place, lambda: typed("data", "convert", *small, place / "x.h5", *more), old)


@FULL
def test_tile_cache(tmp_path, full):
    small_mnist(tmp_path / "mnist", counts=(3, 2))
    nd.MNIST(tmp_path / "mnist", serialized_path=tmp_path / "old.h5").load(nd.ProcessGrid.serial())
    small_mnist(tmp_path / "mnist", counts=(3000, 20))
    place = tmp_path / "disk"

    def attempt():
        return outcome(
            lambda: nd.MNIST(tmp_path / "mnist", serialized_path=place / "x.h5").open(nd.ProcessGrid.serial())
        )

    refused_twice(full, place, attempt, (tmp_path / "old.h5").read_bytes())
