"""Pages of neondist and of its documentation in a real browser, 1200 and 400 pixels wide."""

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
from neondist.io.generation_log import GenerationLog
from neondist.train.html_report import report, result_page
from neondist.train.page import png

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser; install chromium (Debian: apt install chromium)")
DOCUMENTATION = Path(__file__).parents[2] / "docs/_build/html"
WIDTHS = 1200, 400
FLAGS = (
    (
        "--headless --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
        " --disable-component-update --host-resolver-rules=MAP*~NOTFOUND --allow-file-access-from-files"
        " --disable-web-security --enable-logging=stderr --virtual-time-budget=10000 --window-size=1300,1000 --dump-dom"
    )
    .replace("MAP*", "MAP * ")
    .split(" --")
)
WRAPPER = """<!doctype html><meta charset='utf-8'><body><pre id='seen'></pre><script>
const seen = [];
function look(frame, page, width) {
  const inside = frame.contentDocument, root = inside.documentElement;
  const all = (what) => [...inside.querySelectorAll(what)], images = all('img');
  const overlaps = [];
  for (const drawing of all('figure > svg')) {
    const edge = drawing.getBoundingClientRect(), texts = [...drawing.querySelectorAll('text')];
    const boxes = texts.map((one) => one.getBoundingClientRect());
    boxes.forEach((a, index) => {
      const text = texts[index].textContent;
      if (a.left < edge.left - 1 || a.right > edge.right + 1 || a.bottom > edge.bottom + 1)
        overlaps.push(text + ' and the edge');
      boxes.slice(index + 1).forEach((b, more) => {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
          overlaps.push(text + ' and ' + texts[index + 1 + more].textContent);
      });
    });
  }
  return {page, width, overlaps, overflow: Math.max(root.scrollWidth, inside.body.scrollWidth) - root.clientWidth,
    title: inside.title, headings: all('h1').length, images: images.length,
    broken: images.filter((one) => !one.complete || !one.naturalWidth).map((one) => one.alt),
    asked: frame.contentWindow.performance.getEntriesByType('resource').map((one) => one.name)
      .filter((name) => !/^(file|data):/.test(name))};
}
for (const [page, width] of PAGES) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    seen.push(look(frame, page, width));
    document.querySelector('#seen').textContent = JSON.stringify(seen);
  };
  frame.src = page;
  document.body.append(frame);
}
</script>"""


def seen_in_browser(pages, folder):
    """Return what a browser finds in pages, one entry for each page and width, and the errors of their scripts."""
    asked = [[page.as_uri(), width] for page in pages for width in WIDTHS]
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER.replace("PAGES", json.dumps(asked)))
    words = [BROWSER, *[word if word.startswith("--") else f"--{word}" for word in FLAGS]]
    words += ["--no-sandbox"] * (os.geteuid() == 0) + [f"--user-data-dir={folder / 'profile'}", wrapper.as_uri()]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    seen = json.loads(unescape(re.search(r"<pre id=\"seen\">(.*?)</pre>", ended.stdout, re.S)[1]) or "[]")
    assert len(seen) == len(asked), ended.stderr[-2000:]
    return seen, re.findall(r"CONSOLE.*", ended.stderr)


def record(epoch):
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
    """Write a run with all that its page may show."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(record(epoch)) for epoch in range(1, 60)))
    (folder / "experiment.yaml").write_text("name: " + "long " * 100)
    (folder / "environment.json").write_text("{}")
    (folder / "tiles.png").write_bytes(png(np.zeros((90, 1400, 3), np.uint8)))
    np.savez(folder / "worst.npz", **samples(dense=True))
    log = GenerationLog(folder)
    log.add("start", generation=1, ranks=2, hosts={"a": 1, "b": 1})
    log.add("loss", generation=1, what="a node was lost " * 9, host="node-with-a-long-name.example")


def samples(dense):
    label = np.zeros((3, 40, 60), np.int64) if dense else np.arange(3)
    image = np.zeros((3, 40, 60, 1), np.uint8)
    return {"sample": np.arange(3), "loss": np.ones(3), "image": image, "label": label, "said": label}


def study():
    """Return what a search over a rate and a kernel has found."""
    rates = {"model.optimizer.arguments.learning_rate": 0.01, "model.layers.0.kernel_size": 3}
    trials = [
        SimpleNamespace(
            state=SimpleNamespace(name="COMPLETE"), value=1 / (1 + at), number=at, last_step=1,
            params={name: value * (1 + at) for name, value in rates.items()},
            distributions={name: SimpleNamespace(log=name.endswith("rate")) for name in rates},
        )
        for at in range(5)
    ]  # fmt: skip
    return SimpleNamespace(
        direction=SimpleNamespace(name="MINIMIZE"), trials=trials, user_attrs={"job": {"--number": "validation_loss"}}
    )


WRONG = (
    "<title>t</title><div style='width:700px'>wide</div><img alt='none' src='none.png'><script>missing()</script>"
    "<img src='http://neondist.invalid/a.png'><figure><svg width='99' height='30'><text x='9' y='20'>one</text>"
    "<text x='12' y='20'>two</text></svg></figure>"
)


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Return what a browser finds in all pages, in one start."""
    folder = tmp_path_factory.mktemp("pages")
    found = {"split": "validation", "samples": 3, "loss": 0.1, "error": 0.25, "confusion_matrix": [[1, 2], [3, 4]]}
    (folder / "trial_004").mkdir()
    (folder / "trial_004/experiment.yaml").write_text("batch_size: 4")
    sweep._conclude(study(), folder)
    run = folder / ("a_long_name_" * 12)
    write_run(run)
    texts = {
        "wrong.html": WRONG,
        "report.html": report(run),
        "dense.html": result_page("e", {"checkpoint": "long/" * 60}, found, samples(dense=True)),
        "classes.html": result_page("e", {}, found, samples(dense=False)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    names = [*(folder / name for name in texts), folder / "sweep.html", *DOCUMENTATION.glob("index.html")]
    return seen_in_browser([*names, *DOCUMENTATION.glob("reference.html")], folder)


def test_pages_fit_a_desktop_and_a_phone(visit):
    seen, console = visit
    assert not [line for line in console if "/wrong.html" not in line]
    for one in seen:
        if not one["page"].endswith("/wrong.html"):
            assert (one["overflow"], one["overlaps"], one["broken"], one["asked"]) == (0, [], [], []), one
            assert one["title"], one
            assert one["headings"], one
    images = sum(one["images"] for one in seen if not one["page"].startswith(DOCUMENTATION.as_uri()))
    assert images == 2 * (1 + 9 + 9 + 3 + 2)


def test_what_is_wrong_is_seen(visit):
    seen, console = visit
    desktop, phone = sorted((one for one in seen if one["page"].endswith("/wrong.html")), key=lambda one: -one["width"])
    assert (desktop["overflow"], phone["overflow"] > 300) == (0, True)
    assert phone["broken"][0] == "none"
    assert phone["asked"] == ["http://neondist.invalid/a.png"]
    assert phone["overlaps"] == ["one and two"]
    assert any("missing is not defined" in line for line in console)
