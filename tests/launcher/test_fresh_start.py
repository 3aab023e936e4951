"""Resumption of a run without a checkpoint: training starts over, and trained results are kept."""

import json
from pathlib import Path

import pytest
from cli_runs import EXPERIMENT
from storage_faults import GB_YAML

from neondist.cli.arguments import create_parser
from neondist.config import load_experiment
from neondist.errors import ConfigError
from neondist.io.output import has_results, is_empty_or_untrained
from neondist.launcher.generations import run_generations
from neondist.launcher.supervision import JobEnding
from neondist.system.signals import SignalRecorder

RECORD = json.dumps({"stage": "one", "epoch": 0}) + "\n"
NEW_RUNS = {
    "an empty folder": {},
    "files from before training": {"environment.json": "{}", "experiment.yaml": ""},
    "empty logs": {"environment.json": "{}", "metrics.jsonl": "", "ledger.jsonl": ""},
    "a record of GB from before training": {"environment.json": "{}", "pretrain.jsonl": RECORD},
    "a partial checkpoint": {"environment.json": "{}", "pretrain.jsonl": RECORD, "pretrain_1.h5.partial": "x"},
}
TRAINED_RUNS = {
    "an epoch": {"metrics.jsonl": RECORD},
    "an epoch of a stage": {"pretrain.jsonl": RECORD * 2},
    "a checkpoint": {"checkpoint.h5": "x"},
    "a checkpoint of a stage": {"pretrain_1.h5": "x"},
    "an older checkpoint": {"checkpoint-00000003.h5": "x"},
}


def write_files(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", NEW_RUNS)
def test_folders_without_training_are_new(name, tmp_path):
    write_files(tmp_path, NEW_RUNS[name])
    assert is_empty_or_untrained(tmp_path)
    assert not has_results(tmp_path)


@pytest.mark.parametrize("name", TRAINED_RUNS)
def test_folders_with_training_are_kept(name, tmp_path):
    write_files(tmp_path, TRAINED_RUNS[name])
    assert has_results(tmp_path)
    assert not is_empty_or_untrained(tmp_path)


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_gb_starts_over_after_its_first_record(resume, tmp_path):
    (tmp_path / "gb.yaml").write_text(GB_YAML)
    write_files(tmp_path, {"environment.json": "{}", "pretrain.jsonl": RECORD})
    result = load_experiment(tmp_path / "gb.yaml").run(output=tmp_path, resume=resume, hooks=[])
    expected = load_experiment(tmp_path / "gb.yaml").run(hooks=[])
    assert [record["train_loss"] for record in result.history] == [record["train_loss"] for record in expected.history]
    assert '"one"' not in (tmp_path / "pretrain.jsonl").read_text()
    with pytest.raises(ConfigError, match="has a run already"):
        load_experiment(tmp_path / "gb.yaml").run(output=tmp_path, hooks=[])


def test_restart_ignores_files_of_an_earlier_run(tmp_path):
    write_files(tmp_path, {"toy.yaml": EXPERIMENT})
    arguments = create_parser().parse_args(
        ["run", str(tmp_path / "toy.yaml"), "-n", "2", "--restarts", "1", "--output", str(tmp_path), "--overwrite"]
    )
    arguments.signals = SignalRecorder()
    write_files(tmp_path, {"checkpoint.h5": "old", "checkpoint-00000003.h5": "old"})
    launches = []

    def launch(arguments, received, environment, has_changed):
        launches.append(arguments.words)
        Path(tmp_path, "checkpoint-00000003.h5").unlink(missing_ok=True)  # killed while it removes the earlier run
        return JobEnding(137, "rank 1 was lost") if len(launches) == 1 else JobEnding(0)

    assert run_generations(arguments, load_experiment(tmp_path / "toy.yaml"), launch) == 0
    assert launches[0] == launches[1]
    assert "--overwrite" in launches[1]
