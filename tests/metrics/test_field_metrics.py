"""Weighted costs and metrics of physical variables against xarray, on any number of ranks."""

import re

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.train import evaluate_checkpoint
from neondist.train.loop import evaluate

pytest.importorskip("netCDF4", reason="files are made by netCDF4")
xarray = pytest.importorskip("xarray", reason="the oracle")
from climate import make_weather, write_dataset, write_series  # noqa: E402

VARIABLE_NAMES = ["t2m", "z500"]


def make_metrics(weights):
    metric_classes = (nd.RMSE, nd.MeanAbsoluteError, nd.Bias, nd.R2, nd.ACC)
    return [metric_class(weights=weights) for metric_class in metric_classes]


def evaluate_on_ranks(path, ranks, weights):
    """Return the metrics, outputs in physical units, loss, state and scaling of a model on `ranks` ranks."""

    def body(world):
        grid = nd.ProcessGrid(world)
        data = nd.ClimateFiles(str(path / "*.nc"), ["t2m", "z"], levels=[500], validation=None, test=7)
        data.open(grid)
        layers = [nd.ConvLayerDist(2, 3, padding=1, padding_mode=["zeros", "wrap"])]
        model = nd.ConvnetDist(layers, cost=nd.MSE(weights=weights), optimizer=nd.SGD(learning_rate=0.1), seed=3)
        model.dtype = np.dtype("float64")
        model.build(data.sample_shape, 3, grid)
        model.restrict_cost_to_local_cells(data.fields)
        results = evaluate(model, data.test, 3, make_metrics(weights))
        numbers = np.arange(7)
        y = model.gather(model.fprop(data.test.images(numbers, "float64"), training=False, batch_size=7))
        loss = model.train_batch(data.train.images(np.arange(3), "float64"), data.train.targets(np.arange(3)))
        data.close()
        return results, y * data.fields.std + data.fields.mean, loss, model.state(), (data.fields.mean, data.fields.std)

    return loopback.run(ranks, body)[0]


def compute_with_xarray(dataset, y, scale, weights):
    """Return the loss and metrics computed by xarray."""
    fields = {"t2m": dataset.t2m.astype("f8"), "z500": dataset.z.sel(level=500).astype("f8")}
    metrics, squares = {}, []
    for channel, (name, truth) in enumerate(fields.items()):
        training, truth = truth.isel(time=slice(0, 23)), truth.isel(time=slice(23, 30))
        forecast = truth.copy(data=y[..., channel])
        error = (forecast - truth).weighted(weights)
        squares.append((((forecast - truth) / scale[1][channel]) ** 2).weighted(weights).mean())
        metrics[f"rmse_{name}"] = np.sqrt(((forecast - truth) ** 2).weighted(weights).mean())
        metrics[f"mae_{name}"] = abs(forecast - truth).weighted(weights).mean()
        metrics[f"bias_{name}"] = error.mean()
        deviation = truth - truth.weighted(weights).mean()
        metrics[f"r2_{name}"] = (
            1 - ((forecast - truth) ** 2).weighted(weights).sum() / (deviation**2).weighted(weights).sum()
        )
        climate = training.mean("time")
        f, o, axes = forecast - climate, truth - climate, ["lat", "lon"]
        sums = [(a * b).weighted(weights).sum(axes) for a, b in ((f, o), (f, f), (o, o))]
        metrics[f"acc_{name}"] = (sums[0] / np.sqrt(sums[1] * sums[2])).mean()
    return {"loss": np.mean(squares), **{name: float(value) for name, value in metrics.items()}}


def make_weights(kind, dataset, path):
    """Return the argument and the weights it denotes."""
    if kind == "cosine":
        return "cos(lat)", np.cos(np.deg2rad(dataset.lat)) * xarray.ones_like(dataset.t2m[0], "f8")
    area = xarray.DataArray(np.random.default_rng(1).random((7, 6)), dataset.t2m[0].coords, ("lat", "lon"), "area")
    area.drop_vars("time").to_netcdf(path / "area.nc4")
    return f"{path}/area.nc4:area", area.drop_vars("time")


@pytest.mark.parametrize("kind", ["cosine", "file"])
@pytest.mark.long
def test_costs_and_metrics_match_xarray(tmp_path, kind):
    dataset = write_series(tmp_path, extent=(7, 6))
    weights, arrays = make_weights(kind, dataset, tmp_path)
    serial, *parallel = (
        evaluate_on_ranks(tmp_path, ranks, weights) for ranks in ((1, 4) if kind != "file" else (1, 2))
    )
    expected = compute_with_xarray(dataset, serial[1], serial[4], arrays)
    assert set(serial[0]) == set(expected)
    for name, value in expected.items():
        assert serial[0][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    for actual, _, loss, state, _ in parallel:
        assert actual == pytest.approx(serial[0], rel=1e-9, abs=1e-9)
        assert loss == pytest.approx(serial[2], rel=1e-12)
        for name, array in state.items():
            np.testing.assert_allclose(array, serial[3][name], rtol=1e-9, atol=1e-12)


def test_weighted_cost_gradients_match_finite_differences(tmp_path):
    write_dataset(make_weather(0, 12), tmp_path / "a.nc")
    data = nd.ClimateFiles(str(tmp_path / "a.nc"), ["t2m"], validation=2)
    data.check()
    rng, box = np.random.default_rng(0), nd.Box((1, 2), (4, 7))
    y, t = rng.normal(size=(2, 2, 3, 5, 2))
    for cost in (nd.MSE, nd.MAE, nd.Huber, nd.SumSquared):
        placed = cost(weights="cos(lat)").restrict_to_box((6, 8), box, data.fields)
        direction, step = rng.normal(size=y.shape), 1e-6
        slope = (placed.local_sum(y + step * direction, t) - placed.local_sum(y - step * direction, t)) / (2 * step)
        assert (placed.local_sum_gradient(y, t) * direction).sum() == pytest.approx(slope, rel=1e-6)


def test_channels_without_fields_are_a_list():
    rng = np.random.default_rng(0)
    y, t = rng.normal(size=(2, 4, 5, 6, 3))
    metric = nd.RMSE()
    np.testing.assert_allclose(
        metric.result(np.array(metric.local_sums(y, t)))["rmse"], np.sqrt(((y - t) ** 2).mean((0, 1, 2)))
    )
    assert np.isnan(nd.RMSE().result(np.array(metric.local_sums(y[..., :1], t[..., 0, 0])))["rmse"])


LAYERS = "layers: [!ConvLayerDist {out_channels: 1, kernel_size: 3, padding: 1}]"
MISTAKES = {
    "no latitude": (
        lambda d: d.drop_vars("lat"), LAYERS, "cost: !MSE {weights: cos(lat)}", "",
        r"run.yaml:4: model.cost(.weights)?: .*a\.nc:t2m: has no latitude, which weights: cos\(lat\) needs; add",
    ),
    "no such file": (
        lambda d: d, LAYERS, "cost: !MSE {weights: area.nc}", "", r"model.cost: .*area\.nc: no such file",
    ),
    "weights of reversed rows": (
        lambda d: d.isel(lat=slice(None, None, -1)), LAYERS, "cost: !MSE {weights: 'FOLDER/mask.nc4:t2m'}", "",
        r"model.cost.*mask\.nc4:t2m: its coordinate lat differs from that of .*a\.nc:t2m; reverse that axis",
    ),
    "weights from -180 degrees": (
        lambda d: d, LAYERS, "cost: !MSE {}", "metrics: [!RMSE {weights: 'FOLDER/shifted.nc4:t2m'}]",
        r"metrics.0.*shifted\.nc4:t2m: its coordinate lon differs from that of .*a\.nc:t2m; regrid one",
    ),
    "mismatched extent": (
        lambda d: d, "layers: [!ConvLayerDist {out_channels: 1, kernel_size: 3}]", "cost: !MSE {}",
        "metrics: [!RMSE {weights: cos(lat)}]", r"run.yaml:5: metrics.0.weights: outputs have \[4, 6\] cells",
    ),
    "weights of a vector": (
        lambda d: d, "layers: [!FCLayerDist {out_features: 48}]", "cost: !SumSquared {}",
        "metrics: [!RMSE {weights: cos(lat)}]", r"run.yaml:5: metrics.0.weights: the last layer returns a vector",
    ),
    "no climatology": (
        None, LAYERS, "cost: !MSE {}", "metrics: [!ACC {}]", r"ACC needs the climatology of a data set of fields",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_the_line_and_the_remedy(tmp_path, name, capsys):
    change, layers, cost, extra_fields, message = MISTAKES[name]
    data = "!Synthetic {shape: [6, 8, 1]}"
    if change is not None:
        write_dataset(change(make_weather(0, 12)), tmp_path / "a.nc")
        mask = make_weather(0, 1).isel(time=0)
        mask.to_netcdf(tmp_path / "mask.nc4")
        mask.assign_coords(lon=mask.lon - 180).to_netcdf(tmp_path / "shifted.nc4")
        data = f"!ClimateFiles {{files: '{tmp_path}/a.nc', variables: [t2m]}}"
    text = f"!FitExperiment\ndataset: {data}\nmodel: !ConvnetDist {{{layers},\n  {cost}}}\n{extra_fields}\n"
    text = text.replace("FOLDER", str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    stderr = capsys.readouterr().err
    assert re.search(message, stderr), stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(("metric", "pick"), [("rmse", np.argmin), ("acc", np.argmax)])
@pytest.mark.long
def test_metric_of_a_variable_selects_the_best_epoch(tmp_path, metric, pick, capsys):
    write_dataset(make_weather(0, 16), tmp_path / "a.nc")
    text = (
        f"!FitExperiment\ndataset: !ClimateFiles {{files: '{tmp_path}/a.nc', variables: [t2m, u10]}}\n"
        "model: !ConvnetDist\n  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 1}]\n"
        "  cost: !MSE {}\n  optimizer: !SGD {learning_rate: 0.9}\n"
        f"metrics: [!RMSE {{}}, !ACC {{}}]\nbatch_size: 4\nepochs: 4\nbest: !Best {{number: validation_{metric}_u10}}\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    experiment = load_experiment(tmp_path / "run.yaml")
    history = experiment.run(nd.ProcessGrid.serial(), output=tmp_path / "run").history
    values = [record[f"validation_{metric}_u10"] for record in history]
    result = evaluate_checkpoint(
        load_experiment(tmp_path / "run.yaml"), tmp_path / "run" / "checkpoint_best.h5", nd.ProcessGrid.serial(),
        "validation",
    )  # fmt: skip
    assert result[f"{metric}_u10"] == pytest.approx(values[pick(values)], rel=1e-6)
    (tmp_path / "run.yaml").write_text(text.replace("_u10", ""))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert f"number: 'validation_{metric}' is not in any record; did you mean 'validation_{metric}_" in (
        capsys.readouterr().err
    )
