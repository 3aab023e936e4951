"""`neondist run --debug-halo`."""

import pytest
from cli_runs import EXPERIMENT, call, needs_mpirun, neondist, own

MINE = """
import neondist as nd

class CentresDist(nd.ConvLayerDist):
    'Centres its view in place.'
    def forward(self, ctx, view):
        view -= view.mean()
        return super().forward(ctx, view)
"""


@needs_mpirun
@pytest.mark.long
def test_a_mistake_is_told_once_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "toy.yaml").write_text(EXPERIMENT.replace("!ConvLayerDist", "!CentresDist"))
    code, _, err = call(neondist("run", "toy.yaml", "-n", 2, "--debug-halo", "--import", "mine.py"), tmp_path)
    assert code == 2
    where = "toy.yaml:5: model.layers.0: layer 'conv1' (CentresDist), forward, step 0"
    assert own(err) == f"error: {where}: modified its view in place; work on a copy\n"
