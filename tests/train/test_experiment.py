"""Mistakes in an experiment: found before anything starts, in words that help."""

import pytest
from session_toys import experiment

from neondist.config import load_experiment, place
from neondist.data import MNIST, Synthetic
from neondist.errors import ConfigError, DataError, GridError, ShapeError
from neondist.layers import ConvLayer, ConvLayerDist, FCLayer, FCLayerDist
from neondist.metrics import TopK
from neondist.models import Convnet, ConvnetDist
from neondist.train import FitExperiment

DATA = Synthetic((12, 12, 1), classes=4, train=8, test=4)


def small(**fields):
    return FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), FCLayerDist(4)]), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, r"^FitExperiment: batch_size: expected an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, r"batch_size: expected an integer .*, got 1\.5$"),
        ({"batch_size": True}, r"batch_size: expected an integer .*, got True"),
        ({"epochs": 0}, r"epochs: expected an integer of at least 1, got 0"),
        ({"epochs": "3"}, r"epochs: expected an integer .*, got the text '3'; remove the quotes"),
        ({"dist_flag": 1}, r"dist_flag: expected true or false, got 1"),
        ({"grid": 4}, r"grid: expected a mapping or null, got 4"),
        ({"grid": {"row": 2}}, r"^grid: unknown key 'row'; did you mean 'rows'\?"),
        ({"grid": {"rows": 0}}, r"grid\.rows: expected an integer of at least 1 or null, got 0"),
        ({"dtype": "float16"}, r"dtype: expected 'float32' or 'float64' or null, got the text 'float16'"),
        ({"seed": -1}, r"seed: expected an integer of at least 0 or null, got -1"),
        ({"metrics": [3]}, r"metrics\.0: expected .*Accuracy.* got 3"),
        ({"metrics": [TopK(2), TopK(2)]}, "metrics: two metrics are named 'top2_error'"),
        ({"metrics": TopK(2)}, r"metrics: expected a list .* got a TopK"),
    ],
)
def test_field_out_of_range(fields, message):
    with pytest.raises(ConfigError, match=message):
        small(**fields)


def test_dataset_and_model_of_the_wrong_kind():
    with pytest.raises(ConfigError, match=r"dataset: .*; write MNIST\(\)"):
        FitExperiment("mnist", ConvnetDist([FCLayerDist(4)]))
    with pytest.raises(ConfigError, match=r"model: expected an object .*ConvnetDist.*, got a list"):
        FitExperiment(DATA, [FCLayerDist(4)])


def validated(made, ranks=1):
    """The error of validation, which has to name its subject."""
    with pytest.raises((ConfigError, DataError, GridError, ShapeError)) as caught:
        made.validate(ranks)
    assert caught.value.subject is not None
    return caught.value


def test_grid_that_does_not_fit():
    error = validated(small(grid={"rows": 2, "cols": 2}), 6)
    assert isinstance(error, GridError)
    assert "1 x 6, 2 x 3, 3 x 2, 6 x 1" in str(error)
    assert isinstance(validated(small(grid={"replicas": 4}), 6), GridError)
    small(grid={"replicas": 2, "rows": 3, "cols": None}).validate(6)


def test_fewer_samples_than_replicas():
    error = validated(small(batch_size=3, grid={"replicas": 4}), 4)
    assert str(error).startswith("batch_size: 3 samples are fewer than the 4 replicas; give at least 4")


def test_one_process_on_many_ranks():
    assert str(validated(small(dist_flag=False), 2)).startswith("dist_flag: ")
    small(dist_flag=False).validate(1)
    serial = FitExperiment(DATA, Convnet([ConvLayer(2, 3), FCLayer(4)]))
    serial.validate(1)
    assert "use ConvnetDist" in str(validated(serial, 2))


def test_kernel_larger_than_the_image_names_the_layer():
    big = ConvLayerDist(2, 99, name="big")
    error = validated(FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), big, FCLayerDist(4)])))
    assert error.subject is big
    assert "big" in str(error)
    assert "kernel_size" in str(error)


def test_too_few_outputs_names_the_last_layer():
    made = FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), FCLayerDist(3)]))
    error = validated(made)
    assert error.subject is made.model.layers[-1]
    assert "3 outputs, but the data set has 4 classes" in str(error)


def test_missing_data_names_the_data_set(tmp_path):
    missing = MNIST(path=str(tmp_path / "nowhere"))
    error = validated(FitExperiment(missing, ConvnetDist([FCLayerDist(10)])))
    assert isinstance(error, DataError)
    assert error.subject is missing


def test_metric_that_needs_more_classes():
    metric = TopK(5)
    error = validated(small(metrics=[metric]))
    assert error.subject is metric


def test_unknown_backend():
    assert "backend" in str(validated(small(backend="nupmy")))


def test_experiment_overrides_the_model():
    made = experiment(dtype="float32", seed=5, backend="numpy")
    assert (made.model.dtype, made.model.seed, made.model.backend) == ("float32", 5, "numpy")
    kept = experiment()
    assert (kept.model.dtype, kept.model.seed, kept.model.backend) == ("float64", 0, "auto")


def test_one_seed_one_run_and_another_seed_another():
    losses = [experiment(1, seed=seed).run(hooks=[]).history[0]["train_loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_serial_twin_trains_the_same():
    layers = [ConvLayer(2, 3), FCLayer(4)], [ConvLayerDist(2, 3), FCLayerDist(4)]
    models = Convnet(layers[0], dtype="float64"), ConvnetDist(layers[1], dtype="float64")
    made = [
        FitExperiment(DATA, model, batch_size=4, dist_flag=dist)
        for model, dist in zip(models, (False, True), strict=True)
    ]
    serial, dist = (
        each.run(each.open_grid(None) if not each.dist_flag else None, hooks=[]).history[0] for each in made
    )
    assert serial["train_loss"] == pytest.approx(dist["train_loss"], rel=1e-12)


def test_a_real_network_learns():
    history = experiment(6, dtype="float32").run(hooks=[]).history
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    assert history[-1]["test_error"] < 0.2


WRAPPED = ConvLayerDist(4, 3, padding=1, padding_mode="wrap")


@pytest.mark.parametrize(
    ("dataset", "layer", "says"),
    [
        (Synthetic([1 << 20, 1 << 20, 3]), FCLayerDist(4), "needs .* TB, most of it for layer 'fc1'"),
        (Synthetic([1 << 17, 1 << 17, 300]), WRAPPED, "needs .* TB, most of it for layer 'conv1'"),
        (Synthetic([8, 8, 1]), FCLayerDist(10**12), "needs .* TB, most of it for layer 'fc1'"),
        (Synthetic([8, 8, 1], train=10**13), FCLayerDist(4), "bookkeeping for 10000000000064 samples needs 400 TB"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_allocated(dataset, layer, says):
    with pytest.raises((ConfigError, DataError), match=says):
        FitExperiment(dataset, ConvnetDist([layer], backend="numpy"), batch_size=4).validate()


@pytest.mark.parametrize("where", ["optimizer", "pretrain_optimizer"])
def test_a_schedule_that_ends_before_the_run_is_refused(tmp_path, where):
    """The epochs after its end would be trained at rate 0."""
    (tmp_path / "x.yaml").write_text(f"""!FitExperiment
dataset: !Synthetic {{shape: [6, 5, 1], classes: 3, train: 4, test: 2}}
model: !GBDist
  layers: [!LocalFilteringLayerDist {{out_channels: 2, kernel_size: 3}}, !FCLayerDist {{out_features: 3}}]
  num_pretrain_epochs: 8
  {where}: !SGD {{learning_rate: 0.1, schedule: !CosineDecay {{epochs: 6}}}}
epochs: 8
""")
    message = rf"x\.yaml:6: model\.{where}\.schedule\.epochs: the learning rate is 0 after 6 epochs, but 8 epochs are"
    with pytest.raises(ConfigError, match=message):
        _checked(tmp_path / "x.yaml")
    _checked(tmp_path / "x.yaml", [f"model.{where}.schedule.epochs=8"])


def _checked(path, settings=()):
    try:
        load_experiment(path, settings).validate(1)
    except ConfigError as error:
        raise place(error) from None
