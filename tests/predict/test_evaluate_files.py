"""Costs and metrics of predictions against files of labels or targets, in blocks and on any ranks."""

import shutil

import numpy as np
import pytest
from predict_runs import evaluate_on_ranks, make_experiment, predict_on_ranks

import neondist as nd
from neondist.comm import ProcessGrid
from neondist.errors import DataError
from neondist.train import evaluate_files


@pytest.mark.long
def test_cost_and_metrics_of_files(network_folder, tmp_path):
    y = np.load(network_folder / "y.npy")
    labels = np.random.default_rng(5).integers(0, 3, y.shape[:-1]).astype(np.uint8)
    np.save(tmp_path / "labels.npy", labels)
    p = np.exp(y) / np.exp(y).sum(axis=-1, keepdims=True)
    loss = -np.log(np.take_along_axis(p, labels[..., None].astype(int), -1)).mean()
    for ranks, block in ((1, None), (4, None), (1, 16), (3, 24)):
        results = evaluate_on_ranks(network_folder, tmp_path / "labels.npy", ranks, block)
        assert results["samples"] == 3
        assert results["loss"] == pytest.approx(loss, rel=1e-10)
        assert results["error"] == np.mean(y.argmax(axis=-1) != labels)
    np.save(tmp_path / "short.npy", labels[:, 1:])
    with pytest.raises(
        DataError, match=r"short\.npy: has labels of shape \[3, 39, 52\], but the outputs have shape \[3, 40, 52\]"
    ):
        evaluate_on_ranks(network_folder, tmp_path / "short.npy", 2, None)


@pytest.mark.long
def test_costs_and_metrics_of_whole_samples(network_folder, tmp_path):
    """Blocks and tiles give the results of one rank with full images."""
    y = np.load(network_folder / "y.npy")
    rng = np.random.default_rng(6)
    np.save(tmp_path / "labels.npy", rng.integers(0, 3, y.shape[:-1]).astype(np.uint8))
    np.save(tmp_path / "numbers.npy", y + rng.normal(size=y.shape))

    def with_metrics(cost, *metrics):
        def make():
            experiment = make_experiment()
            experiment.model.cost, experiment.metrics = cost, list(metrics)
            return experiment

        return make

    make_segmentation = with_metrics(nd.DiceCE(class_weights=[1, 2, 3]), nd.ROCAUC(), nd.IoU())
    make_restoration = with_metrics(nd.MSE(), nd.PSNR(20.0))
    for labels, make in (("labels.npy", make_segmentation), ("numbers.npy", make_restoration)):
        expected = evaluate_on_ranks(network_folder, tmp_path / labels, 1, None, make)
        assert len(expected) > 3
        assert expected.pop("error") is None
        assert None not in expected.values()
        for ranks, block in ((2, None), (1, 16), (3, 24)):
            results = evaluate_on_ranks(network_folder, tmp_path / labels, ranks, block, make)
            assert results.keys() - expected.keys() == {"error"}
            for name, value in expected.items():
                assert results[name] == pytest.approx(value, rel=1e-10), name
    means = np.mean((np.load(tmp_path / "numbers.npy") - y) ** 2, axis=(1, 2, 3))
    assert expected["psnr"] == pytest.approx(np.mean(10 * np.log10(400 / means)))


@pytest.mark.long
def test_ssim_windows_cross_blocks(network_folder, tmp_path):
    skimage_metrics = pytest.importorskip("skimage.metrics")
    shutil.copy(network_folder / "net.h5", tmp_path)
    np.save(tmp_path / "x.npy", np.load(network_folder / "x.npy")[:2, :22, :20])
    predict_on_ranks(1, tmp_path, tmp_path / "y.npy")
    y = np.load(tmp_path / "y.npy")
    targets = y + np.random.default_rng(6).normal(size=y.shape)
    np.save(tmp_path / "numbers.npy", targets)

    def make():
        experiment = make_experiment()
        experiment.model.cost, experiment.metrics = nd.MSE(), [nd.SSIM(20.0), nd.PSNR(20.0)]
        return experiment

    pairs = list(zip(targets, y, strict=True))
    ssim = np.mean([skimage_metrics.structural_similarity(a, b, data_range=20.0, channel_axis=-1) for a, b in pairs])
    psnr = np.mean([skimage_metrics.peak_signal_noise_ratio(a, b, data_range=20.0) for a, b in pairs])
    for ranks, block in ((1, None), (4, None), (2, 8), (3, 12), (1, 5)):
        results = evaluate_on_ranks(tmp_path, tmp_path / "numbers.npy", ranks, block, make)
        assert results["ssim"] == pytest.approx(ssim, rel=1e-9)
        assert results["psnr"] == pytest.approx(psnr, rel=1e-9)
        assert results["loss"] == pytest.approx(np.mean((targets - y) ** 2), rel=1e-9)
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy")[0])
    np.save(tmp_path / "numbers.npy", targets[0])  # its shape could be (N, Y, X) as well
    results = evaluate_files(
        make(), tmp_path / "net.h5", tmp_path / "x.npy", tmp_path / "numbers.npy", ProcessGrid.serial()
    )
    assert results["loss"] == pytest.approx(np.mean((targets[0] - y[0]) ** 2), rel=1e-9)
