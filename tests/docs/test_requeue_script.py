"""Requeueing script of docs/cluster.md, with stand-ins for srun and scontrol."""

import json
import os
import subprocess
import sys

import pytest
from doc_blocks import parse_blocks
from doc_sandbox import ROOT

GB = """
!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [6, 5, 1], classes: 3, train: 8, test: 4}
model: !GBDist
  layers: [!LocalFilteringLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
  num_pretrain_epochs: 60
batch_size: 4
"""
# drops its options; the first job gets the signal of the time limit after its first stage
SRUN = f"""#!/bin/sh
while [ "${{1#--}}" != "$1" ]; do shift; done
shift
"{sys.executable}" -m neondist "$@" & job=$!
if [ ! -e signalled ]; then
    touch signalled
    while [ ! -e $OUT/pretrain_1.h5 ]; do sleep 0.01; done
    kill -USR1 $job
fi
wait $job
"""


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
@pytest.mark.long
def test_requeued_job_resumes_during_pretraining(tmp_path):
    (script,) = [b.text for b in parse_blocks(ROOT / "docs" / "cluster.md") if "scontrol requeue" in b.text]
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho $@ >> requeued\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "experiment.yaml").write_text(GB)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_NAME": "gb", "SLURM_JOB_ID": "17", "PATH": path, "OUT": "runs/gb", "OMP_NUM_THREADS": "1"}

    def run_job():
        process = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=os.environ | job, capture_output=True, text=True, timeout=120
        )
        return process.returncode, process.stdout + process.stderr

    code, output = run_job()
    assert code == 75, output
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    code, output = run_job()
    assert code == 0, output
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert "starting from scratch" not in output
    lines = (tmp_path / "runs" / "gb" / "pretrain.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [*range(61)]
