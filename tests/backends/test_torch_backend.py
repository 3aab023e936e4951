"""The torch backend against the numpy backend, and that it stays out of the way."""

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
from neondist.backends.torch import TorchTable  # noqa: E402

fast, plain = TorchTable(), Kernels()
rng = np.random.default_rng(0)


def agree(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    tolerance = 1e-10 if found.dtype == np.float64 else 2e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))


def sliced(shape, dtype):
    """An array that is a part of a larger one, as the view of a tile may be."""
    around = rng.normal(size=(shape[0] + 1, *(n + 2 for n in shape[1:-1]), shape[-1])).astype(dtype)
    return around[(slice(0, shape[0]), *(slice(1, n + 1) for n in shape[1:-1]))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_convolution(dtype, ndim):
    extent, ways = (9, 8, 7)[:ndim], itertools.product([1, 2], [1, 2], [(1, 1, 1), (2, 4, 6), (8, 8, 8), (1, 16, 32)])
    for (stride, dilation, (groups, inner, outer)), samples in itertools.product(ways, [1, 3]):
        how = (stride,) * ndim, (dilation,) * ndim, groups
        x = sliced((samples, *extent, inner), dtype)
        w = rng.normal(size=(*(3, 2, 3)[:ndim], inner // groups, outer)).astype(dtype)
        bias = rng.normal(size=outer).astype(dtype)
        expected = plain.conv_forward(x, w, *how, bias)
        agree(fast.conv_forward(x, w, *how, bias), expected)
        dy = sliced(expected.shape, dtype)
        agree(fast.conv_backward_input(dy, w, extent, *how), plain.conv_backward_input(dy, w, extent, *how))
        kernel = w.shape[:-2]
        agree(fast.conv_backward_weights(x, dy, kernel, *how), plain.conv_backward_weights(x, dy, kernel, *how))


@pytest.mark.parametrize("extent", [(8, 5, 6), (5, 4, 3), (7, 5, 3), (1, 1, 1), (17,), (6, 20)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_what_goes_to_onednn_as_more_samples(extent, kernel):
    how, around = ((1,) * len(extent), (1,) * len(extent), 1), (0 if kernel == 1 else 2,) * len(extent)
    w = rng.normal(size=(*(kernel,) * len(extent), 5, 6)).astype(np.float32)
    for x in sliced((1, *np.add(extent, around), 5), np.float32), sliced((3, *np.add(extent, around), 5), np.float32):
        y = plain.conv_forward(x, w, *how)
        agree(fast.conv_forward(x, w, *how), y)
        agree(fast.conv_backward_input(y, w, x.shape[1:-1], *how), plain.conv_backward_input(y, w, x.shape[1:-1], *how))
        found, expected = (k.conv_backward_weights(x, y, w.shape[:-2], *how) for k in (fast, plain))
        agree(found, expected)


@pytest.mark.parametrize("shape", [(3, 3, 4, 8), (5, 1, 1), (2, 1, 3, 7, 5)])
def test_weights_in_order_again(shape):
    from neondist.backends.torch_conv import arranged, in_order

    weights = rng.normal(size=shape)
    there = arranged(weights)
    assert np.moveaxis(there, -1, 0).flags.c_contiguous
    assert (there == weights).all()
    assert in_order(there).flags.c_contiguous
    assert (in_order(there) == weights).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sides", [((2, 0), (1, 1), (0, 2)), ((0, 3), (2, 1), (3, 3)), ((9, 0), (8, 0), (0, 7)), ((1, 2), (2, 1), (3, 2))]
)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.long
def test_what_padding_spares(monkeypatch, dtype, sides, ndim):
    from neondist.backends.torch_conv import weights_by_gemm
    from neondist.backends.windows import cropped

    extent, sides = (9, 8, 7)[:ndim], sides[:ndim]
    for stride, dilation, samples in itertools.product([1, 2], [1, 2], [1, 3]):
        how = (stride,) * ndim, (dilation,) * ndim
        w = rng.normal(size=(*(3, 2, 3)[:ndim], 16, 16)).astype(dtype)
        x = np.zeros((samples, *extent, 16), dtype)
        cropped(x, sides)[...] = rng.normal(size=cropped(x, sides).shape)
        dy = sliced(plain.conv_forward(x, w, *how, 1).shape, dtype)
        dx = plain.conv_backward_input(dy, w, extent, *how, 1)
        dw = plain.conv_backward_weights(x, dy, w.shape[:-2], *how, 1)
        for kernels_ in fast, plain:
            agree(kernels_.conv_backward_input(dy, w, extent, *how, 1, sides), cropped(dx, sides))
            agree(kernels_.conv_backward_weights(x, dy, w.shape[:-2], *how, 1, sides), dw)
            agree(kernels_.conv_forward(x, w, *how, 1, None, sides), plain.conv_forward(x, w, *how, 1))
        agree(weights_by_gemm(x, dy, w.shape[:-2], *how, sides[0]), dw)
        for strip, cpu in (1, "AVX2"), (1, "AVX512"), (1 << 20, "AVX2"):  # which takes other ways on some CPUs
            monkeypatch.setattr(fast, "strip", strip)
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda cpu=cpu: cpu)
            into = np.full(x.shape, np.nan, dtype)
            begin = lambda part, dy=dy: np.ascontiguousarray(dy[part])  # noqa: E731
            again = fast.conv_back_into(into, x, dy, w, *how, 1, begin, sides)
            agree(cropped(into, sides), cropped(dx, sides))
            agree(again[0], dw)
            assert np.isfinite(into).all()
            y = np.empty_like(dy, order="C")
            fast.conv_into(y, x, w, *how, 1, None, fast.copy, sides)
            agree(y, plain.conv_forward(x, w, *how, 1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 4, 19])
@pytest.mark.long
def test_windows(dtype, ndim, channels):
    extent = (9, 10, 11)[:ndim]
    x = sliced((2, *extent, channels), dtype)
    taps = [[0.5, 1.0, -2.0], [1.0, 3.0], [1.5]][:ndim]
    agree(fast.separable_filter(x, taps), plain.separable_filter(x, taps))
    small = sliced(plain.separable_filter(x, taps).shape, dtype)
    agree(fast.separable_spread(small, extent, taps), plain.separable_spread(small, extent, taps))
    for kernel, stride in itertools.product([(2, 3, 2), (7, 8, 9)], [(1, 1, 1), (2, 3, 2)]):
        how = kernel[:ndim], stride[:ndim]
        y, place = fast.max_pool(x, *how)
        expected, expected_place = plain.max_pool(x, *how)
        agree(y, expected)
        dy = sliced(y.shape, dtype)
        found = fast.max_pool_backward(dy, place, extent, *how)
        agree(found, plain.max_pool_backward(dy, expected_place, extent, *how))
        for into in np.empty_like(x, order="C"), sliced(x.shape, dtype):
            for strip in 1, 2000, 1 << 20:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(fast, "strip", strip)
                    places = fast.max_pool_into(y, x, *how)
                    into[...] = np.nan
                    fast.max_pool_back_into(into, dy, places, *how)
                agree(into, found)
        agree(fast.window_sum(x, *how), plain.window_sum(x, *how))
        agree(fast.window_spread(dy, extent, *how), plain.window_spread(dy, extent, *how))


@pytest.mark.parametrize("shape", [(3, 5, 6, 4), (0, 5, 6, 4), (2, 0, 4), (3, 4)])
def test_sums_and_products(shape):
    x = rng.normal(size=shape)
    agree(fast.channel_sum(x), plain.channel_sum(x))
    agree(fast.sample_sum(x), plain.sample_sum(x))
    rows = x.reshape(-1, shape[-1])
    agree(fast.matmul(rows.T, rows), rows.T @ rows)


def test_what_torch_would_refuse():
    x, w = np.ones((2, 5, 5, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)
    x.flags.writeable = False
    ones = (1, 1), (1, 1), 1
    agree(fast.conv_forward(x[:, ::-1], w[::-1], *ones), plain.conv_forward(x[:, ::-1], w[::-1], *ones))


def test_large_arrays_are_not_copied():
    from neondist.backends.torch_arrays import channels_first, channels_last

    for shape in (2, 5, 6, 3), (1, 5, 6, 1), (2, 1, 1, 3), (2, 3, 4, 5, 6):
        x = np.zeros(shape, np.float32)
        y = channels_last(x, channels_first(x))
        y += 1
        assert (x == 1).all()


SHOWN = {"NEONDIST_TESTS_HIDE": ""}


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | SHOWN)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_neondist_does_not_import_what_kernels_need():
    later = "{'torch', 'psutil', 'threadpoolctl', 'ctypes.util'} & set(sys.modules)"
    assert python(f"import sys, neondist; print({later})") == "set()"
    assert python("import sys, neondist; neondist.get_backend('numpy'); print('torch' in sys.modules)") == "False"


@pytest.mark.long
def test_auto_takes_torch_and_doctor_says_so(capsys):
    assert next(one.name for one in nd.available() if one.usable) == nd.get_backend().name == "torch"
    assert main(["doctor"]) == 0
    assert "takes torch" in capsys.readouterr().out


def test_auto_takes_numpy_where_torch_is_not():
    code = (
        "import sys; sys.modules['torch'] = None; import neondist as nd; print(nd.get_backend().name, nd.available())"
    )
    found = python(code)
    assert found.startswith("numpy")
    assert "torch" in found


def test_where_torch_is_broken_numpy_computes(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    kernels, x = TorchTable(), np.ones((1, 40, 40, 8), np.float32)
    with pytest.warns(UserWarning, match="PyTorch cannot be imported"):
        y = kernels.conv_forward(x, np.ones((3, 3, 1, 8), np.float32), (1, 1), (1, 1), 8)
    assert (y == 9).all()


def test_ordinary_networks_do_without_torch():
    """A process of an image network is 200 MiB smaller."""
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
    assert python(code).endswith("False")


@pytest.mark.parametrize("early", ["", "import torch; "], ids=["torch after the launcher", "torch before"])
@pytest.mark.long
def test_threads_are_those_of_the_rank(early):
    share = "from neondist.system import threads; threads.cores = lambda process=0: 2; threads.limit(2); "
    code = f"{early}{share}import neondist as nd; nd.get_backend('torch'); import torch; print(torch.get_num_threads())"
    unset = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"))
    environment = {name: value for name, value in os.environ.items() if name not in unset} | SHOWN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "1"


def test_numpys_threads_are_taken_back(monkeypatch):
    """Beside kernels of several threads NumPy has one, which would wait for theirs."""

    def threads():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = threads()
    kernels = nd.get_backend("numpy").kernels
    assert kernels.compiled is None or set(threads()) <= {1}
    kernels.close()
    assert threads() == before


SIZE = 1 << 26


def resident_after_freeing():
    """Bytes of memory that the process has after a large array is gone."""
    array = np.ones(SIZE, np.uint8)
    del array
    return psutil.Process().memory_info().rss


def test_a_closed_backend_takes_back_what_it_changed(monkeypatch):
    """Large blocks that are freed go back to the system again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backend = nd.get_backend("torch")
        assert torch.get_num_threads() == 1
        kept = resident_after_freeing()
        held = psutil.Process().memory_info
        backend.kernels.give_back_freed(above=1 << 40)
        assert held().rss > kept - SIZE // 2
        backend.kernels.give_back_freed(above=kept - SIZE // 2)
        assert (given_back := held().rss) < kept - SIZE // 2
        kept = resident_after_freeing()
        assert kept > given_back + SIZE // 2
        backend.close()
        assert torch.get_num_threads() == 3
        assert resident_after_freeing() < kept - SIZE // 2
    finally:
        torch.set_num_threads(before)
