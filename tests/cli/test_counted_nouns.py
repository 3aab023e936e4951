"""Counts in messages agree with their nouns."""

import json

import pytest

import neondist as nd
from neondist.terminal.console import counted
from neondist.train.html_report import run_report_html


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "rank"), "0 ranks"),
        ((1, "rank"), "1 rank"),
        ((2, "training sample"), "2 training samples"),
        ((1, "axis", "axes"), "1 axis"),
        ((3, "axis", "axes"), "3 axes"),
    ],
)
def test_counted(arguments, text):
    assert counted(*arguments) == text


@pytest.mark.parametrize(("channels", "text"), [(1, "the input's 1 channel$"), (3, "the input's 3 channels$")])
def test_messages(channels, text):
    with pytest.raises(nd.UserError, match=text):
        nd.Convnet([nd.ConvLayer(4, 3, groups=2)]).build((8, 8, channels), 1)


@pytest.mark.parametrize(("epoch", "text"), [(1, "<p>1 epoch, step 5"), (2, "<p>2 epochs, step 5")])
def test_report(tmp_path, epoch, text):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"epoch": epoch, "step": 5, "test_loss": 1.0}))
    assert text in run_report_html(tmp_path)
