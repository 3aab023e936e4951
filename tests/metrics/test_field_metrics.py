"""Weighted costs and metrics of variables against xarray on whole fields, on any number of ranks."""

import re

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.train.loop import evaluate

pytest.importorskip("netCDF4", reason="files are made by netCDF4")
xarray = pytest.importorskip("xarray", reason="the oracle")
from climate import save, series, weather  # noqa: E402

NAMES = ["t2m", "z500"]


def metrics(weights):
    kinds = (nd.RMSE, nd.MeanAbsoluteError, nd.Bias, nd.R2, nd.ACC)
    return [kind(weights=weights) for kind in kinds]


def measured(path, ranks, weights):
    """What an evaluation finds on `ranks` ranks, the outputs in physical units, and the gradient of the cost."""

    def body(world):
        grid = nd.ProcessGrid(world)
        data = nd.ClimateFiles(str(path / "*.nc"), ["t2m", "z"], levels=[500], validation=None, test=7)
        data.open(grid)
        layers = [nd.ConvLayerDist(2, 3, padding=1, padding_mode=["zeros", "wrap"])]
        model = nd.ConvnetDist(layers, cost=nd.MSE(weights=weights), optimizer=nd.SGD(learning_rate=0.1), seed=3)
        model.dtype = np.dtype("float64")
        model.build(data.sample_shape, 3, grid)
        model.place(data.fields)
        found = evaluate(model, data.test, 3, metrics(weights))
        numbers = np.arange(7)
        y = model.gather(model.fprop(data.test.images(numbers, "float64"), training=False, batch_size=7))
        loss = model.train_batch(data.train.images(np.arange(3), "float64"), data.train.targets(np.arange(3)))
        data.close()
        return found, y * data.fields.std + data.fields.mean, loss, model.state(), (data.fields.mean, data.fields.std)

    return loopback.run(ranks, body)[0]


def expected(whole, y, scale, weights):
    """The same by xarray."""
    fields = {"t2m": whole.t2m.astype("f8"), "z500": whole.z.sel(level=500).astype("f8")}
    found, squares = {}, []
    for channel, (name, truth) in enumerate(fields.items()):
        training, truth = truth.isel(time=slice(0, 23)), truth.isel(time=slice(23, 30))
        made = truth.copy(data=y[..., channel])
        error = (made - truth).weighted(weights)
        squares.append((((made - truth) / scale[1][channel]) ** 2).weighted(weights).mean())
        found[f"rmse_{name}"] = np.sqrt(((made - truth) ** 2).weighted(weights).mean())
        found[f"mae_{name}"] = abs(made - truth).weighted(weights).mean()
        found[f"bias_{name}"] = error.mean()
        away = truth - truth.weighted(weights).mean()
        found[f"r2_{name}"] = 1 - ((made - truth) ** 2).weighted(weights).sum() / (away**2).weighted(weights).sum()
        climate = training.mean("time")
        f, o, over = made - climate, truth - climate, ["lat", "lon"]
        sums = [(a * b).weighted(weights).sum(over) for a, b in ((f, o), (f, f), (o, o))]
        found[f"acc_{name}"] = (sums[0] / np.sqrt(sums[1] * sums[2])).mean()
    return {"loss": np.mean(squares), **{name: float(one) for name, one in found.items()}}


def weights_of(kind, whole, path):
    """The argument, and what it stands for."""
    if kind == "cosine":
        return "cos(lat)", np.cos(np.deg2rad(whole.lat)) * xarray.ones_like(whole.t2m[0], "f8")
    area = xarray.DataArray(np.random.default_rng(1).random((7, 6)), whole.t2m[0].coords, ("lat", "lon"), "area")
    area.drop_vars("time").to_netcdf(path / "area.nc4")
    return f"{path}/area.nc4:area", area.drop_vars("time")


@pytest.mark.parametrize("kind", ["cosine", "file"])
@pytest.mark.long
def test_costs_and_metrics_are_those_of_xarray(tmp_path, kind):
    whole = series(tmp_path, extent=(7, 6))
    weights, arrays = weights_of(kind, whole, tmp_path)
    one, *others = (measured(tmp_path, ranks, weights) for ranks in ((1, 4) if kind != "file" else (1, 2)))
    wanted = expected(whole, one[1], one[4], arrays)
    assert set(one[0]) == set(wanted)
    for name, number in wanted.items():
        assert one[0][name] == pytest.approx(number, rel=1e-6, abs=1e-6), name
    for found, _, loss, state, _ in others:
        assert found == pytest.approx(one[0], rel=1e-9, abs=1e-9)
        assert loss == pytest.approx(one[2], rel=1e-12)
        for name, array in state.items():
            np.testing.assert_allclose(array, one[3][name], rtol=1e-9, atol=1e-12)


def test_a_weighted_cost_has_the_gradient_of_its_value(tmp_path):
    save(weather(0, 12), tmp_path / "a.nc")
    data = nd.ClimateFiles(str(tmp_path / "a.nc"), ["t2m"], validation=2)
    data.check()
    rng, box = np.random.default_rng(0), nd.Box((1, 2), (4, 7))
    y, t = rng.normal(size=(2, 2, 3, 5, 2))
    for cost in (nd.MSE, nd.MAE, nd.Huber, nd.SumSquared):
        placed = cost(weights="cos(lat)").placed((6, 8), box, data.fields)
        towards, step = rng.normal(size=y.shape), 1e-6
        slope = (placed.value(y + step * towards, t) - placed.value(y - step * towards, t)) / (2 * step)
        assert (placed.gradient(y, t) * towards).sum() == pytest.approx(slope, rel=1e-6)


def test_without_fields_channels_are_a_list():
    rng = np.random.default_rng(0)
    y, t = rng.normal(size=(2, 4, 5, 6, 3))
    metric = nd.RMSE()
    np.testing.assert_allclose(
        metric.result(np.array(metric.measure(y, t)))["rmse"], np.sqrt(((y - t) ** 2).mean((0, 1, 2)))
    )
    assert np.isnan(nd.RMSE().result(np.array(metric.measure(y[..., :1], t[..., 0, 0])))["rmse"])


LAYERS = "layers: [!ConvLayerDist {out_channels: 1, kernel_size: 3, padding: 1}]"
WRONG = {
    "no latitude": (
        lambda d: d.drop_vars("lat"), LAYERS, "cost: !MSE {weights: cos(lat)}", "",
        r"run.yaml:4: model.cost(.weights)?: .*a\.nc:t2m: has no latitude, which weights: cos\(lat\) needs; add",
    ),
    "no such file": (
        lambda d: d, LAYERS, "cost: !MSE {weights: area.nc}", "", r"model.cost: .*area\.nc: no such file",
    ),
    "another extent": (
        lambda d: d, "layers: [!ConvLayerDist {out_channels: 1, kernel_size: 3}]", "cost: !MSE {}",
        "metrics: [!RMSE {weights: cos(lat)}]", r"run.yaml:5: metrics.0.weights: outputs have \[4, 6\] cells",
    ),
    "no climatology": (
        None, LAYERS, "cost: !MSE {}", "metrics: [!ACC {}]", r"ACC needs the climatology of a data set of fields",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_missing_is_told_with_line_and_remedy(tmp_path, name, capsys):
    change, layers, cost, more, message = WRONG[name]
    data = "!Synthetic {shape: [6, 8, 1]}"
    if change is not None:
        save(change(weather(0, 12)), tmp_path / "a.nc")
        data = f"!ClimateFiles {{files: '{tmp_path}/a.nc', variables: [t2m]}}"
    text = f"!FitExperiment\ndataset: {data}\nmodel: !ConvnetDist {{{layers},\n  {cost}}}\n{more}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    told = capsys.readouterr().err
    assert re.search(message, told), told
    assert told.count("\n") == 1
