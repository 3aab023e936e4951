"""Kernels of the torch backend compared with the reference, lazy imports and thread settings."""

import itertools
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from threadpoolctl import threadpool_info

import neondist as nd
from neondist.backends import Kernels
from neondist.cli import main

torch = pytest.importorskip("torch")
from neondist.backends.torch import TorchKernelMixin  # noqa: E402

torch_kernels, reference = TorchKernelMixin(), Kernels()
RNG = np.random.default_rng(0)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 1e-10 if actual.dtype == np.float64 else 2e-5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))


def draw_slice(shape, dtype):
    """Return a random array that is a slice of a larger one, as views of tiles can be."""
    buffer = RNG.normal(size=(shape[0] + 1, *(n + 2 for n in shape[1:-1]), shape[-1])).astype(dtype)
    return buffer[(slice(0, shape[0]), *(slice(1, n + 1) for n in shape[1:-1]))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_convolution(dtype, ndim):
    extent, cases = (9, 8, 7)[:ndim], itertools.product([1, 2], [1, 2], [(1, 1, 1), (2, 4, 6), (8, 8, 8), (1, 16, 32)])
    for (stride, dilation, (groups, inner, outer)), samples in itertools.product(cases, [1, 3]):
        options = (stride,) * ndim, (dilation,) * ndim, groups
        x = draw_slice((samples, *extent, inner), dtype)
        w = RNG.normal(size=(*(3, 2, 3)[:ndim], inner // groups, outer)).astype(dtype)
        bias = RNG.normal(size=outer).astype(dtype)
        expected = reference.conv_forward(x, w, *options, bias)
        assert_close(torch_kernels.conv_forward(x, w, *options, bias), expected)
        dy = draw_slice(expected.shape, dtype)
        assert_close(
            torch_kernels.conv_backward_input(dy, w, extent, *options),
            reference.conv_backward_input(dy, w, extent, *options),
        )
        kernel = w.shape[:-2]
        assert_close(
            torch_kernels.conv_backward_weights(x, dy, kernel, *options),
            reference.conv_backward_weights(x, dy, kernel, *options),
        )


@pytest.mark.parametrize("extent", [(8, 5, 6), (5, 4, 3), (7, 5, 3), (1, 1, 1), (17,), (6, 20)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_pointwise_and_small_windows(extent, kernel):
    options, padding = ((1,) * len(extent), (1,) * len(extent), 1), (0 if kernel == 1 else 2,) * len(extent)
    w = RNG.normal(size=(*(kernel,) * len(extent), 5, 6)).astype(np.float32)
    for x in (
        draw_slice((1, *np.add(extent, padding), 5), np.float32),
        draw_slice((3, *np.add(extent, padding), 5), np.float32),
    ):
        y = reference.conv_forward(x, w, *options)
        assert_close(torch_kernels.conv_forward(x, w, *options), y)
        assert_close(
            torch_kernels.conv_backward_input(y, w, x.shape[1:-1], *options),
            reference.conv_backward_input(y, w, x.shape[1:-1], *options),
        )
        actual, expected = (
            kernels.conv_backward_weights(x, y, w.shape[:-2], *options) for kernels in (torch_kernels, reference)
        )
        assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(3, 3, 4, 8), (5, 1, 1), (2, 1, 3, 7, 5)])
def test_weight_layouts(shape):
    from neondist.backends.torch_conv import reorder_for_onednn, restore_weight_order

    weights = RNG.normal(size=shape)
    rearranged = reorder_for_onednn(weights)
    assert np.moveaxis(rearranged, -1, 0).flags.c_contiguous
    assert (rearranged == weights).all()
    assert restore_weight_order(rearranged).flags.c_contiguous
    assert (restore_weight_order(rearranged) == weights).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sides", [((2, 0), (1, 1), (0, 2)), ((0, 3), (2, 1), (3, 3)), ((9, 0), (8, 0), (0, 7)), ((1, 2), (2, 1), (3, 2))]
)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.long
def test_known_padding_is_skipped(monkeypatch, dtype, sides, ndim):
    from neondist.backends.torch_conv import weight_gradient_by_gemm
    from neondist.backends.windows import crop_borders

    extent, sides = (9, 8, 7)[:ndim], sides[:ndim]
    for stride, dilation, samples in itertools.product([1, 2], [1, 2], [1, 3]):
        options = (stride,) * ndim, (dilation,) * ndim
        w = RNG.normal(size=(*(3, 2, 3)[:ndim], 16, 16)).astype(dtype)
        x = np.zeros((samples, *extent, 16), dtype)
        crop_borders(x, sides)[...] = RNG.normal(size=crop_borders(x, sides).shape)
        dy = draw_slice(reference.conv_forward(x, w, *options, 1).shape, dtype)
        dx = reference.conv_backward_input(dy, w, extent, *options, 1)
        dw = reference.conv_backward_weights(x, dy, w.shape[:-2], *options, 1)
        for kernels in torch_kernels, reference:
            assert_close(kernels.conv_backward_input(dy, w, extent, *options, 1, sides), crop_borders(dx, sides))
            assert_close(kernels.conv_backward_weights(x, dy, w.shape[:-2], *options, 1, sides), dw)
            assert_close(
                kernels.conv_forward(x, w, *options, 1, None, sides), reference.conv_forward(x, w, *options, 1)
            )
        assert_close(weight_gradient_by_gemm(x, dy, w.shape[:-2], *options, sides[0]), dw)
        for strip, cpu in (1, "AVX2"), (1, "AVX512"), (1 << 20, "AVX2"):  # the algorithm depends on the CPU
            monkeypatch.setattr(torch_kernels, "strip_elements", strip)
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda cpu=cpu: cpu)
            input_gradient = np.full(x.shape, np.nan, dtype)
            backward_part = lambda part, dy=dy: np.ascontiguousarray(dy[part])  # noqa: E731
            gradients = torch_kernels.conv_backward_into(input_gradient, x, dy, w, *options, 1, backward_part, sides)
            assert_close(crop_borders(input_gradient, sides), crop_borders(dx, sides))
            assert_close(gradients[0], dw)
            assert np.isfinite(input_gradient).all()
            y = np.empty_like(dy, order="C")
            torch_kernels.conv_into(y, x, w, *options, 1, None, torch_kernels.copy, sides)
            assert_close(y, reference.conv_forward(x, w, *options, 1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 4, 19])
@pytest.mark.long
def test_windows(dtype, ndim, channels):
    extent = (9, 10, 11)[:ndim]
    x = draw_slice((2, *extent, channels), dtype)
    taps = [[0.5, 1.0, -2.0], [1.0, 3.0], [1.5]][:ndim]
    assert_close(torch_kernels.separable_filter(x, taps), reference.separable_filter(x, taps))
    spread_input = draw_slice(reference.separable_filter(x, taps).shape, dtype)
    assert_close(
        torch_kernels.separable_filter_adjoint(spread_input, extent, taps),
        reference.separable_filter_adjoint(spread_input, extent, taps),
    )
    for kernel, stride in itertools.product([(2, 3, 2), (7, 8, 9)], [(1, 1, 1), (2, 3, 2)]):
        options = kernel[:ndim], stride[:ndim]
        y, positions = torch_kernels.max_pool(x, *options)
        expected, expected_positions = reference.max_pool(x, *options)
        assert_close(y, expected)
        dy = draw_slice(y.shape, dtype)
        gradient = torch_kernels.max_pool_backward(dy, positions, extent, *options)
        assert_close(gradient, reference.max_pool_backward(dy, expected_positions, extent, *options))
        for target in np.empty_like(x, order="C"), draw_slice(x.shape, dtype):
            for strip in 1, 2000, 1 << 20:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch_kernels, "strip_elements", strip)
                    strip_positions = torch_kernels.max_pool_into(y, x, *options)
                    target[...] = np.nan
                    torch_kernels.max_pool_backward_into(target, dy, strip_positions, *options)
                assert_close(target, gradient)
        assert_close(torch_kernels.window_sum(x, *options), reference.window_sum(x, *options))
        assert_close(
            torch_kernels.window_sum_adjoint(dy, extent, *options), reference.window_sum_adjoint(dy, extent, *options)
        )


@pytest.mark.parametrize("shape", [(3, 5, 6, 4), (0, 5, 6, 4), (2, 0, 4), (3, 4)])
def test_sums_and_products(shape):
    x = RNG.normal(size=shape)
    assert_close(torch_kernels.channel_sum(x), reference.channel_sum(x))
    assert_close(torch_kernels.sample_sum(x), reference.sample_sum(x))
    rows = x.reshape(-1, shape[-1])
    assert_close(torch_kernels.matmul(rows.T, rows), rows.T @ rows)


def test_readonly_and_reversed_arrays():
    x, w = np.ones((2, 5, 5, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)
    x.flags.writeable = False
    options = (1, 1), (1, 1), 1
    assert_close(
        torch_kernels.conv_forward(x[:, ::-1], w[::-1], *options), reference.conv_forward(x[:, ::-1], w[::-1], *options)
    )


def test_large_arrays_are_not_copied():
    from neondist.backends.torch_arrays import to_channels_first, to_channels_last

    for shape in (2, 5, 6, 3), (1, 5, 6, 1), (2, 1, 1, 3), (2, 3, 4, 5, 6):
        x = np.zeros(shape, np.float32)
        y = to_channels_last(x, to_channels_first(x))
        y += 1
        assert (x == 1).all()


SHOW_MODULES = {"NEONDIST_TESTS_HIDE": ""}


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | SHOW_MODULES)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_lazy():
    lazy_modules = "{'torch', 'psutil', 'threadpoolctl', 'ctypes.util'} & set(sys.modules)"
    assert run_python(f"import sys, neondist; print({lazy_modules})") == "set()"
    assert run_python("import sys, neondist; neondist.get_backend('numpy'); print('torch' in sys.modules)") == "False"


@pytest.mark.long
def test_auto_selects_torch(capsys):
    assert next(backend.name for backend in nd.available() if backend.usable) == nd.get_backend().name == "torch"
    assert main(["doctor"]) == 0
    assert "selects torch" in capsys.readouterr().out


def test_auto_selects_numpy_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import neondist as nd; print(nd.get_backend().name, nd.available())"
    )
    output = run_python(code)
    assert output.startswith("numpy")
    assert "torch" in output


def test_broken_torch_falls_back_to_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    kernels, x = TorchKernelMixin(), np.ones((1, 40, 40, 8), np.float32)
    with pytest.warns(UserWarning, match="PyTorch cannot be imported"):
        y = kernels.conv_forward(x, np.ones((3, 3, 1, 8), np.float32), (1, 1), (1, 1), 8)
    assert (y == 9).all()


def test_usual_networks_do_not_import_torch():
    """Train without importing PyTorch, which would add 200 MiB to a process."""
    code = """
import sys, numpy as np, neondist as nd
R, C = nd.RectLin, nd.ConvLayerDist
layers = [C(16, 7, stride=2, padding=3, activation=R()), nd.BatchNormLayerDist(), nd.MaxPoolingLayerDist(3, stride=2)]
layers += [C(32, 3, padding=1, activation=R()), C(40, 1, stride=2), nd.DeconvLayerDist(8, 2, stride=2)]
layers += [C(8, 3, dilation=2), C(8, 3, groups=8), nd.LCNLayerDist(5), nd.L2PoolingLayerDist(3, stride=2)]
layers += [nd.AvgPoolingLayerDist(2), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(10)]
model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), seed=0)
model.build((131, 130, 3), batch_size=2, grid=nd.ProcessGrid())
model.train_batch(np.ones((2, 131, 130, 3), np.float32), np.arange(2))
print('torch' in sys.modules)
"""
    assert run_python(code).endswith("False")


@pytest.mark.parametrize("preamble", ["", "import torch; "], ids=["torch after the launcher", "torch before"])
@pytest.mark.long
def test_thread_count_of_a_rank(preamble):
    share = "from neondist.system import threads; threads.count_cores = lambda process=0: 2; threads.limit_threads(2); "
    code = (
        f"{preamble}{share}import neondist as nd; nd.get_backend('torch'); import torch; print(torch.get_num_threads())"
    )
    unset_variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"))
    environment = {name: value for name, value in os.environ.items() if name not in unset_variables} | SHOW_MODULES
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "1"


def test_numpy_threads_are_restored(monkeypatch):
    """Restore NumPy's threads, of which it uses one beside multi-threaded kernels."""

    def default_thread_count():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads_before = default_thread_count()
    kernels = nd.get_backend("numpy").kernels
    assert kernels.compiled is None or set(default_thread_count()) <= {1}
    kernels.close()
    assert default_thread_count() == threads_before


SIZE = 1 << 26


def measure_memory_after_freeing():
    """Return the resident memory in bytes after a large array is freed."""
    array = np.ones(SIZE, np.uint8)
    del array
    return psutil.Process().memory_info().rss


def test_closed_backend_restores_settings(monkeypatch):
    """Return freed blocks to the system again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backend = nd.get_backend("torch")
        assert torch.get_num_threads() == 1
        retained = measure_memory_after_freeing()
        memory_info = psutil.Process().memory_info
        backend.kernels.release_cached_memory(byte_limit=1 << 40)
        assert memory_info().rss > retained - SIZE // 2
        backend.kernels.release_cached_memory(byte_limit=retained - SIZE // 2)
        assert (given_back := memory_info().rss) < retained - SIZE // 2
        retained = measure_memory_after_freeing()
        assert retained > given_back + SIZE // 2
        backend.close()
        assert torch.get_num_threads() == 3
        assert measure_memory_after_freeing() < retained - SIZE // 2
    finally:
        torch.set_num_threads(threads_before)
