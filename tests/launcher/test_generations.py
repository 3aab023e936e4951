"""Generations of a run on changing hosts, scripted without ranks."""

import signal
import threading
import time
from contextlib import closing

import pytest
from cli_runs import run_in_process
from restart_runs import GenerationScript
from waiting import wait_until

from neondist.cli.arguments import create_parser
from neondist.errors import LaunchError, OutputError
from neondist.io import lock
from neondist.io.run_event_log import RunEventLog, read_events, read_run_key
from neondist.launcher import members
from neondist.launcher.supervision import JobEnding


def test_changing_hosts(folder, capsys):
    script = GenerationScript(folder, "a:2 b:2", "c:2", "c:1", JobEnding(0))
    script.write_hosts("a:2")

    def restore_hosts(seconds):
        if len(script.started) == 3:  # below the minimum
            script.write_hosts("c:1 d:1")

    assert script.run("--elastic", "2:4", sleep=restore_hosts) == 0
    assert script.started == [{"a": 2}, {"a": 2, "b": 2}, {"c": 2}, {"c": 1, "d": 1}]
    events = read_events(folder / "out")
    starts = [
        (event["generation"], event["ranks"], event["grid"]["rows"]) for event in events if event["event"] == "start"
    ]
    assert starts == [(1, 2, 2), (2, 4, 2), (3, 2, 2), (4, 2, 2)]
    changes = [(event["added"], event["removed"]) for event in events if event["event"] == "hosts"]
    assert changes == [(["b"], []), (["c"], ["a", "b"]), ([], ["c"])]
    out = capsys.readouterr().out
    assert "waiting for hosts: there is room for 1 rank, but at least 2 are needed; giving up in 600 s" in out
    assert out.count("generation ") == 4


def hide_neondist(folder, monkeypatch, host):
    """Let a host report that it has no neondist."""
    (folder / "agent").write_text(f'#!/bin/sh\n[ "$1" != {host} ] || exit 113\nexit 116\n')
    (folder / "agent").chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(folder / "agent"))


def test_hosts_that_join_without_neondist(folder, capsys, monkeypatch):
    """Exclude them with one message, and use the others."""
    hide_neondist(folder, monkeypatch, "b")
    script = GenerationScript(folder, "a:1 b:1 c:1", JobEnding(137, "a was killed"), JobEnding(0))
    script.write_hosts("a:1")
    assert script.run("--elastic", "1:3", "--cooldown", "0.1", "--restarts", "1") == 0
    assert script.started[:2] == [{"a": 1}, {"a": 1, "c": 1}]
    out = capsys.readouterr().out
    assert out.count("hosts: b has no ") == 1
    assert "with neondist; install it there at the same path; the host is left out\n" in out


def test_unreachable_hosts_at_the_start(folder, capsys, monkeypatch):
    """Say how to test the connection, and wait for other hosts."""
    hide_neondist(folder, monkeypatch, "b")
    (folder / "agent").write_text((folder / "agent").read_text().replace("113", "255"))
    script = GenerationScript(folder, JobEnding(0))
    script.write_hosts("b:2")
    assert script.run("--elastic", "2:2", sleep=lambda seconds: script.write_hosts("b:2 c:2")) == 0
    assert script.started == [{"c": 2}]
    out = capsys.readouterr().out
    assert "b cannot be reached; correct the list, or the error shown by `ssh b`\n" in out


def test_hosts_without_neondist_at_the_start(folder, monkeypatch):
    hide_neondist(folder, monkeypatch, "b")
    script = GenerationScript(folder)
    script.write_hosts("a:1 b:1")
    with pytest.raises(LaunchError, match=r"--hosts-from: b has no .* with neondist; .*, or remove the host from"):
        script.run("--elastic", "1:2")
    assert script.started == []


def test_failed_nodes_are_excluded(folder, capsys):
    acts = [
        JobEnding(137, "node b was lost", lost_nodes=("b.cluster",)),
        JobEnding(137, "rank 0 is stopped", silent_ranks=(0,)),
    ]
    script = GenerationScript(folder, *acts, JobEnding(137, "rank 1 was killed"), JobEnding(0))
    script.write_hosts("a:1 b:1 c:1 d:1")
    assert script.run("--elastic", "1:3", "--restarts", "3") == 0
    assert script.started == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1, "d": 1}, {"c": 1, "d": 1}, {"c": 1, "d": 1}]
    assert (
        "restart 1 of 3: node b was lost; b is excluded for 60 s; starting over, on 3 ranks" in capsys.readouterr().out
    )


def test_fixed_size_run_reuses_a_failed_host(folder):
    script = GenerationScript(folder, *[JobEnding(137, "node b was lost", lost_nodes=("b",))] * 2)
    script.write_hosts("a:1 b:1")
    assert script.run("-n", "2", "--restarts", "1") == 137
    assert script.started == [{"a": 1, "b": 1}] * 2
    assert [event["event"] for event in read_events(folder / "out")] == ["run", "start", "loss", "start", "loss", "end"]


def test_loss_after_a_stop_request(folder, capsys):
    """Do not restart a run that a signal was to stop."""
    script = GenerationScript(folder, JobEnding(137, "rank 0 was killed", stop_requested=True))
    script.write_hosts("a:1 b:1")
    assert script.run("-n", "2", "--restarts", "3") == 137
    assert len(script.started) == 1
    assert "error: rank 0 was killed; continue with --resume" in capsys.readouterr().err


def test_ranks_decrease_after_a_loss():
    for valid_ranks, expected in (({2, 4}, [4, 2, 2]), ({4}, [4, 4, 4])):
        arguments = create_parser().parse_args(["run", "x.yaml", "--elastic", "2:4", "--restarts", "2"])
        members.resolve_host_options(arguments, None)
        roster, choices = members.RankRoster(arguments, valid_ranks.__contains__), []
        for _ in expected:
            choices.append(roster.choose_members())
            roster.record_loss(choices[-1], (), (0,))
        assert [choice.ranks for choice in choices] == expected


def test_wait_for_hosts_times_out(folder, capsys):
    script = GenerationScript(folder)
    script.write_hosts("a:1")
    assert script.run("--elastic", "2:3", "--wait", "0.1") == 1
    assert script.started == []
    assert "gave up after 0.1 s: there is room for 1 rank, but at least 2 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("reads_before", [0, 1])
def test_stop_while_the_host_script_hangs(folder, capsys, reads_before):
    """Stop at once, before the first generation or while the second one waits for hosts."""
    script = GenerationScript(folder, JobEnding(137, "a was killed", ("a",)))
    script.write_hosts("a:2")
    reads, hangs = folder / "reads", folder / "hangs"
    condition = f"[ $(wc -l < '{reads}') -le {reads_before} ]"
    (folder / "discover").write_text(
        f"#!/bin/sh\necho >> '{reads}'\n{condition} || {{ touch '{hangs}'; sleep 300; }}\ncat '{folder}/hosts'\n"
    )

    def stop():
        wait_until(hangs.exists, 20)
        script.signals.handle(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    start = time.monotonic()
    if reads_before:
        assert script.run("--elastic", "2:4") == 75
    else:
        with pytest.raises(SystemExit, match="75"):
            script.run("--elastic", "2:4")
    thread.join()
    assert time.monotonic() - start < 20
    assert len(script.started) == reads_before
    assert "received SIGTERM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts-from", "none"], "none: no such file"),
        (["--hosts-from", "list", "-n", 4], "--hosts-from list: has 3 slots for at least 4 ranks; reduce"),
        (["--hosts-from", "list", "--elastic", "4:8"], "--hosts-from list: has 3 slots for at least 4 ranks"),
        (["--hosts-from", "list", "--elastic", "2:3", "-n", 4], "-n 4 is not within --elastic 2:3"),
        (["--hosts-from", "list", "--virtual", 2], "--virtual runs all ranks in this process"),
        (["--hosts-from", "wrong"], "wrong:2: 'b c' is not a host"),
        (["-n", 2, "--cooldown", "5s"], "--cooldown: applies to hosts that may change"),
        (["-n", 2, "--wait", "5s"], "--wait: applies to hosts that may change"),
        (["-n", 2, "--snapshot", "auto"], "--snapshot: snapshots are used by restarts; also give --restarts"),
    ],
)
def test_conflicting_options(folder, words, message):
    (folder / "list").write_text("a slots=2\nb\n")
    (folder / "wrong").write_text("a\nb c\n")
    code, _, err = run_in_process(folder, "run", "toy.yaml", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_run_event_log(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_TIMEOUT_SECONDS", 0.2)
    log = RunEventLog(tmp_path)
    log.add("start", ranks=2)
    with log.path.open("a") as file:
        file.write('{"event"\n[]\n{"event": 3}\n')
    assert [event["event"] for event in read_events(tmp_path)] == ["run", "start"]
    with pytest.raises(OutputError, match="in use by another run"):  # of a job whose ranks have not started yet
        RunEventLog(tmp_path)
    assert read_run_key(tmp_path) == log.run_key
    log.close()
    with closing(RunEventLog(tmp_path, resumed=True)) as resumed_log:
        assert resumed_log.run_key == log.run_key == read_run_key(tmp_path)
    with closing(RunEventLog(tmp_path)) as new_log:
        assert new_log.run_key != log.run_key
    log.path.write_text('{"event": "run", "key": "../../etc"}\n')
    assert read_run_key(tmp_path) == ""
