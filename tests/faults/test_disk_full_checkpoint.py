"""A disk that is full when a checkpoint is written: one message, exit code 2, and the old file as it was."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
WRITE = """
    import resource, shutil, sys
    sys.path.insert(0, {helpers!r})
    from pathlib import Path
    from checkpoint_toys import load, save
    from neondist.errors import OutputError

    folder = Path({folder!r})
    good = save(folder / "c.h5", 2, steps=1)
    before = (folder / "c.h5").read_bytes()
    {fill}
    try:
        save(folder / "c.h5", 2, steps=3)
    except OutputError as error:
        print("told:", error)
    assert (folder / "c.h5").read_bytes() == before
    assert not (folder / "c.h5.partial").exists()
    {empty}
    save(folder / "c.h5", 2, steps=3)
    assert load(folder / "c.h5")[0].step == 3
    print("went on")
"""


def script(folder, fill, empty):
    return textwrap.dedent(WRITE).format(helpers=str(HELPERS), folder=str(folder), fill=fill, empty=empty)


def run(words, text):
    return subprocess.run([*words, sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


def can_mount():
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    words = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of resources")
def test_a_file_that_may_not_grow(tmp_path):
    fill = "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, resource.RLIM_INFINITY))"
    empty = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    done = run([], script(tmp_path, fill, empty))
    assert done.returncode == 0, done.stderr
    assert "c.h5: the checkpoint cannot be written (File too large)" in done.stdout
    assert "went on" in done.stdout


@pytest.mark.parametrize("foreseen", [True, False])
@pytest.mark.long
def test_a_small_tmpfs(tmp_path, foreseen):
    if not can_mount():
        pytest.skip("needs user namespaces to mount a tmpfs")
    fill = '(folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - 20000))'
    if not foreseen:  # as if another process had filled it in the meantime
        fill += '; usage, shutil.disk_usage = shutil.disk_usage, lambda path: usage("/")'
    mount = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"', "sh"]
    done = run(mount, script(tmp_path, fill, '(folder / "filler").unlink()'))
    assert done.returncode == 0, done.stderr
    reason = r"it needs 0.2 MB, the disk has 0.0 MB" if foreseen else "No space left on device"
    assert f"c.h5: the checkpoint cannot be written ({reason})" in done.stdout
    assert "went on" in done.stdout
