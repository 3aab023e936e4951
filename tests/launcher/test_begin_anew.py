"""A folder whose run has not come to its first checkpoint: resuming begins anew; what is worth keeping stays."""

import json
from pathlib import Path

import pytest
from cli_runs import EXPERIMENT
from storage_faults import GB

from neondist.cli.arguments import parser
from neondist.config import load_experiment
from neondist.errors import ConfigError
from neondist.io.output import has_run, is_new
from neondist.launcher.generations import run_generations
from neondist.launcher.supervise import Ending
from neondist.system.signals import Signals

RECORD = json.dumps({"stage": "one", "epoch": 0}) + "\n"
NOTHING = {
    "an empty folder": {},
    "what is known before training": {"environment.json": "{}", "experiment.yaml": ""},
    "empty logs": {"environment.json": "{}", "metrics.jsonl": "", "ledger.jsonl": ""},
    "GB's record from before training": {"environment.json": "{}", "pretrain.jsonl": RECORD},
    "half a checkpoint": {"environment.json": "{}", "pretrain.jsonl": RECORD, "pretrain_1.h5.partial": "x"},
}
KEPT = {
    "an epoch": {"metrics.jsonl": RECORD},
    "an epoch of a stage": {"pretrain.jsonl": RECORD * 2},
    "a checkpoint": {"checkpoint.h5": "x"},
    "one of a stage": {"pretrain_1.h5": "x"},
    "an older one": {"checkpoint-00000003.h5": "x"},
}


def lay(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_lost_where_nothing_was_trained(name, tmp_path):
    lay(tmp_path, NOTHING[name])
    assert is_new(tmp_path)
    assert not has_run(tmp_path)


@pytest.mark.parametrize("name", KEPT)
def test_what_was_trained_is_kept(name, tmp_path):
    lay(tmp_path, KEPT[name])
    assert has_run(tmp_path)
    assert not is_new(tmp_path)


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_gb_begins_anew_after_its_first_record(resume, tmp_path):
    (tmp_path / "gb.yaml").write_text(GB)
    lay(tmp_path, {"environment.json": "{}", "pretrain.jsonl": RECORD})
    result = load_experiment(tmp_path / "gb.yaml").run(output=tmp_path, resume=resume, hooks=[])
    other = load_experiment(tmp_path / "gb.yaml").run(hooks=[])
    assert [one["train_loss"] for one in result.history] == [one["train_loss"] for one in other.history]
    assert '"one"' not in (tmp_path / "pretrain.jsonl").read_text()
    with pytest.raises(ConfigError, match="has a run already"):
        load_experiment(tmp_path / "gb.yaml").run(output=tmp_path, hooks=[])


def test_a_restart_goes_on_from_what_the_job_itself_has_written(tmp_path):
    lay(tmp_path, {"toy.yaml": EXPERIMENT})
    arguments = parser().parse_args(
        ["run", str(tmp_path / "toy.yaml"), "-n", "2", "--restarts", "1", "--output", str(tmp_path), "--overwrite"]
    )
    arguments.signals = Signals()
    lay(tmp_path, {"checkpoint.h5": "old", "checkpoint-00000003.h5": "old"})
    started = []

    def launch(arguments, received, more, change):
        started.append(arguments.words)
        Path(tmp_path, "checkpoint-00000003.h5").unlink(missing_ok=True)  # killed while it removes the earlier run
        return Ending(137, "rank 1 was lost") if len(started) == 1 else Ending(0)

    assert run_generations(arguments, load_experiment(tmp_path / "toy.yaml"), launch) == 0
    assert started[0] == started[1]
    assert "--overwrite" in started[1]
