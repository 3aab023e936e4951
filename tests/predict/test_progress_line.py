"""Progress line of long commands: early, with an estimate, and during a part."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from neondist.terminal import progress_line as module
from neondist.terminal.progress_line import (
    ProgressFile,
    ProgressLine,
    first_rank_progress,
    preparation_progress,
    read_seconds_left,
)

YAML_FOLDER = Path(__file__).parents[2] / "yaml"
SECONDS_LEFT_PATTERN = re.compile(r"\d+ s left")


@pytest.fixture
def early_first_line(monkeypatch):
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.05)


def test_first_line_appears_during_the_first_part(early_first_line):
    file = io.StringIO()
    with ProgressLine(4, file, "measurement") as progress:
        progress.begin_part("2 ranks")
        line = "measurement 0 of 4, now 2 ranks, 0 s so far; an estimate will be shown after the first measurement"
        wait_until(lambda: line in file.getvalue(), 10)
        progress.add_done_parts(1)  # the first estimate does not wait for the next half minute
        assert SECONDS_LEFT_PATTERN.search(file.getvalue().splitlines()[1])
        progress.add_done_parts(2)
        assert len(file.getvalue().splitlines()) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_first_line_appears_if_the_parts_become_known_late(monkeypatch):
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.2)
    file = io.StringIO()
    with ProgressLine(None, file) as progress:
        progress.set_total_parts(1)
        wait_until(lambda: "part 0 of 1" in file.getvalue(), 10)


def test_line_is_repeated_during_a_long_part(early_first_line, monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_SECONDS", 0.05)
    file = io.StringIO()
    with ProgressLine(2, file, "measurement", delay=0) as progress:
        progress.begin_part("2 ranks")
        wait_until(lambda: file.getvalue().count("measurement 0 of 2, now 2 ranks") >= 3, 10)


def test_preparation_is_reported(early_first_line):
    file = io.StringIO()
    with first_rank_progress(0, file) as progress:
        wait_until(lambda: "preparing, 0 s so far" in file.getvalue(), 10)
        progress.set_total_parts(10, 4)
        assert "resuming: 4 of 10 parts were already done" in file.getvalue()
        progress.add_done_parts(3, 3_000_000)
        assert re.search(r"part 7 of 10, [\d.e+]+ Mpixel/s, 0 s left", file.getvalue())
        end = len(file.getvalue())
    with first_rank_progress(1, file) as other_rank_progress:
        other_rank_progress.set_total_parts(10, 4)
        other_rank_progress.begin_part("a part")
        other_rank_progress.add_done_parts(6)
    assert "resuming" not in file.getvalue()[end:]
    assert not file.getvalue()[end:].strip()


def test_quick_command_prints_nothing():
    file = io.StringIO()
    with ProgressLine(2, file) as progress:
        progress.add_done_parts(2)
    assert not file.getvalue()


def test_long_command_prints_at_once():
    file = io.StringIO()
    with ProgressLine(2, file, "run", delay=0) as progress:
        assert not file.getvalue()
        progress.begin_part("halo")
        assert file.getvalue().startswith("run 0 of 2, now halo, 0 s so far")
        progress.begin_part("tower")
    assert len(file.getvalue().splitlines()) == 1


def test_error_ends_the_thread():
    with pytest.raises(KeyError), ProgressLine(2, io.StringIO()):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_estimate_from_completed_parts(clock):
    file = io.StringIO()
    progress = ProgressLine(9, file)
    progress.set_total_parts(9, 1)
    clock.now += 10
    progress.add_done_parts(2)
    assert "part 3 of 9, 30 s left" in file.getvalue()
    clock.now += 4
    assert "part 3 of 9, 26 s left" in progress.format_line(clock.now)
    clock.now += 4  # longer than the mean
    assert "part 3 of 9, 25 s left" in progress.format_line(clock.now)


def test_estimate_during_the_first_part(clock):
    file = io.StringIO()
    progress = ProgressLine(3, file, delay=0)
    progress.begin_part("1 rank", lambda: None if clock.now < 110 else 120 - clock.now)
    clock.now += 5
    assert "5 s so far; an estimate will be shown after the first part" in progress.format_line(clock.now)
    clock.now += 5  # 10 s of 20
    assert "part 0 of 3, now 1 rank, about 50 s left" in progress.format_line(clock.now)
    clock.now += 12
    progress.add_done_parts(1)
    progress.begin_part("2 ranks")
    clock.now += 2
    progress.set_part_fraction(0.5)
    assert "now 2 ranks, 15 s left" in progress.format_line(clock.now)  # 2 s, and the mean of 22 s and 4 s


def test_estimate_weighs_parts_by_their_planned_times(clock):
    file = io.StringIO()
    progress = ProgressLine(None, file, delay=0)
    progress.set_total_parts(3, 0, [10, 20, 30])
    progress.begin_part("1 rank")
    assert "0 s so far, at least 1 min 0 s left" in file.getvalue()
    clock.now += 40  # longer than planned
    assert "40 s so far, at least 50 s left" in progress.format_line(clock.now)
    progress.add_done_parts(1)
    assert "part 1 of 3, 3 min 20 s left" in progress.format_line(clock.now)


def test_estimate_weighs_concurrent_parts_by_their_sizes(clock):
    progress = ProgressLine(None, io.StringIO())
    progress.set_total_parts(6, 1, part_sizes=[0, 100, 100, 100, 10, 10], concurrent_parts=2)
    assert "0 s so far; an estimate will be shown after the first part" in progress.format_line(clock.now)
    clock.now += 20  # at least as long as this takes for every 200 cells of the others
    assert "part 1 of 6, 20 s so far, at least 12 s left" in progress.format_line(clock.now)
    clock.now += 20
    progress.add_done_parts(2)
    assert "part 3 of 6, 24 s left" in progress.format_line(clock.now)
    clock.now += 10
    assert "part 3 of 6, 14 s left" in progress.format_line(clock.now)
    progress.add_done_parts(2)
    assert "part 5 of 6, 2 s left" in progress.format_line(clock.now)


def test_planned_times_may_change_during_progress(clock):
    file = io.StringIO()
    progress = ProgressLine(2, file, delay=0)
    progress.begin_part("a run")
    clock.now += 5
    progress.change_parts(3, [10, 10, 0])  # one is unknown
    progress.add_done_parts(0)
    progress.change_parts(4, [10] * 4)
    progress.add_done_parts(0)
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "part 0 of 2, now a run, 0 s so far; an estimate will be shown after the first part",
        "part 0 of 3, 5 s so far; an estimate will be shown after the first part",
        "part 0 of 4, 5 s so far, at least 40 s left",
    ]
    progress.add_done_parts(1)
    assert file.getvalue().endswith("part 1 of 4, 15 s left  \n")
    progress.change_parts(2, [10, 10])
    progress.add_done_parts(0)
    assert file.getvalue().endswith("part 1 of 4, 15 s left  \n")  # until the next line is due


def test_progress_of_another_process(tmp_path):
    path = tmp_path / "end"
    assert read_seconds_left(path) is None
    path.write_text("")  # another process is about to write
    assert read_seconds_left(path) is None
    progress = ProgressFile(path)
    progress.set_total_parts(4)
    assert read_seconds_left(path) is None
    progress.start_time -= 100
    progress.add_done_parts(1)
    assert read_seconds_left(path) == pytest.approx(300, abs=20)
    progress.add_done_parts(3)
    assert read_seconds_left(path) == 0


def test_delay_begins_at_process_start(monkeypatch, capsys):
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 1e6)
    with preparation_progress(owns_process=False):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.5)  # this process is older
    with preparation_progress() as progress:
        wait_until(lambda: progress.last_print_time is not None, 10)
    assert re.fullmatch("preparing, [1-9].* so far  \n", capsys.readouterr().err)


@pytest.mark.long
def test_benchmark_prediction_reports_progress(tmp_path):
    code = (
        "from neondist.terminal import progress_line\n"
        "from neondist.bench.model import predict\n"
        "progress_line.FIRST_LINE_SECONDS, predict.COMPARISON_SECONDS, predict.PREDICTION_SECONDS = 0.01, 1e-3, 1e-3\n"
        "from neondist.cli import main\n"
        "import sys\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = [
        "bench",
        "model",
        "predict",
        YAML_FOLDER / "mnist_distarray_convnet.yaml",
        "--ranks",
        "1,2",
        "--measure",
        "none",
    ]
    words += [
        "--machine",
        YAML_FOLDER / "machines/cpu_cluster.yaml",
        "--set",
        "grid.replicas=1",
        "--output",
        tmp_path / "out",
    ]
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert re.search(r"step [01] of 2, now \d ranks?, (about )?0 s (so far|left)", process.stderr)
    assert "step" not in process.stdout.splitlines()[0].split("|")[0]
    assert [json.loads(line)["ranks"] for line in (tmp_path / "out/model.jsonl").read_text().splitlines()] == [1, 2]
