"""Spare slots: ranks that are lost are replaced, so that the grid, and with it each number, stays the same."""

import os
import re
import subprocess
import time

import pytest
from cli_runs import here, neondist
from endless import TOY
from fake_nodes import FakeNodes, missing, needs_mpirun
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import finish
from test_generations import Script
from test_generations import folder as folder
from test_restarts import weights

import neondist as nd
from neondist.cli.arguments import parser
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.io.generation_log import read_events
from neondist.launcher import members
from neondist.launcher.supervise import Ending


def lost(*nodes):
    return Ending(137, f"{', '.join(nodes)} lost", nodes=nodes)


def test_two_at_once_are_replaced_in_one_restart(folder, capsys):
    script = Script(folder, lost("a", "c"), lost("b"), Ending(0))
    script.hosts("a:1 b:1 c:1 d:1 e:1")
    assert script.run("--elastic", "1:8", "--spares", "2", "--restarts", "2") == 0
    assert script.started == [{"a": 1, "b": 1, "c": 1}, {"b": 1, "d": 1, "e": 1}, {"d": 1, "e": 1}]
    starts = [one for one in read_events(folder / "out") if one["event"] == "start"]
    assert [one["grid"] for one in starts[:2]] == [starts[0]["grid"]] * 2
    assert [one["spares"] for one in starts] == [2, 0, 0]
    out = capsys.readouterr().out
    assert "generation 1: 3 ranks on a:1, b:1, c:1; 2 of 2 spare slots\n" in out
    assert "restart 1 of 2: a, c lost; a, c are left out for 60 s; starting over, on 3 ranks\n" in out
    assert out.count("none left") == 1
    assert "0 of 2 spare slots: none left; the next loss shrinks the run\n" in out


def test_hosts_that_are_added_become_spares_first(folder):
    """One is listed in the place of a spare; then the run grows, but not by its spares; a host is taken away."""
    script = Script(folder, lost("a"), "b:1 c:1 d:1 e:1", "b:1 d:1 e:1", Ending(0))
    script.hosts("a:1 b:1 c:1")
    assert script.run("--elastic", "2:8", "--spares", "1") == 0
    assert script.started == [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}, {"b": 1, "d": 1, "e": 1}]


def test_a_run_of_fixed_size(folder, capsys):
    script = Script(folder, lost("b"), Ending(0))
    script.hosts("a:2 b:2 c:2")
    assert script.run("--spares", "2") == 0
    assert script.started == [{"a": 2, "b": 2}, {"a": 2, "c": 2}]
    assert "none left; the next loss suspends the run until hosts are available" in capsys.readouterr().out


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 6), st.data())
def test_a_generation_shrinks_only_where_no_spares_are_left(slots, spares, data):
    """Whichever hosts fail, one after the other or together."""
    words = ["run", "x.yaml", "--elastic", "1:99", "--restarts", "9", *(["--spares", str(spares)] if spares else [])]
    roster = members.Roster(parser().parse_args(words), lambda ranks: True)
    hosts = {f"host{at}": count for at, count in enumerate(slots)}
    roster.pool = pool = members.HostPool(lambda: hosts, 60.0, lambda: 0.0)
    pool.refresh()
    before, total = roster.choose(), sum(slots)
    assert before.ranks == max(1, total - spares)
    while total:
        roster.hold(before)
        failing = data.draw(st.sets(st.sampled_from(sorted(pool.usable())), min_size=1))
        assert roster.lose(before, tuple(sorted(failing)), ()) == sorted(failing)
        total -= sum(hosts[host] for host in failing)
        now = roster.choose()
        assert now == (
            members.Members(n, now.hosts, min(spares, total - n)) if (n := min(before.ranks, total)) else None
        )
        before = now


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", 2, "--restarts", 1, "--spares", 1], "--spares requires a list of hosts; give --hosts-from"),
        (["--spares", 1], "--spares requires a list of hosts; give --hosts-from"),
        (
            ["--hosts-from", "list", "-n", 2, "--spares", 2],
            "list has 3 slots, of which at least 2 are needed for ranks; give",
        ),
        (["--hosts-from", "list", "--elastic", "2:3", "--spares", 2], "give --spares 1 at most, or list more hosts"),
        (["--hosts-from", "list", "--spares", 3], "of which at least 1 are needed for ranks; give --spares 2 at most"),
    ],
)
def test_spares_that_there_cannot_be(folder, words, message):
    (folder / "list").write_text("a slots=2\nb\n")
    code, _, err = here(folder, "run", "toy.yaml", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


@pytest.mark.parametrize("number", ["-1", "x", "1.5"])
def test_spares_that_are_no_number(number, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["run", "toy.yaml", "--spares", number])
    assert end.value.code == 2
    assert f"invalid value '{number}'; expected an integer of at least 0" in capsys.readouterr().err


@needs_mpirun
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.long
def test_two_nodes_that_are_switched_off(tmp_path):
    """The next generation is on the spares, with the same grid, and has the numbers of a run without losses."""
    nodes = FakeNodes(tmp_path, "nodeA", "nodeB", "nodeC", "nodeD")
    (tmp_path / "toy.yaml").write_text(TOY)
    (tmp_path / "list").write_text("nodeA\nnodeB\nnodeC\nnodeD\n")
    words = ["run", "toy.yaml", "--output", "out", "--hosts-from", "list", "--elastic", "1:4", "--spares", 2]
    log, metrics = tmp_path / "log", tmp_path / "out" / "metrics.jsonl"

    def trained(epochs):
        end = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < epochs:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    with log.open("wb") as file:
        job = subprocess.Popen(
            neondist(*words), cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file
        )
    try:
        trained(1)
        nodes.switch_off("nodeA", "nodeB")
        trained(metrics.read_text().count("\n") + 2)
        job.terminate()
        finish(job, 60)
        assert job.returncode == 75, log.read_text()
    finally:
        job.kill()
        nodes.end()
    starts = [one for one in read_events(tmp_path / "out") if one["event"] == "start"]
    assert [(one["hosts"], one["spares"]) for one in starts] == [
        ({"nodeA": 1, "nodeB": 1}, 2),
        ({"nodeC": 1, "nodeD": 1}, 0),
    ]
    assert "restart 1 of 10: node node" in log.read_text()
    assert "restart 2" not in log.read_text()
    step = int(re.search(r"stopped at step (\d+)", log.read_text())[1])

    def undisturbed(world):
        made = load_experiment(tmp_path / "toy.yaml")
        made.run(nd.ProcessGrid(world), hooks=[nd.StopAtStepHook(step)])
        return made.model.state()

    found = weights(tmp_path / "out" / "checkpoint.h5")
    for name, array in loopback.run(2, undisturbed)[0].items():
        assert (found[name] == array).all(), name
