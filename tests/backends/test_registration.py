"""Custom backends: modules that are imported already, and names in files, which are not imported."""

import sys
from types import ModuleType

import numpy as np
import pytest
from device import Device

import neondist as nd

BACKEND_MODULE = '''
import neondist as nd

class Doubled(nd.Kernels):
    """Kernels with wrong convolutions, to be recognised."""

    def conv_forward(self, *arguments):
        return 2 * super().conv_forward(*arguments)

backend = nd.Backend("doubled", Doubled())
'''
EXPERIMENT_YAML = """
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 2, train: 8, test: 4}
model: !Convnet {layers: [!ConvLayer {out_channels: 2, kernel_size: 3}, !FCLayer {out_features: 2}]}
dist_flag: false
batch_size: 4
backend: doubled
"""


@pytest.fixture
def strict_device(monkeypatch):
    """Device of a module named strict_device."""
    module, device = ModuleType("strict_device"), Device()
    module.backend = device.backend
    monkeypatch.setitem(sys.modules, "strict_device", module)
    return device


def test_module_name(strict_device):
    assert nd.get_backend("strict_device") is strict_device.backend
    assert nd.get_backend(strict_device.backend) is strict_device.backend


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unknown.module",
            "backend 'unknown.module': no such module is imported; add --import unknown.module, or import it",
        ),
        ("json.tool.main", "no such module is imported"),
        ("os.path", "backend 'os.path': the module has no nd.Backend named `backend`; define one"),
        ("numby", "backend 'numby' is unknown; did you mean 'numpy'"),
    ],
)
def test_invalid_names(name, message):
    with pytest.raises(nd.ConfigError, match=message.replace(".", r"\.")):
        nd.get_backend(name)


def test_names_are_not_imported(monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(nd.ConfigError, match="no such module is imported"):
        nd.get_backend("package.module")


def test_on_the_command_line(tmp_path, capsys):
    from neondist.cli import main

    (tmp_path / "doubled.py").write_text(BACKEND_MODULE)
    (tmp_path / "toy.yaml").write_text(EXPERIMENT_YAML)
    try:
        assert main(["check", str(tmp_path / "toy.yaml"), "-n", "1"]) == 2
        assert (
            "toy.yaml:7: backend: backend 'doubled': no such module is imported; add --import doubled"
            in capsys.readouterr().err
        )
        assert main(["check", str(tmp_path / "toy.yaml"), "-n", "1", "--import", str(tmp_path / "doubled.py")]) == 0
        model = nd.Convnet([nd.ConvLayer(1, 1, bias=False)], backend="doubled", dtype="float64")
        model.build((2, 2, 1), 1)
        x = np.ones((1, 2, 2, 1))
        assert model.fprop(x)[0, 0, 0, 0] == 2 * model.leaves[0].params["weights"].item()
    finally:
        sys.modules.pop("doubled", None)


NETWORKS = {
    "convnet": lambda: nd.Convnet(
        [nd.ConvLayer(2, 3, bias=False), nd.BatchNormLayer(), nd.FCLayer(3)], optimizer=nd.Adam(0.01)
    ),
    "GB": lambda: nd.GB([nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2), nd.FCLayer(3)], num_pretrain_epochs=1),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_experiment_on_a_device(strict_device, tmp_path, network):
    """Compare pretraining, metrics, checkpoints and resumption with those of NumPy."""
    results = []
    for backend, epochs, resume in (("numpy", 2, False), ("strict_device", 1, False), ("strict_device", 2, True)):
        data, model = nd.Synthetic(shape=(6, 6, 1), classes=3, train=12, test=6), NETWORKS[network]()
        settings = {"batch_size": 4, "epochs": epochs, "dist_flag": False, "backend": backend, "dtype": "float64"}
        result = nd.FitExperiment(data, model, **settings).run(output=tmp_path / backend, resume=resume)
        results.append((result.history[-1], model.state()))
    for name, values in results[0][1].items():
        np.testing.assert_allclose(results[-1][1][name], values, rtol=1e-12, atol=1e-12, err_msg=name)
    for key in ("test_loss", "test_error"):
        assert results[-1][0][key] == pytest.approx(results[0][0][key], rel=1e-12)
