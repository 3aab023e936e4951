"""status.json: written by a master and shown by `neondist top`; damaged files are rejected."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from neondist.cli import main
from neondist.cli.top import render_status
from neondist.services.job_status import JobStatus, ServerStatus
from neondist.train.job_report import server_job_html
from neondist.train.state import EpochRecord

STATUS = JobStatus(
    1000.0, 12.3, {"todo": 3, "doing": 2, "done": 7, "failed": 0}, {"worker-1": 9, "worker-0": 8},
    [ServerStatus(17, 272, 4096, 5, 1), ServerStatus(18, 288, 2048, 0, 0)],
)  # fmt: skip


def render_plain_text(status, now):
    console = Console(file=io.StringIO(), width=100)
    console.print(render_status(status, now))
    return console.file.getvalue()


def test_round_trip(tmp_path):
    STATUS.write(tmp_path)
    assert JobStatus.read(tmp_path) == STATUS


def test_top_shows_all_fields():
    text = render_plain_text(STATUS, 1001.0)
    assert "3 todo, 2 doing, 7 done, 0 failed" in text
    assert "12 samples/s" in text
    assert text.index("worker-0") < text.index("worker-1")
    assert all(number in text for number in ("17", "272", "288", "4.1 kB"))
    assert "no new state" not in text
    assert "no new state for 60 s" in render_plain_text(STATUS, 1060.0)


def test_report_ignores_damaged_records(tmp_path):
    (tmp_path / "servers").mkdir()
    STATUS.write(tmp_path / "servers")
    assert "worker-0" in "".join(server_job_html(tmp_path, []))
    damaged = [{"workers": "<b>", "tasks": 3, "server_versions": [None, 7]}, 5]
    page = "".join(server_job_html(tmp_path, [EpochRecord(epoch=1, job=job) for job in damaged]))
    assert "<b>" not in page
    assert ">, 7</td>" in page
    (tmp_path / "servers/status.json").write_text("{")
    assert server_job_html(tmp_path, []) == []


def test_top_without_servers(tmp_path, capsys):
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "shows runs with parameter servers" in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(["time", "tasks", "workers", "servers", "samples_per_second"]), JSON)
@pytest.mark.long
def test_top_with_damaged_files(tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("run") / "servers"
    folder.mkdir()
    STATUS.write(folder)
    fields = json.loads((folder / "status.json").read_text()) | {name: value}
    (folder / "status.json").write_text(json.dumps(fields))
    assert main(["top", str(folder.parent), "--once"]) in (0, 2)


def test_top_with_a_folder_as_status_file(tmp_path, capsys):
    (tmp_path / "servers/status.json").mkdir(parents=True)
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "status.json" in capsys.readouterr().err
