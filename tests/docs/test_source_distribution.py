"""Files of a source distribution, built by the build backend without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", "77")

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
FOLDERS = ("docs", "examples", "neondist", "tests", "tools", "yaml")
IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "_build", "*.egg-info")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Return the names of all files of an archive built from a copy of the checkout."""
    copy, output = tmp_path_factory.mktemp("sdist") / "checkout", tmp_path_factory.mktemp("output")
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    subprocess.run([sys.executable, "-c", BUILD, output], cwd=copy, check=True, capture_output=True)
    (archive,) = output.glob("neondist-*.tar.gz")
    with tarfile.open(archive) as file:
        return {member.name.partition("/")[2] for member in file if member.isfile()}


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "setup.py"])
@pytest.mark.long
def test_required_files(names, name):
    assert name in names


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_complete(names, folder):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc") and not {"__pycache__", "_build"} & {*path.parts}
    }
    assert files
    assert not sorted(files - names)


def test_no_build_products(names):
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "_build/" in name]
