"""Arguments of the command line."""

import argparse
import re
import time

import pytest
from cli_runs import EXPERIMENT, build_command, run_command

import neondist as nd
from neondist.cli import main, options
from neondist.cli.arguments import create_parser
from neondist.launcher.launch import rank_args


def parse(*argv):
    return create_parser().parse_args(argv)


def test_settings_precede_or_follow_the_file():
    for argv in (
        ["run", "e.yaml", "--set", "a=1", "--set", "b.c=-2"],
        ["run", "--set", "a=1", "b.c=-2", "e.yaml"],
        ["run", "--set", "a=1", "e.yaml", "--set", "b.c=-2", "-n", "3"],
        ["check", "--set", "a=1", "b.c=-2", "-n", "2", "e.yaml"],
    ):
        arguments = parse(*argv)
        assert (arguments.file, arguments.settings) == ("e.yaml", ["a=1", "b.c=-2"])


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"neondist {nd.__version__}\n"


def test_file_name_with_an_equals_sign():
    arguments = parse("run", "--set", "a=b=c", "lr/x=1.yaml")
    assert (arguments.file, arguments.settings) == ("lr/x=1.yaml", ["a=b=c"])


@pytest.mark.parametrize(
    ("prefix", "completions"),
    [
        ("run e.yaml --set ba", ["backend=", "batch_size="]),
        ("run e.yaml --set epochs=3 batch_", ["batch_size="]),
        ("run e.yaml --set epochs=3 --out", ["--output "]),
    ],
)
@pytest.mark.long
def test_shells_complete_each_field_after_set(tmp_path, prefix, completions):
    pytest.importorskip("argcomplete")
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    line = f"neondist {prefix}"
    env = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "completions"),
    }
    run_command(build_command(), tmp_path, _ARGCOMPLETE="1", _ARGCOMPLETE_SHELL="bash", _ARGCOMPLETE_IFS="|", **env)
    assert sorted((tmp_path / "completions").read_text().split("|")) == completions


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "e.yaml"],
        ["bench", "step", "e.yaml", "--against", "torch", "--steps", "3", "--json", "o p"],
        ["bench", "halo"],
        [
            "run",
            "e.yaml",
            "--set",
            "a=!B {c: 1}",
            "d=2",
            "--output",
            "o p",
            "--resume",
            "--import",
            "m",
            "--import",
            "x.py",
        ],
    ],
)
def test_ranks_receive_the_same_arguments(argv):
    expected = parse(*argv)
    for ranks in ["-n", "4"], ["-n4"]:
        actual = parse(*rank_args(parse(*argv, *ranks)))
        assert vars(actual) == vars(expected)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "e.yaml", "-n", "0"],
        ["run", "e.yaml", "-n", "two"],
        ["data", "cifar", "--to", "x"],
    ],
)
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "usage: neondist" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict --checkpint c", "neondist predict: unknown option --checkpint; did you mean '--checkpoint'? "),
        ("check e.yaml --measure-memry", "check: unknown option --measure-memry; did you mean '--measure-memory'? "),
        ("evaluate m.py --chekpoint=c", "evaluate: unknown option --chekpoint; did you mean '--checkpoint'? "),
        ("bench step e.yaml --stps 3", "neondist bench step: unknown option --stps; did you mean '--steps'? "),
        ("bench model predict --machne m", "bench model predict: unknown option --machne; did you mean '--machine'? "),
        ("bench --zzz", "error: neondist bench: unknown option --zzz (usage: neondist bench --help)"),
        ("evaluat e.yaml", "'plan', 'evaluate', 'predict', 'sweep',"),
        ("bench stp e.yaml", "did you mean 'step'? (usage: neondist bench --help)"),
        ("run e.yaml -q", "error: neondist run: unknown option -q (usage: neondist run --help)"),
        ("check e.yaml f.yaml", "neondist check: unexpected argument f.yaml (usage: neondist check --help)"),
        ("launch r.yaml e.yaml --virtual 2", "error: neondist launch: unknown option --virtual (usage: "),
        ("check e.yaml -n 99999999999999999999", "-n: 99999999999999999999 ranks are too many; give at most 1000000"),
        ("run e.yaml --virtual 3000000", "--virtual: 3000000 ranks are too many; give at most 4096 (usage:"),
        ("bench schemes e.yaml --virtual 1,5000", "--virtual: 5000 ranks are too many; give at most 4096 (usage:"),
        ("bench model predict e.yaml --ranks 1..2000000", "--ranks: 2000000 ranks are too many; give at most 1000000"),
        ("data mnist --too x", "neondist data mnist: unknown option --too; did you mean '--to'? "),
    ],
)
def test_error_names_the_nearest_option_and_the_help_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    command = printed.removeprefix("error: ").partition(":")[0]
    assert printed.endswith(f"(usage: {command} --help)\n")


def test_help_of_launch_lists_its_own_options(capsys):
    with pytest.raises(SystemExit):
        parse("launch", "--help")
    printed = capsys.readouterr().out
    assert "--spares" in printed
    for text in ("--virtual", "--hosts-from", "with -n:"):
        assert text not in printed


def test_every_command_rejects_an_unknown_option_itself(capsys):
    for command in leaf_commands(create_parser()):
        with pytest.raises(SystemExit):
            parse(*command.prog.split()[1:], "--zzz")
        assert capsys.readouterr().err == (
            f"error: {command.prog}: unknown option --zzz (usage: {command.prog} --help)\n"
        )


@pytest.mark.parametrize(
    "words", ["scaling e.yaml --ranks", "model predict e.yaml --ranks", "model predict e.yaml --measure"]
)
def test_lists_of_ranks_have_the_limit_of_ranks(words, capsys):
    with pytest.raises(SystemExit):
        parse("bench", *words.split(), "2,100000000")
    assert "100000000 ranks are too many; give at most 1000000" in capsys.readouterr().err


HUGE = str(10**20)
HUGE_NUMBERS = {"3": HUGE, "3,4": f"3,{HUGE}", "3:4": f"3:{HUGE}", "3=1": f"{HUGE}=1", "03:00:00": f"{'9' * 400}:00:00"}


@pytest.mark.parametrize(("valid", "huge"), HUGE_NUMBERS.items(), ids=list(HUGE_NUMBERS))
def test_every_integer_and_duration_has_a_maximum(valid, huge):
    limited = set()
    for command in leaf_commands(create_parser()):
        for action in command._actions:
            if action.type in (None, options.parse_floats, options.positive_float):
                continue
            try:
                value = action.type(valid)
            except (argparse.ArgumentTypeError, ValueError):
                continue
            if re.match(r"[\[({]*[0-9]", repr(value)):
                with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                    action.type(huge)
                limited.add(action.dest)
    assert limited


def leaf_commands(parser):
    """Yield the parsers of all commands without subcommands."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for command in group.choices.values():
            yield from leaf_commands(command)
    if not groups:
        yield parser


def test_usage_is_printed_by_one_rank(monkeypatch, capsys):
    delays = []
    monkeypatch.setattr(time, "sleep", delays.append)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        main(["run"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""
    assert delays == [3]  # rank 0 prints before mpirun ends it
