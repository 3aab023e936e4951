"""Block-wise inference of modules: results of the whole image from exactly the input cells needed."""

import os
import random

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import random_modules  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from module_steps import STEPS  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import run_in_blocks, share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import ProcessGrid, loopback  # noqa: E402
from neondist.errors import ConfigError, UserError  # noqa: E402
from neondist.io.journal import ProgressJournal  # noqa: E402
from neondist.train import evaluate_files, predict  # noqa: E402

SEED = int(os.environ["NEONDIST_SEED"])
LOCAL_STEPS = (
    "conv conv_function conv_transpose max_pool avg_pool lp_pool pad interpolate pixels slice_axes flip cat split"
    " pointwise combine channel_linear channel_shuffle in_place coordinates"
)


def test_random_modules(monkeypatch):
    monkeypatch.setattr(random_modules, "STEPS", {name: STEPS[name] for name in LOCAL_STEPS.split()})
    exact = 0
    for number in range(6):
        case = random_modules.draw_module(SEED, number)
        rng = random.Random(number)
        try:
            size = [rng.randint(1, 9) for _ in range(case.spatial)]
            actual, expected, _ = run_in_blocks(case.module(), case.inputs()[0][:1], size)
        except UserError:
            continue
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m, d=case: m + d.program())
        exact += 1
    assert exact >= 1


class Net(nn.Module):
    """Down- and upsampling of several kinds, with skip connections of any extent."""

    def __init__(self, n=2, wide=4):
        super().__init__()
        conv, norm = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1], (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n - 1]
        self.n = n
        self.first = nn.Sequential(
            conv(1, wide, 3, padding=1, padding_mode="reflect"), norm(wide), nn.ReLU(inplace=True)
        )
        self.down = conv(wide, 2 * wide, 3, stride=2, padding=1)
        self.inner = nn.Sequential(conv(2 * wide, 2 * wide, 3, padding=2, dilation=2), nn.GELU())
        self.up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1](2 * wide, wide, 4, 2, 1)
        self.last = conv(2 * wide, 3, 3, padding=1)
        for buffer in self.buffers():
            buffer.data = buffer + 0.3

    def forward(self, x):
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[self.n - 1]
        x = self.first(x)
        y = F.silu(self.down(x))
        z = pool(y, 3, 2, 1, count_include_pad=False)
        z = F.interpolate(self.inner(z), size=y.shape[2:])
        up = self.up(y + z)
        up = F.pad(up, [p for a, b in zip(x.shape[:1:-1], up.shape[:1:-1], strict=True) for p in (0, a - b)])
        return {"out": self.last(torch.cat([up, x], 1)), "other": y}


@pytest.mark.parametrize(("cells", "size"), [((61, 50), (16, 13)), ((97,), (10,)), ((14, 13, 17), (6, 20, 5))])
@pytest.mark.long
def test_blocks_read_exactly_the_cells_needed(cells, size):
    """Against the gradient of a block with respect to the image."""
    torch.manual_seed(0)
    actual, expected, blocks = run_in_blocks(Net(len(cells)), torch.randn(1, 1, *cells, dtype=torch.float64), size)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    module = Net(len(cells)).double().eval()
    module.first[2] = nn.Sigmoid()
    x = torch.randn(1, 1, *cells, dtype=torch.float64, requires_grad=True)
    for number in range(0, len(blocks), 3):
        y = module(x)["out"][(..., *blocks.output_box(number).slices)]
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        positions = gradient[0, 0].nonzero()
        box = blocks.input_box(number)
        assert (box.lo, box.hi) == (tuple(positions.amin(0).tolist()), tuple((positions.amax(0) + 1).tolist()))


@pytest.mark.long
def test_interpolation_in_float32():
    class Interpolation(nn.Module):
        def forward(self, x):
            y = F.interpolate(x, scale_factor=2, mode="bilinear")
            z = F.interpolate(F.pixel_unshuffle(y, 4), size=x.shape[2:], mode="bicubic", align_corners=True)
            return F.max_pool2d(y, 3, 2, 1) + F.pixel_shuffle(F.pixel_unshuffle(z, 2), 2).amax(1, keepdim=True)

    torch.manual_seed(0)
    actual, expected, _ = run_in_blocks(Interpolation(), torch.randn(1, 1, 44, 36), (9, 7))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    for mode in ("bilinear", "bicubic"):  # PyTorch's positions have seven digits, too
        actual, expected, _ = run_in_blocks(
            nn.Upsample(size=(9001, 3), mode=mode), torch.randn(1, 1, 4500, 2), (4000, 3)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


class Globe(nn.Module):
    """Periodic and shifted longitudes, with non-periodic latitudes."""

    def __init__(self, channels=1, classes=2):
        super().__init__()
        self.first = nn.Conv2d(channels, 3, 3, padding=(1, 0))
        self.last = nn.Conv2d(3, classes, 3, 2, padding=(1, 0))

    def forward(self, x):
        for part in (self.first, self.last):
            x = part(F.pad(F.silu(x).roll(3, 3), (1, 1, 0, 0), mode="circular"))
        return x


def test_periodic_images():
    torch.manual_seed(0)
    actual, expected, blocks = run_in_blocks(Globe(), torch.randn(1, 1, 21, 26, dtype=torch.float64), (3, 4))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert blocks.input_box(5).shape == (9, 11)  # an inner block


class FlattenCells(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2).flatten(1)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft2(x).abs()


class RowOrder(nn.Module):
    def forward(self, x):
        return x.gather(2, x.argsort(1))


class LabelEncoding(nn.Module):
    """Argmax, scatter and gather along channels: local to each cell."""

    def forward(self, x):
        labels = x.argmax(1, keepdim=True)
        y = torch.zeros_like(x).scatter(1, labels, 1.0) + x.gather(1, labels)
        y[y > 0.5] = 0.3
        return F.max_pool2d(y, 3, 2, 1).sort(1)[0]


class Attention(nn.Module):
    def forward(self, x):
        q = x.flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    ("part", "operator", "reason"),
    [
        (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d", "it sums over the whole image"),
        (nn.GroupNorm(1, 2), "group_norm", "it normalises by sums over the whole image"),
        (nn.InstanceNorm2d(2), "instance_norm", "it normalises by sums over the whole image"),
        (nn.BatchNorm2d(2, track_running_stats=False), "batch_norm", "it normalises by sums over the whole image"),
        (nn.Sequential(FlattenCells(), nn.Linear(2 * 12 * 11, 3)), "linear", "it sums over the whole image"),
        (RowOrder(), "gather", "it needs the whole image"),
        (Spectrum(), "fft_rfft2", "it needs the whole image"),
        (Attention(), "scaled_dot_product_attention", "it needs the whole image"),
    ],
)
def test_global_operators_are_named(part, operator, reason):
    module = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), part)
    message = rf"aten\.\w*{operator}.* in module '1.*' cannot be computed block by block: {reason}; whole$"
    with pytest.raises(ndt.UnsupportedOperator, match=message):
        run_in_blocks(module, torch.randn(1, 2, 12, 11), (4, 4))


def test_channel_indexing_in_blocks():
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), LabelEncoding(), nn.Conv2d(3, 2, 3))
    actual, expected, blocks = run_in_blocks(module, torch.randn(1, 2, 23, 18, dtype=torch.float64), (4, 4))
    torch.testing.assert_close(actual, expected)
    assert max(blocks.input_box(number).shape[0] for number in range(len(blocks))) < 23


def build_segmenter(last=nn.Identity):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 2, 2), last(),
        nn.Conv2d(4, 3, 3, padding=1),
    )  # fmt: skip


class LabelledImages(nd.Synthetic):
    """Synthetic images with a label per cell."""

    def open_splits(self, grid):
        tile = grid.tile_box(self.sample_shape[:-1]).shape
        return tuple(
            nd.Split(
                split.images(range(len(split)), "float64"),
                np.broadcast_to(split.labels[:, None, None], (len(split), *tile)),
                mean=0,
                std=1,
                scale=1,
            )
            for split in super().open_splits(grid)
        )


def make_experiment(build=build_segmenter, memory=None, **options):
    loss = ndt.TorchLoss("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5], "ignore_index": 0, "label_smoothing": 0.1})
    model = ndt.TorchModel(build, loss=loss, shape=[2, 12, 8], dtype="float64", **options)
    return nd.FitExperiment(
        LabelledImages((12, 8, 2), classes=3, train=4, test=2), model, batch_size=2, epochs=1, memory=memory
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a trained module, a larger image, its output for the whole image, and its losses."""
    folder = tmp_path_factory.mktemp("trained")
    with share_captures():
        experiment = make_experiment()
        experiment.run(ProcessGrid.serial(), output=folder, hooks=[])
        x = np.random.default_rng(0).normal(size=(1, 42, 30, 2))
        np.save(folder / "x.npy", x)
        np.save(folder / "labels.npy", np.random.default_rng(1).integers(0, 3, (1, 42, 30)).astype(np.uint8))
        with torch.no_grad(), h5py.File(folder / "checkpoint.h5") as file:
            assert "model" in file
            y = experiment.model.module.eval()(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
        np.save(folder / "y.npy", np.moveaxis(y.numpy(), 1, -1))
        data, module = experiment.dataset.test, experiment.model.module
        x, labels = torch.from_numpy(data.images(range(2), "float64")), torch.from_numpy(data.targets(range(2)).copy())
        with torch.no_grad():
            y = module(x.movedim(-1, 1))
            pairs = zip(y.split(1), labels.split(1), strict=True)
            losses = [experiment.model.cost.criterion(*pair).item() for pair in pairs]
        np.save(folder / "losses.npy", np.nan_to_num(losses))  # all labels of a sample may be ignored
        yield folder


@pytest.mark.long
def test_losses_of_single_samples(folder, tmp_path):
    with share_captures():
        loopback.run(4, lambda world: make_experiment().run(ProcessGrid(world, replicas=2), output=tmp_path, hooks=[]))
    losses = np.load(folder / "losses.npy")
    for output in (folder, tmp_path):
        with np.load(output / "worst.npz") as worst:
            assert worst["sample"].tolist() == np.argsort(-losses).tolist()
            np.testing.assert_allclose(worst["loss"], sorted(losses)[::-1], rtol=1e-8)
            assert worst["prediction"].shape == worst["image"].shape[:-1] == (2, 12, 8)


def predict_on(ranks, folder, target, make=make_experiment, **options):
    def body(world):
        return predict(make(), folder / "checkpoint.h5", folder / "x.npy", target, ProcessGrid(world), **options)

    loopback.run(ranks, body)
    return np.load(target)


@pytest.mark.long
def test_prediction_of_experiments_in_blocks(folder, tmp_path, monkeypatch):
    expected = np.load(folder / "y.npy")
    for ranks, options in ((1, {"block": 16}), (2, {"block": 9}), (2, {})):
        actual = predict_on(ranks, folder, tmp_path / f"y{ranks}{len(options)}.npy", **options)
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    small = predict_on(1, folder, tmp_path / "small.npy", make=lambda: make_experiment(memory="150kB"))
    np.testing.assert_allclose(small, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ConfigError, match=r"memory: even a block of 1 x 1 takes .* layer '0:aten\.conv2d\.default'"):
        predict_on(1, folder, tmp_path / "z.npy", make=lambda: make_experiment(memory="6kB"))


def test_interrupted_predictions_resume(folder, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    def add_and_interrupt(self, number):
        add(self, number)
        raise Interrupted

    add = ProgressJournal.record_part
    with monkeypatch.context() as patch:
        patch.setattr(ProgressJournal, "record_part", add_and_interrupt)
        with pytest.raises(Interrupted):
            predict_on(1, folder, tmp_path / "y.npy", block=16)
    predict_on(2, folder, tmp_path / "y.npy")
    predict_on(1, folder, tmp_path / "z.npy", block=16)
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "z.npy").read_bytes()


def test_cost_and_metrics_in_blocks(folder):
    def evaluate(ranks, block, **options):
        def body(world):
            paths = folder / "checkpoint.h5", folder / "x.npy", folder / "labels.npy"
            return evaluate_files(make_experiment(**options), *paths, ProcessGrid(world), block)

        return loopback.run(ranks, body)[0]

    expected = evaluate(1, None)
    assert 0 < expected["error"] < 1
    assert evaluate(2, 16) == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ConfigError, match="feed: its labels cannot be computed block by block"):
        evaluate(1, 16, feed=lambda x, labels: (torch.from_numpy(np.moveaxis(x, -1, 1).copy()), labels))


def test_global_operators_report_memory(folder, tmp_path, monkeypatch):
    def make_group_norm(**options):
        return make_experiment(lambda: build_segmenter(lambda: nn.GroupNorm(2, 4)), **options)

    message = r"aten\.group_norm\.default in module '4' cannot be computed block by block: .*; "
    with pytest.raises(UserError, match=message + r"leave out block: for a whole image, a rank needs \d.* kB"):
        predict_on(1, folder, tmp_path / "y.npy", make=make_group_norm, block=16)
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    with pytest.raises(
        UserError,
        match=message + r"for a whole image, a rank needs .*, but has 50 kB; use more"
        r" ranks, or give --memory 1MiB",
    ):
        predict_on(1, folder, tmp_path / "y.npy", make=lambda: make_group_norm(memory="50kB"))
