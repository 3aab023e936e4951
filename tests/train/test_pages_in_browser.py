"""Pages of neondist and of its documentation in a browser, 1200 and 400 pixels wide."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from neondist.cli import sweep
from neondist.io.run_event_log import RunEventLog
from neondist.train.html_elements import encode_png
from neondist.train.html_report import evaluation_page_html, run_report_html

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser; install chromium (Debian: apt install chromium)")
DOCUMENTATION_FOLDER = Path(__file__).parents[2] / "docs/_build/html"
WINDOW_WIDTHS = 1200, 400
BROWSER_FLAGS = (
    (
        "--headless --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
        " --disable-component-update --host-resolver-rules=MAP*~NOTFOUND --allow-file-access-from-files"
        " --disable-web-security --enable-logging=stderr --virtual-time-budget=10000 --window-size=1300,1000 --dump-dom"
    )
    .replace("MAP*", "MAP * ")
    .split(" --")
)
INSPECTION_PAGE = """<!doctype html><meta charset='utf-8'><body><pre id='reports'></pre><script>
const reports = [];
function inspect(frame, page, width) {
  const content = frame.contentDocument, root = content.documentElement;
  const all = (selector) => [...content.querySelectorAll(selector)], images = all('img');
  const overlaps = [];
  for (const drawing of all('figure > svg')) {
    const edge = drawing.getBoundingClientRect(), texts = [...drawing.querySelectorAll('text')];
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((a, index) => {
      const text = texts[index].textContent;
      if (a.left < edge.left - 1 || a.right > edge.right + 1 || a.bottom > edge.bottom + 1)
        overlaps.push(text + ' and the edge');
      boxes.slice(index + 1).forEach((b, offset) => {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
          overlaps.push(text + ' and ' + texts[index + 1 + offset].textContent);
      });
    });
  }
  return {page, width, overlaps, overflow: Math.max(root.scrollWidth, content.body.scrollWidth) - root.clientWidth,
    title: content.title, headings: all('h1').length, images: images.length,
    broken: images.filter((image) => !image.complete || !image.naturalWidth).map((image) => image.alt),
    requests: frame.contentWindow.performance.getEntriesByType('resource').map((entry) => entry.name)
      .filter((name) => !/^(file|data):/.test(name))};
}
for (const [page, width] of PAGES) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    reports.push(inspect(frame, page, width));
    document.querySelector('#reports').textContent = JSON.stringify(reports);
  };
  frame.src = page;
  document.body.append(frame);
}
</script>"""


def inspect_in_browser(pages, folder):
    """Load pages in a browser; return a report for each page and width, and the console messages."""
    targets = [[page.as_uri(), width] for page in pages for width in WINDOW_WIDTHS]
    wrapper = folder / "wrapper.html"
    wrapper.write_text(INSPECTION_PAGE.replace("PAGES", json.dumps(targets)))
    command = [BROWSER, *[flag if flag.startswith("--") else f"--{flag}" for flag in BROWSER_FLAGS]]
    command += ["--no-sandbox"] * (os.geteuid() == 0) + [f"--user-data-dir={folder / 'profile'}", wrapper.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    reports = json.loads(unescape(re.search(r"<pre id=\"reports\">(.*?)</pre>", process.stdout, re.S)[1]) or "[]")
    assert len(reports) == len(targets), process.stderr[-2000:]
    return reports, re.findall(r"CONSOLE.*", process.stderr)


def make_record(epoch):
    scores = np.random.default_rng(epoch).uniform(0, 2 / epoch, 6).tolist()
    names = (
        "train_loss",
        "validation_loss",
        "test_loss",
        "validation_error",
        "rmse_t2m",
        "validation_a_very_long_name_of_a_metric",
    )
    return {
        "epoch": epoch, "step": 10 * epoch, **dict(zip(names, scores, strict=True)),
        "seconds": 12.5, "samples_per_second": 1234.5, "bytes_sent": 123_456_789_000, "bytes_summed": 0,
        "validation_iou_per_class": [0.5, None] * 15,
        "confusion_matrix": np.full((30, 30), 123_456).tolist(),
        "job": {"workers": epoch, "tasks": {"todo": 0, "doing": 1, "done": 2, "failed": 0},
                "server_versions": [7, 8, 9], "samples_per_second": 1e6 / epoch},
    }  # fmt: skip


def write_run(folder):
    """Write a run folder with everything that its page can show."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(make_record(epoch)) for epoch in range(1, 60)))
    (folder / "experiment.yaml").write_text("name: " + "long " * 100)
    (folder / "environment.json").write_text("{}")
    (folder / "tiles.png").write_bytes(encode_png(np.zeros((90, 1400, 3), np.uint8)))
    np.savez(folder / "worst.npz", **make_samples(dense=True))
    log = RunEventLog(folder)
    log.add("start", generation=1, ranks=2, hosts={"a": 1, "b": 1})
    log.add("loss", generation=1, what="a node was lost " * 9, host="node-with-a-long-name.example")


def make_samples(dense):
    label = np.zeros((3, 40, 60), np.int64) if dense else np.arange(3)
    image = np.zeros((3, 40, 60, 1), np.uint8)
    return {
        "sample": np.arange(3),
        "loss": np.ones(3),
        "image": image,
        "label": label,
        "prediction": label,
        "volume": np.zeros(3, bool),
    }


def make_study():
    """Return a finished search over a learning rate and a kernel size."""
    rates = {"model.optimizer.arguments.learning_rate": 0.01, "model.layers.0.kernel_size": 3}
    trials = [
        SimpleNamespace(
            state=SimpleNamespace(name="COMPLETE"), value=1 / (1 + index), number=index, last_step=1,
            params={name: value * (1 + index) for name, value in rates.items()},
            distributions={name: SimpleNamespace(log=name.endswith("rate")) for name in rates},
        )
        for index in range(5)
    ]  # fmt: skip
    return SimpleNamespace(
        direction=SimpleNamespace(name="MINIMIZE"), trials=trials, user_attrs={"job": {"--number": "validation_loss"}}
    )


DEFECTIVE_PAGE = (
    "<title>t</title><div style='width:700px'>wide</div><img alt='none' src='none.png'><script>missing()</script>"
    "<img src='http://neondist.invalid/a.png'><figure><svg width='99' height='30'><text x='9' y='20'>one</text>"
    "<text x='12' y='20'>two</text></svg></figure>"
)


@pytest.fixture(scope="module")
def browser_reports(tmp_path_factory):
    """Reports of all pages, from one start of the browser."""
    folder = tmp_path_factory.mktemp("pages")
    results = {"split": "validation", "samples": 3, "loss": 0.1, "error": 0.25, "confusion_matrix": [[1, 2], [3, 4]]}
    (folder / "trial_004").mkdir()
    (folder / "trial_004/experiment.yaml").write_text("batch_size: 4")
    sweep._report_results(make_study(), folder)
    run = folder / ("a_long_name_" * 12)
    write_run(run)
    texts = {
        "wrong.html": DEFECTIVE_PAGE,
        "report.html": run_report_html(run),
        "dense.html": evaluation_page_html("e", {"checkpoint": "long/" * 60}, results, make_samples(dense=True)),
        "classes.html": evaluation_page_html("e", {}, results, make_samples(dense=False)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    paths = [*(folder / name for name in texts), folder / "sweep.html", *DOCUMENTATION_FOLDER.glob("index.html")]
    return inspect_in_browser([*paths, *DOCUMENTATION_FOLDER.glob("reference.html")], folder)


def test_pages_fit_a_desktop_and_a_phone(browser_reports):
    reports, console = browser_reports
    assert not [line for line in console if "/wrong.html" not in line]
    for entry in reports:
        if not entry["page"].endswith("/wrong.html"):
            assert (entry["overflow"], entry["overlaps"], entry["broken"], entry["requests"]) == (0, [], [], []), entry
            assert entry["title"], entry
            assert entry["headings"], entry
    images = sum(entry["images"] for entry in reports if not entry["page"].startswith(DOCUMENTATION_FOLDER.as_uri()))
    assert images == 2 * (1 + 9 + 9 + 3 + 2)


def test_defects_are_detected(browser_reports):
    reports, console = browser_reports
    desktop, phone = sorted(
        (entry for entry in reports if entry["page"].endswith("/wrong.html")), key=lambda entry: -entry["width"]
    )
    assert (desktop["overflow"], phone["overflow"] > 300) == (0, True)
    assert phone["broken"][0] == "none"
    assert phone["requests"] == ["http://neondist.invalid/a.png"]
    assert phone["overlaps"] == ["one and two"]
    assert any("missing is not defined" in line for line in console)
