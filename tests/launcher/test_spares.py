"""Spare slots: lost ranks are replaced, so that the grid, and with it every bit of the result, stays the same."""

import os
import re
import subprocess

import pytest
from availability import needs_mpirun
from cli_runs import build_command, run_in_process
from endless_experiment import ENDLESS_YAML
from fake_nodes import FakeNodes, needs_fake_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import communicate
from restart_runs import GenerationScript, check_weights
from waiting import wait_until

from neondist.cli.arguments import create_parser
from neondist.io.run_event_log import read_events
from neondist.launcher import members
from neondist.launcher.supervision import JobEnding


def make_loss(*nodes):
    return JobEnding(137, f"{', '.join(nodes)} lost", lost_nodes=nodes)


def test_simultaneous_losses_are_replaced_in_one_restart(folder, capsys):
    script = GenerationScript(folder, make_loss("a", "c"), make_loss("b"), JobEnding(0))
    script.write_hosts("a:1 b:1 c:1 d:1 e:1")
    assert script.run("--elastic", "1:8", "--spares", "2", "--restarts", "2") == 0
    assert script.started == [{"a": 1, "b": 1, "c": 1}, {"b": 1, "d": 1, "e": 1}, {"d": 1, "e": 1}]
    starts = [event for event in read_events(folder / "out") if event["event"] == "start"]
    assert [event["grid"] for event in starts[:2]] == [starts[0]["grid"]] * 2
    assert [event["spares"] for event in starts] == [2, 0, 0]
    out = capsys.readouterr().out
    assert "generation 1: 3 ranks on a:1, b:1, c:1; 2 of 2 spare slots\n" in out
    assert "restart 1 of 2: a, c lost; a, c are excluded for 60 s; starting over, on 3 ranks\n" in out
    assert out.count("none left") == 1
    assert "0 of 2 spare slots: none left; the next failure reduces the number of ranks\n" in out


def test_added_hosts_become_spares_first(folder):
    """List a host instead of a lost one, then one more, then one fewer: the run grows, but keeps its spares."""
    script = GenerationScript(folder, make_loss("a"), "b:1 c:1 d:1 e:1", "b:1 d:1 e:1", JobEnding(0))
    script.write_hosts("a:1 b:1 c:1")
    assert script.run("--elastic", "2:8", "--spares", "1") == 0
    assert script.started == [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}, {"b": 1, "d": 1, "e": 1}]


def test_spares_of_a_fixed_size_run(folder, capsys):
    script = GenerationScript(folder, make_loss("b"), JobEnding(0))
    script.write_hosts("a:2 b:2 c:2")
    assert script.run("--spares", "2") == 0
    assert script.started == [{"a": 2, "b": 2}, {"a": 2, "c": 2}]
    assert "none left; the next failure suspends the run until a host joins" in capsys.readouterr().out


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 6), st.data())
def test_generations_shrink_only_without_spares(slots, spares, data):
    """Let any hosts fail, one after the other or together."""
    words = ["run", "x.yaml", "--elastic", "1:99", "--restarts", "9", *(["--spares", str(spares)] if spares else [])]
    roster = members.RankRoster(create_parser().parse_args(words), lambda ranks: True)
    hosts = {f"host{i}": count for i, count in enumerate(slots)}
    roster.host_pool = pool = members.HostPool(lambda: hosts, 60.0, lambda: 0.0)
    pool.refresh_host_list()
    current, usable = roster.choose_members(), sum(slots)
    assert current.ranks == max(1, usable - spares)
    while usable:
        roster.keep_rank_count_of(current)
        failing = data.draw(st.sets(st.sampled_from(sorted(pool.list_usable_hosts())), min_size=1))
        assert roster.record_loss(current, tuple(sorted(failing)), ()) == sorted(failing)
        usable -= sum(hosts[host] for host in failing)
        replacement = roster.choose_members()
        assert replacement == (
            members.GenerationMembers(n, replacement.hosts, min(spares, usable - n))
            if (n := min(current.ranks, usable))
            else None
        )
        current = replacement


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", 2, "--restarts", 1, "--spares", 1], "--spares requires a list of hosts; give --hosts-from"),
        (["--spares", 1], "--spares requires a list of hosts; give --hosts-from"),
        (["--hosts-from", "list", "-n", 2, "--spares", 2], "list has 3 slots, and the ranks need at least 2; give"),
        (["--hosts-from", "list", "--elastic", "2:3", "--spares", 2], "give at most --spares 1, or list more hosts"),
        (["--hosts-from", "list", "--spares", 3], "and the ranks need at least 1; give at most --spares 2"),
    ],
)
def test_conflicting_options(folder, words, message):
    (folder / "list").write_text("a slots=2\nb\n")
    code, _, err = run_in_process(folder, "run", "toy.yaml", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


@pytest.mark.parametrize("number", ["-1", "x", "1.5"])
def test_invalid_numbers_of_spares(number, capsys):
    with pytest.raises(SystemExit) as end:
        create_parser().parse_args(["run", "toy.yaml", "--spares", number])
    assert end.value.code == 2
    assert f"invalid value '{number}'; expected an integer of at least 0" in capsys.readouterr().err


@needs_mpirun
@needs_fake_nodes
@pytest.mark.long
def test_two_nodes_are_switched_off(tmp_path):
    """Expect the next generation on the spares, with the same grid and the weights of an uninterrupted run."""
    nodes = FakeNodes(tmp_path, "nodeA", "nodeB", "nodeC", "nodeD")
    (tmp_path / "toy.yaml").write_text(ENDLESS_YAML)
    (tmp_path / "list").write_text("nodeA\nnodeB\nnodeC\nnodeD\n")
    words = ["run", "toy.yaml", "--output", "out", "--hosts-from", "list", "--elastic", "1:4", "--spares", 2]
    log, metrics = tmp_path / "log", tmp_path / "out" / "metrics.jsonl"

    def wait_for_epochs(epochs):
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= epochs, 120, log.read_text)

    with log.open("wb") as file:
        job = subprocess.Popen(
            build_command(*words), cwd=tmp_path, env={**os.environ, **nodes.env}, stdout=file, stderr=file
        )
    try:
        wait_for_epochs(1)
        nodes.switch_off("nodeA", "nodeB")
        wait_for_epochs(metrics.read_text().count("\n") + 2)
        job.terminate()
        communicate(job, 60)
        assert job.returncode == 75, log.read_text()
    finally:
        job.kill()
        nodes.end()
    starts = [event for event in read_events(tmp_path / "out") if event["event"] == "start"]
    assert [(event["hosts"], event["spares"]) for event in starts] == [
        ({"nodeA": 1, "nodeB": 1}, 2),
        ({"nodeC": 1, "nodeD": 1}, 0),
    ]
    assert "restart 1 of 10: node node" in log.read_text()
    assert "restart 2" not in log.read_text()
    step = int(re.search(r"stopped at step (\d+)", log.read_text())[1])
    check_weights(tmp_path / "out" / "checkpoint.h5", tmp_path / "toy.yaml", 2, stop_at=step)
