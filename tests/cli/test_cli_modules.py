"""Option `--import`."""

import gc
import sys

import pytest

import neondist as nd
from neondist.cli import main
from neondist.cli.experiment import import_module
from neondist.errors import ConfigError
from neondist.registry import Registered, registered_classes


@pytest.fixture(autouse=True)
def restore_modules(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_file_that_imports_its_neighbour(tmp_path):
    write(tmp_path / "mine" / "cli_toy_helper.py", "NAME = 'x'\n")
    text = (
        "from cli_toy_helper import NAME\nfrom neondist.registry import Registered\nclass CliToyA(Registered): pass\n"
    )
    import_module(write(tmp_path / "mine" / "cli_toy_a.py", text))
    assert issubclass(registered_classes()["CliToyA"], Registered)


def test_module_in_the_working_directory(tmp_path):
    write(tmp_path / "cli_toy_b.py", "X = 1\n")
    import_module("cli_toy_b")
    assert sys.modules["cli_toy_b"].X == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("toy/none.py", None, r"^--import \S+none.py: no such file; give the path of"),
        (
            "bad.py",
            "x = 1\nx = = 2\n",
            r"^--import \S+bad.py: \S+bad.py:2: SyntaxError: .*",
        ),
        (
            "bad.py",
            "\n\n1 / 0\n",
            r"^--import \S+bad.py: \S+bad.py:3: ZeroDivisionError: division by zero",
        ),
        (
            "bad.py",
            "import sys\nsys.exit(3)\n",
            r"^--import \S+bad.py: \S+bad.py:2: SystemExit: 3",
        ),
        (
            "bad.py",
            "import no_such_thing\n",
            r"bad.py:1: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(ConfigError, match=message):
        import_module(str(path))
    assert "bad" not in sys.modules


def test_class_named_like_a_neondist_class(tmp_path, capsys):
    write(tmp_path / "cli_toy_e.py", "import neondist as nd\nclass Flip(nd.Shift): pass\n")
    model = "!Convnet {layers: [!FCLayer {out_features: 9}]}"
    text = f"!FitExperiment\ndataset: !MNIST {{}}\nmodel: {model}\naugment: [!Flip {{}}]\n"
    path = write(tmp_path / "a.yaml", text)
    try:
        assert main(["check", path, "--import", "cli_toy_e.py"]) == 2
        message = "a.yaml:4: augment.0: !Flip is a class of both neondist and cli_toy_e; rename your class\n"
        assert capsys.readouterr().err.endswith(message)
    finally:
        del sys.modules["cli_toy_e"]
        gc.collect()  # other tests need a single Flip
    assert registered_classes()["Flip"] is nd.Flip


def test_missing_module():
    message = r"^--import cli_toy_z: no module of this name; give a module's name, or the path of a \.py file$"
    with pytest.raises(ConfigError, match=message):
        import_module("cli_toy_z")
