"""Control characters and markup in names on the terminal, and unusual names of outputs."""

import io
import os

import pytest
from cli_runs import EXPERIMENT

from neondist.cli import main
from neondist.terminal.console import emit, say
from neondist.terminal.rich_console import Console

HOSTILE_TEXT = "[red]x\x1b[31m\x07\u202e[/]\r\udcff:smile:\x00"
ESCAPED_TEXT = r"[red]x\x1b[31m\x07\u202e[/]\r\udcff:smile:\x00"


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_are_escaped(terminal, capsys):
    from rich.table import Table
    from rich.text import Text

    table = Table(HOSTILE_TEXT, title=HOSTILE_TEXT)
    table.add_row(Text(HOSTILE_TEXT))
    table.add_row(HOSTILE_TEXT)
    for item in (HOSTILE_TEXT, Text(HOSTILE_TEXT, style="bold"), table):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
        console.print(item)
        text = console.file.getvalue()
        assert ESCAPED_TEXT in text or r"\x1b[31m" in text
        assert all(
            character.isprintable() or character == "\n"
            for character in text.replace("\x1b[1m", "").replace("\x1b[0m", "")
        )
    emit(HOSTILE_TEXT)
    say(HOSTILE_TEXT, start="\r")
    assert capsys.readouterr().out == f"{ESCAPED_TEXT}\n\r{ESCAPED_TEXT}\n"


def test_names_of_layers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = r'"[red]x\e[31m\a\u202e"'
    text = EXPERIMENT.replace("out_channels: 2", f"name: {name}, out_channels: 2")
    (tmp_path / "a.yaml").write_text(text)
    assert main(["check", "a.yaml"]) == 0
    assert r"[red]x\x1b[31m\x07\u202e " in capsys.readouterr().out
    (tmp_path / "a.yaml").write_text(text.replace("out_channels: 2", "out_channels: 2, kernel_sise: 1"))
    assert main(["check", "a.yaml"]) == 2
    output = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in output.out + output.err)


FOLDERS = {"-x": "-x", "./--": "--", "~/x": "home/x", "./~": "~", "a b": "a b", "a\nb": "a\nb", "[x]": "[x]"}


@pytest.mark.parametrize("argument", FOLDERS)
def test_names_of_output_folders(tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "-a.yaml").write_text(EXPERIMENT.replace("epochs: 2", "epochs: 1"))
    assert main(["run", f"--output={argument}", "--", "-a.yaml"]) == 0
    assert (tmp_path / FOLDERS[argument] / "metrics.jsonl").exists()
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("words", [
    "run a.yaml --output=--", "run a.yaml --output=",
    "sweep a.yaml --vary epochs=1..2 --output=--", "report run --to=--",
    "report run --to=", "predict a.yaml --checkpoint c --input i --output=--",
    "evaluate a.yaml --checkpoint c --report=",
    "init images --to=--", "data convert images --to=", "bench step a.yaml --json=--", "bench scaling a.yaml --output=",
])  # fmt: skip
def test_empty_names_of_outputs(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    assert "name" in capsys.readouterr().err.splitlines()[-1]
    assert os.listdir(tmp_path) == []
