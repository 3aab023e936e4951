"""Examples on one rank and on four, with the same losses."""

import re

import pytest
from doc_sandbox import ROOT, DocSandbox

EXAMPLES = {
    "own_layer.py": "",
    "mnist_script.py": "",
    "halo_by_hand.py": " 96",
}
WITH_TORCH = "torch_unet_one_process.py", "torch_unet.py", "torch_resume.py", "torch_stripes.py"
"""run by tests/examples/test_torch_unet.py, test_torch_resume.py and the tests of docs/pytorch.md"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return DocSandbox(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.long
def test_example(sandbox, name):
    losses = []
    for launcher in ("python", "mpirun -n 4 python"):
        process = sandbox.run(f"{launcher} examples/{name}{EXAMPLES[name]}")
        assert process.returncode == 0, process.stdout
        losses.append(re.findall(r"loss +([\d.]+)", process.stdout))
    assert len(losses[0]) == len(losses[1])
    digits = 4 if name == "mnist_script.py" else 10  # float32, float64
    for serial, parallel in zip(*losses, strict=True):
        assert float(serial) == pytest.approx(float(parallel), rel=10**-digits)
    if losses[0]:
        assert float(losses[0][-2]) < float(losses[0][0])


def test_every_example_has_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [path.name for path in (ROOT / "examples").glob("*.py") if path.name not in tests]


def test_custom_layers_have_at_most_fifteen_lines():
    text = (ROOT / "examples" / "own_layer.py").read_text().split("# begin layer\n")[1].split("# end layer")[0]
    code = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 15
