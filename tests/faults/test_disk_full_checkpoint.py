"""Full disk while a checkpoint is written: one message, and an unchanged previous file."""

import re
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
    from checkpoint_runs import load_run, save_run
    from neondist.errors import OutputError

    folder = Path({folder!r})
    save_run(folder / "c.h5", 2, steps=1)
    before = (folder / "c.h5").read_bytes()
    {fill}
    try:
        save_run(folder / "c.h5", 2, steps=3)
    except OutputError as error:
        print(error)
    assert (folder / "c.h5").read_bytes() == before
    assert not (folder / "c.h5.partial").exists()
    {empty}
    save_run(folder / "c.h5", 2, steps=3)
    assert load_run(folder / "c.h5")[0].step == 3
    print("continued")
"""


def make_script(folder, fill, empty):
    return textwrap.dedent(WRITE).format(helpers=str(HELPERS), folder=str(folder), fill=fill, empty=empty)


def run_script(words, text):
    return subprocess.run([*words, sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


def can_mount():
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    words = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of resources")
def test_limit_of_file_size(tmp_path):
    fill = "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, resource.RLIM_INFINITY))"
    empty = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    process = run_script([], make_script(tmp_path, fill, empty))
    assert process.returncode == 0, process.stderr
    assert "c.h5: the checkpoint cannot be written (File too large)" in process.stdout
    assert "continued" in process.stdout


@pytest.mark.parametrize("detected_early", [True, False])
@pytest.mark.long
def test_full_tmpfs(tmp_path, detected_early):
    if not can_mount():
        pytest.skip("needs user namespaces to mount a tmpfs")
    fill = '(folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - 20000))'
    if not detected_early:  # as if another process had filled it meanwhile
        fill += '; usage, shutil.disk_usage = shutil.disk_usage, lambda path: usage("/")'
    mount = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"', "sh"]
    process = run_script(mount, make_script(tmp_path, fill, '(folder / "filler").unlink()'))
    assert process.returncode == 0, process.stderr
    reason = r"it needs \d+ kB, but 1\d(\.\d)? kB are free" if detected_early else "No space left on device"
    assert re.search(rf"c\.h5: the checkpoint cannot be written \({reason}\)", process.stdout), process.stdout
    assert "continued" in process.stdout
