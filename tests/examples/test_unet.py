"""U-Net of examples/unet_retina.py on small crops: equal losses on 1 and 2 ranks, and a picture."""

import sys
import threading
from pathlib import Path

import pytest

import neondist as nd
from neondist.comm import loopback

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "unet_retina.py"


def test_unet(tmp_path, monkeypatch, capsys):
    pytest.importorskip("skimage", reason="the photograph comes with scikit-image")
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")
    thread, names, losses = threading.local(), {"__name__": "unet_retina", "__doc__": ""}, {}
    exec(SCRIPT.read_text(encoding="utf-8"), names)
    vessels, sato = names["segment_vessels"], names["filters"].sato
    monkeypatch.setattr(names["filters"], "sato", lambda picture, sigmas: sato(picture, [3]))  # all widths take seconds
    truth = vessels(names["data"].retina())
    names["segment_vessels"] = lambda picture: truth
    monkeypatch.setattr(nd, "ProcessGrid", lambda grid=nd.ProcessGrid: grid(thread.world))

    def run_rank(world):
        thread.world = world
        names["main"]()

    for ranks in (1, 2):
        picture = tmp_path / f"unet{ranks}.png"
        monkeypatch.setattr(sys, "argv", ["", "--size", "64", "--steps", "2", "--output", str(picture)])
        loopback.run(ranks, run_rank)
        losses[ranks] = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
        assert len(losses[ranks]) == 2
        assert picture.stat().st_size > 10_000
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
