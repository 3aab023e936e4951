"""Option `--debug-halo` of `neondist run`."""

import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, run_command, strip_mpirun_notices

LAYER_MODULE = """
import neondist as nd

class CentresDist(nd.ConvLayerDist):
    'Centres its view in place.'
    def forward(self, ctx, view):
        view -= view.mean()
        return super().forward(ctx, view)
"""


@needs_mpirun
@pytest.mark.long
def test_in_place_change_is_reported_once_with_its_line(tmp_path):
    (tmp_path / "centres.py").write_text(LAYER_MODULE)
    (tmp_path / "toy.yaml").write_text(EXPERIMENT.replace("!ConvLayerDist", "!CentresDist"))
    code, _, err = run_command(
        build_command("run", "toy.yaml", "-n", 2, "--debug-halo", "--import", "centres.py"), tmp_path
    )
    assert code == 2
    location = "toy.yaml:5: model.layers.0: layer 'conv1' (CentresDist), forward, step 0"
    assert strip_mpirun_notices(err) == f"error: {location}: modified its view in place; work on a copy\n"
