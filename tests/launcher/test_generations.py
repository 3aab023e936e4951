"""Generations over hosts that come and go, by a list that a test writes; no rank is started."""

import threading
import time

import pytest
from cli_runs import EXPERIMENT, here

from neondist.cli.arguments import parser
from neondist.config import load_experiment
from neondist.errors import LaunchError
from neondist.io.generation_log import GenerationLog, read_events, read_run_key
from neondist.launcher import members
from neondist.launcher.generations import run_generations
from neondist.launcher.supervise import Ending
from neondist.system.signals import Signals


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "POLL", 0.01)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "true")
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover").chmod(0o755)
    (tmp_path / "out").mkdir()
    return tmp_path


class Script:
    """Generations that end as a list says: on their own, or once the hosts have become others.

    Attributes
    ----------
    started : what each generation was: ranks by host
    """

    def __init__(self, folder, *acts):
        self.folder, self.acts, self.started = folder, list(acts), []

    def hosts(self, text):
        (self.folder / "hosts.new").write_text(text.replace(" ", "\n") + "\n")
        (self.folder / "hosts.new").replace(self.folder / "hosts")  # a list that is read is a whole one

    def start(self, arguments, received, more, change):
        assert more["NEONDIST_GENERATION"] == str(arguments.generation) == str(len(self.started) + 1)
        self.started.append(dict(arguments.hosts))
        act = self.acts.pop(0)
        if isinstance(act, Ending):
            return act
        self.hosts(act)
        end = time.monotonic() + 20
        while not change():
            assert time.monotonic() < end, "the change of hosts is not noticed"
            threading.Event().wait(0.005)
        return Ending(75, changed=True)

    def run(self, *words, sleep=time.sleep):
        arguments = parser().parse_args(
            ["run", str(self.folder / "toy.yaml"), "--output", str(self.folder / "out"),
             "--hosts-from", str(self.folder / "discover"), *words]
        )  # fmt: skip
        arguments.signals = Signals()
        members.resolve_options(arguments, None)
        return run_generations(arguments, load_experiment(self.folder / "toy.yaml"), self.start, sleep)


def test_hosts_that_come_and_go(folder, capsys):
    script = Script(folder, "a:2 b:2", "c:2", "c:1", Ending(0))
    script.hosts("a:2")

    def back(seconds):
        if len(script.started) == 3:  # below the minimum
            script.hosts("c:1 d:1")

    assert script.run("--elastic", "2:4", sleep=back) == 0
    assert script.started == [{"a": 2}, {"a": 2, "b": 2}, {"c": 2}, {"c": 1, "d": 1}]
    events = read_events(folder / "out")
    starts = [(one["generation"], one["ranks"], one["grid"]["rows"]) for one in events if one["event"] == "start"]
    assert starts == [(1, 2, 2), (2, 4, 2), (3, 2, 2), (4, 2, 2)]
    changes = [(one["added"], one["removed"]) for one in events if one["event"] == "hosts"]
    assert changes == [(["b"], []), (["c"], ["a", "b"]), ([], ["c"])]
    out = capsys.readouterr().out
    assert "waiting for hosts: there is room for 1 ranks, but at least 2 are needed; giving up in 600 s" in out
    assert out.count("generation ") == 4


def without_neondist(folder, monkeypatch, host):
    """Let a host answer that it has no neondist."""
    (folder / "agent").write_text(f'#!/bin/sh\n[ "$1" != {host} ] || exit 113\n')
    (folder / "agent").chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(folder / "agent"))


def test_hosts_without_neondist_that_join(folder, capsys, monkeypatch):
    """They are left out, and said once; the others are used."""
    without_neondist(folder, monkeypatch, "b")
    script = Script(folder, "a:1 b:1 c:1", Ending(137, "a was killed"), Ending(0))
    script.hosts("a:1")
    assert script.run("--elastic", "1:3", "--cool-down", "0.1", "--restarts", "1") == 0
    assert script.started[:2] == [{"a": 1}, {"a": 1, "c": 1}]
    out = capsys.readouterr().out
    assert out.count("hosts: b has no ") == 1
    assert "with neondist; install it there at the same path; it is left out\n" in out


def test_hosts_without_neondist_at_the_start(folder, monkeypatch):
    without_neondist(folder, monkeypatch, "b")
    script = Script(folder)
    script.hosts("a:1 b:1")
    with pytest.raises(LaunchError, match=r"--hosts-from: b has no .* with neondist; .*, or take it off the list"):
        script.run("--elastic", "1:2")
    assert script.started == []


def test_a_node_that_fails_is_left_out(folder, capsys):
    acts = [Ending(137, "node b was lost", nodes=("b.cluster",)), Ending(137, "rank 0 is stopped", silent=(0,))]
    script = Script(folder, *acts, Ending(137, "rank 1 was killed"), Ending(0))
    script.hosts("a:1 b:1 c:1 d:1")
    assert script.run("--elastic", "1:3", "--restarts", "3") == 0
    assert script.started == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1, "d": 1}, {"c": 1, "d": 1}, {"c": 1, "d": 1}]
    assert (
        "restart 1 of 3: node b was lost; b is left out for 60 s; starting over, on 3 ranks" in capsys.readouterr().out
    )


def test_a_run_of_fixed_size_uses_a_host_again(folder):
    script = Script(folder, *[Ending(137, "node b was lost", nodes=("b",))] * 2)
    script.hosts("a:1 b:1")
    assert script.run("-n", "2", "--restarts", "1") == 137
    assert script.started == [{"a": 1, "b": 1}] * 2
    assert [one["event"] for one in read_events(folder / "out")] == ["run", "start", "loss", "start", "loss", "end"]


def test_ranks_without_hosts_are_fewer_after_a_loss_if_that_fits():
    for fitting, expected in (({2, 4}, [4, 2, 2]), ({4}, [4, 4, 4])):
        arguments = parser().parse_args(["run", "x.yaml", "--elastic", "2:4", "--restarts", "2"])
        members.resolve_options(arguments, None)
        roster, found = members.Roster(arguments, fitting.__contains__), []
        for _ in expected:
            found.append(roster.choose())
            roster.lose(found[-1], (), (0,))
        assert [one.ranks for one in found] == expected


def test_too_few_hosts_for_too_long(folder, capsys):
    script = Script(folder)
    script.hosts("a:1")
    assert script.run("--elastic", "2:3", "--wait", "0.1") == 1
    assert script.started == []
    assert "gave up after 0.1 s: there is room for 1 ranks, but at least 2 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts-from", "none"], "none: no such file"),
        (["--hosts-from", "list", "-n", 4], "-n 4: list has 3 slots for ranks; give at most that many"),
        (["--hosts-from", "list", "--elastic", "4:8"], "--elastic 4:8: list has 3 slots for ranks"),
        (["--hosts-from", "list", "--elastic", "2:3", "-n", 4], "-n 4 is not within --elastic 2:3"),
        (["--hosts-from", "list", "--virtual", 2], "--virtual runs all ranks in this process"),
        (["--hosts-from", "wrong"], "wrong:2: 'b c' is not a host"),
        (["-n", 2, "--cool-down", "5s"], "--cool-down: applies to a varying set of hosts"),
        (["-n", 2, "--wait", "5s"], "--wait: applies to a varying set of hosts"),
        (["-n", 2, "--snapshot", "auto"], "--snapshot: snapshots are used by restarts; also give --restarts"),
    ],
)
def test_options_that_do_not_fit(folder, words, message):
    (folder / "list").write_text("a slots=2\nb\n")
    (folder / "wrong").write_text("a\nb c\n")
    code, _, err = here(folder, "run", "toy.yaml", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_the_log_of_generations(tmp_path):
    log = GenerationLog(tmp_path)
    log.add("start", ranks=2)
    with log.path.open("a") as file:
        file.write('{"event"\n[]\n{"event": 3}\n')
    assert [one["event"] for one in read_events(tmp_path)] == ["run", "start"]
    assert GenerationLog(tmp_path, resumed=True).key == log.key == read_run_key(tmp_path)
    assert GenerationLog(tmp_path).key != log.key
    log.path.write_text('{"event": "run", "key": "../../etc"}\n')
    assert read_run_key(tmp_path) == ""
