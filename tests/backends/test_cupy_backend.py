"""CuPy backend on a strict device instead of a GPU, and unusable installations."""

import json
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from device import CudaDevice, Device, make_cupy_module

import neondist as nd
from neondist.arrays.namespace import namespace
from neondist.backends import cupy, gpus
from neondist.backends.cupy_torch import torch_allocator
from neondist.system.memory import format_bytes, out_of_memory_error

EXPERIMENT_YAML = """
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 2, train: 8, test: 4}
model: !Convnet {layers: [!FCLayer {out_features: 2}]}
dist_flag: false
backend: cupy
"""


@pytest.fixture
def install_gpu(monkeypatch):
    """Function that installs an emulated CuPy with GPUs in this process."""

    def install(memory=1 << 34, **options):
        device = Device(memory)
        monkeypatch.setitem(sys.modules, "cupy", make_cupy_module(device, **options))
        monkeypatch.setattr(CudaDevice, "used", ())
        return device

    return install


def train_losses(backend):
    layers = [nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()), nd.MaxPoolingLayerDist(2), nd.FCLayerDist(4)]
    model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=nd.Adam(0.01), backend=backend, dtype="float64")
    model.build((6, 8, 2), 4, nd.ProcessGrid.serial())
    rng = np.random.default_rng(3)
    return [float(model.train_batch(model.scatter(rng.random((4, 6, 8, 2))), np.arange(4))) for _ in range(3)]


def test_training_matches_the_host(install_gpu):
    install_gpu()
    np.testing.assert_allclose(train_losses("cupy"), train_losses("numpy"), rtol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2, 5])
def test_ranks_share_gpus(install_gpu, monkeypatch, rank):
    install_gpu(count=2)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
    assert nd.get_backend("cupy").name == "cupy"
    assert CudaDevice.used == (rank % 2,)


def test_description(install_gpu):
    install_gpu(count=2)
    backend = {candidate.name: candidate for candidate in nd.available()}["cupy"]
    assert backend.usable
    assert backend.reason == "CuPy 14.2.0, CUDA 12.9, driver for CUDA 13.0: Strict (16 GiB), Strict (16 GiB)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "no GPU is visible; see nvidia-smi, and the variable CUDA_VISIBLE_DEVICES"),
        ({"status": 100}, "no GPU is visible"),
        ({"status": 35, "driver": 0}, "there is no NVIDIA driver; install one for CUDA 12.9 or later"),
        ({"status": 35, "driver": 11040}, "the NVIDIA driver supports CUDA 11.4 at most, and this CuPy needs 12.9"),
        ({"status": 999}, "the CUDA runtime fails: error 999; see whether nvidia-smi works"),
    ],
)
def test_no_gpu(install_gpu, options, message):
    install_gpu(**options)
    assert gpus.find_cupy_problem().startswith(message)
    assert not {backend.name: backend for backend in nd.available()}["cupy"].usable


def test_errors_name_line_and_remedy(monkeypatch, tmp_path, capsys):
    from neondist.cli import main

    (tmp_path / "one.yaml").write_text(EXPERIMENT_YAML)
    monkeypatch.setattr(gpus, "find_module_spec", lambda name: None)
    assert main(["check", str(tmp_path / "one.yaml")]) == 2
    message = capsys.readouterr().err
    assert "one.yaml:6: backend" in message
    assert "backend 'cupy': not installed; pip install cupy-cuda12x" in message
    assert "or use backend 'numpy'" in message


def test_broken_installations(install_gpu, monkeypatch):
    install_gpu()
    monkeypatch.setattr(metadata, "version", {"cupy-cuda11x": "13.1", "cupy-cuda12x": "14.2"}.__getitem__)
    monkeypatch.setattr(metadata, "PackageNotFoundError", KeyError)
    assert gpus.find_cupy_problem().startswith("cupy-cuda12x and cupy-cuda11x are installed together")
    monkeypatch.undo()
    install_gpu()
    monkeypatch.setattr(gpus.importlib, "import_module", lambda name: 1 / 0)
    assert gpus.find_cupy_problem() == "cannot be imported: ZeroDivisionError: division by zero"


def make_model(**options):
    layers = [nd.ConvLayer(8, 3, padding=1, activation=nd.ReLU()), nd.MaxPoolingLayer(2), nd.FCLayer(4)]
    return nd.Convnet(layers, backend="cupy", **options)


def test_out_of_memory_suggests_a_setting(install_gpu, monkeypatch):
    """Suggest a memory limit with which the model is planned and fits."""
    # memory reserved for blocks of kernels, which are small in this test
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    monkeypatch.setattr(cupy.CupyKernels, "block_elements", 1 << 12)
    monkeypatch.setattr(cupy.CupyKernels, "strip_elements", 1 << 12)
    model, x = make_model(), np.random.default_rng(0).random((4, 64, 64, 3), np.float32)
    needed = model.plan((64, 64, 3), batch_size=4).needed_bytes

    def train(device, **options):
        model = make_model(**options)
        model.build((64, 64, 3), 4)
        device.capacity = needed
        return model, model.train_batch(x, np.arange(4))

    with pytest.raises(
        nd.ConfigError, match=r"^memory: layer 'conv1' could not allocate .*B in the (for|back)ward pass, with"
    ) as caught:
        train(install_gpu())
    message = str(caught.value)
    assert f"the planned peak of a step is {format_bytes(needed)} per rank" in message
    assert isinstance(caught.value.__cause__, MemoryError)
    setting = re.search(r"set memory: (.*?B), or use more ranks or smaller batches", message).group(1)
    fitted, loss = train(install_gpu(), memory=setting)
    assert fitted.compiled.needed_bytes < needed
    assert fitted.is_streamed
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Out of memory allocating 1,234,567,890 bytes (allocated so far: 5 bytes).", "1.23 GB"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB", "21 MB"),
        ("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64", "8 GB"),
        ("", "an array"),
    ],
)
def test_memory_errors_of_libraries(message, size):
    error = out_of_memory_error(MemoryError(message), "conv1", "forward", 30 << 30, None, 1, "cupy")
    assert str(error).startswith(
        f"memory: layer 'conv1' could not allocate {size} in the forward pass; the planned peak"
    )


def test_pytorch_allocator():
    """Let a tensor own the memory, and raise MemoryError on exhaustion as CuPy does."""

    class OutOfMemoryError(RuntimeError):
        pass

    def empty(size, dtype, device):
        if size > 100:
            raise OutOfMemoryError(f"Tried to allocate {size} bytes")
        return torch.empty(size, dtype=dtype)

    torch = pytest.importorskip("torch")
    classes = {"UnownedMemory": lambda *arguments: arguments, "MemoryPointer": lambda *arguments: arguments}
    library = SimpleNamespace(empty=empty, uint8=torch.uint8, device=torch.device)
    library.cuda = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    allocate = torch_allocator(SimpleNamespace(cuda=SimpleNamespace(**classes)), library, 1)
    (address, size, owner, device), offset = allocate(7)
    assert (address, size, device, offset) == (owner.data_ptr(), 7, 1, 0)
    with pytest.raises(MemoryError, match="Tried to allocate 107 bytes"):
        allocate(107)


def test_check_detects_insufficient_memory(install_gpu, tmp_path, capsys):
    from neondist.cli import main

    (tmp_path / "one.yaml").write_text(EXPERIMENT_YAML.replace("shape: [8, 8, 1]", "shape: [4096, 2048, 1]"))
    install_gpu(memory=1 << 26)
    assert main(["check", str(tmp_path / "one.yaml")]) == 2
    message = capsys.readouterr().err
    assert "layer 'fc1' needs" in message or "memory: a rank may use" in message
    assert len(message.splitlines()) == 1
    assert CudaDevice.used == ()  # a GPU in use would hold memory in the launching process


def test_auto_selects_a_gpu(install_gpu):
    install_gpu()
    assert nd.get_backend("auto").name == nd.available()[0].name == "cupy"
    install_gpu(count=0)
    assert nd.get_backend("auto").name == next(backend.name for backend in nd.available() if backend.usable) != "cupy"


JOB_YAML = """
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 2], classes: 3, train: 12, test: 6}
model: !Convnet
  layers:
  - !ConvLayer {out_channels: 4, kernel_size: 3, padding: 1, activation: !ReLU {}}
  - !BatchNormLayer {}
  - !MaxPoolingLayer {kernel_size: 2}
  - !FCLayer {out_features: 3}
  cost: !CrossEntropy {}
  optimizer: !Adam {}
metrics: [!Misclassification {}, !TopK {k: 2}, !Accuracy {}, !F1 {}, !IoU {}, !LogLoss {}, !ROCAUC {}]
batch_size: 4
epochs: 1
dist_flag: false
dtype: float64
"""


def test_run_metrics_and_predictions(install_gpu, tmp_path, capsys):
    """Run, resume and predict with the same results as on the host."""
    from neondist.cli import main

    install_gpu()
    (tmp_path / "job.yaml").write_text(JOB_YAML)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((5, 8, 8, 2)))
    results = []
    for backend in ("numpy", "cupy"):
        out, backend_setting = tmp_path / backend, ["--set", f"backend={backend}"]
        command = ["run", str(tmp_path / "job.yaml"), "--output", str(out)]
        assert main([*command, *backend_setting]) == 0
        assert main([*command, "--resume", *backend_setting, "epochs=2"]) == 0
        files = "--checkpoint", out / "checkpoint.h5", "--input", tmp_path / "x.npy", "--output", out / "y.npy"
        assert main(["predict", str(tmp_path / "job.yaml"), *map(str, files), *backend_setting]) == 0
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        figures = [value for line in lines for name, value in sorted(line.items()) if "second" not in name]
        results.append(np.hstack([*figures, np.load(out / "y.npy").ravel()]))
    assert len(results[0]) > 30
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)


def test_namespace_of_cupy_arrays(install_gpu):
    """Recognise CuPy arrays, which have no `__array_namespace__`."""
    install_gpu()
    array = type("ndarray", (), {"__module__": "cupy._core.core"})()
    assert namespace(array) is sys.modules["cupy"]
