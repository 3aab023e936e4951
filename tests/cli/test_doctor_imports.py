"""Supported versions of PyTorch, and imports checked by `neondist doctor`."""

import re
from pathlib import Path

import pytest

from neondist.cli import doctor
from neondist.version import SUPPORTED_TORCH_RANGE, unsupported_torch_remedy

ROOT = Path(__file__).parents[2]


def test_version_range_matches_pyproject():
    bounds = re.search(r'^torch = \["torch>=([0-9.]+),<([0-9.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert bounds.groups() == tuple(".".join(map(str, bound)) for bound in SUPPORTED_TORCH_RANGE)
    pinned = re.search(r"^torch==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert not unsupported_torch_remedy(pinned)


@pytest.mark.parametrize("version", ["1.13.1", "2.2.2", "2.8.0+cpu", "2.16.0", "2.16.0a0+git1", "3.0", "unknown"])
def test_unsupported_versions(version):
    assert re.search(
        rf"{re.escape(version)} is not supported.*pip install 'torch>=2\.9,<2\.16'", unsupported_torch_remedy(version)
    )


@pytest.mark.parametrize("version", ["2.9.0", "2.9.1+cu128", "2.13.0+cpu", "2.15.0"])
def test_supported_versions(version):
    assert not unsupported_torch_remedy(version)


def test_failed_imports(tmp_path, monkeypatch):
    modules = {
        "no_such_thing": "raise AttributeError('no such\\nthing')",
        "ends_the_process": "import os; os._exit(3)",
        "imports_well": "print('hello')",
        "says_no": "from neondist.errors import MissingPackageError; raise MissingPackageError('install it')",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failures = doctor.failed_imports([*modules, "json"])
    assert failures.pop("ends_the_process").startswith("the import takes more than")
    assert failures == {"no_such_thing": "AttributeError: no such thing", "says_no": "install it"}


def test_doctor_warns_of_failed_imports(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "failed_imports", lambda modules: {"neondist.torch": "AttributeError: no apply"})
    monkeypatch.setattr(doctor, "get_versions", lambda: {"torch": "2.14.1", "cupy": None})
    warnings = []
    assert doctor._check_packages(warnings) == [("torch", "2.14.1, cannot be imported"), ("cupy", "not installed")]
    assert warnings == ["`import neondist.torch` fails: AttributeError: no apply; reinstall torch, or remove it"]
