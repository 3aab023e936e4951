"""Validation errors of experiments, raised before training starts."""

import itertools

import h5py
import numpy as np
import pytest
from toy_training import make_experiment

import neondist as nd
from neondist.config import add_location, load_experiment
from neondist.data import MNIST, HDF5Dataset, Synthetic
from neondist.errors import ConfigError, DataError, GridError, ShapeError, UserError
from neondist.layers import ConvLayer, ConvLayerDist, FCLayer, FCLayerDist
from neondist.metrics import TopK
from neondist.models import Convnet, ConvnetDist
from neondist.train import FitExperiment

DATA = Synthetic((12, 12, 1), classes=4, train=8, test=4)


def make_small_experiment(**fields):
    return FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), FCLayerDist(4)]), **fields)


def rename_metric(name):
    metric = TopK(2)
    metric.name = name
    return metric


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
        ({"metrics": [rename_metric("loss")]}, "metrics: 'loss' names another value of the records; rename the metric"),
        ({"metrics": [rename_metric("seconds")]}, "metrics: 'seconds' names another value"),
        ({"metrics": TopK(2)}, r"metrics: expected a list .* got a TopK"),
    ],
)
def test_field_out_of_range_is_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_small_experiment(**fields)


def test_wrong_types_of_dataset_and_model_are_rejected():
    with pytest.raises(ConfigError, match=r"dataset: .*; write MNIST\(\)"):
        FitExperiment("mnist", ConvnetDist([FCLayerDist(4)]))
    with pytest.raises(ConfigError, match=r"model: expected an object .*ConvnetDist.*, got a list"):
        FitExperiment(DATA, [FCLayerDist(4)])


def catch_validation_error(experiment, ranks=1):
    """Return the error raised by validation, which must have a subject."""
    with pytest.raises((ConfigError, DataError, GridError, ShapeError)) as caught:
        experiment.validate(ranks)
    assert caught.value.subject is not None
    return caught.value


def test_incompatible_grid_is_rejected():
    error = catch_validation_error(make_small_experiment(grid={"rows": 2, "cols": 2}), 6)
    assert isinstance(error, GridError)
    assert "1 x 6, 2 x 3, 3 x 2, 6 x 1" in str(error)
    assert isinstance(catch_validation_error(make_small_experiment(grid={"replicas": 4}), 6), GridError)
    make_small_experiment(grid={"replicas": 2, "rows": 3, "cols": None}).validate(6)


def test_batch_smaller_than_the_replicas_is_rejected():
    error = catch_validation_error(make_small_experiment(batch_size=3, grid={"replicas": 4}), 4)
    assert str(error).startswith("batch_size: 3 is less than the number of replicas, 4; give at least 4")


def test_serial_experiment_on_several_ranks_is_rejected():
    assert str(catch_validation_error(make_small_experiment(dist_flag=False), 2)).startswith("dist_flag: ")
    make_small_experiment(dist_flag=False).validate(1)
    serial = FitExperiment(DATA, Convnet([ConvLayer(2, 3), FCLayer(4)]))
    serial.validate(1)
    assert "use ConvnetDist" in str(catch_validation_error(serial, 2))


def test_kernel_larger_than_the_image_names_the_layer():
    big = ConvLayerDist(2, 99, name="big")
    error = catch_validation_error(FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), big, FCLayerDist(4)])))
    assert error.subject is big
    assert "big" in str(error)
    assert "kernel_size" in str(error)


def test_too_few_outputs_names_the_last_layer():
    experiment = FitExperiment(DATA, ConvnetDist([ConvLayerDist(2, 3), FCLayerDist(3)]))
    error = catch_validation_error(experiment)
    assert error.subject is experiment.model.layers[-1]
    assert "3 outputs, but the data set has 4 classes" in str(error)


TARGETS = {
    (): np.uint8, (1,): np.float32, (3,): np.float32, (12, 10): np.uint8, (12, 10, 1): np.float32,
    (12, 10, 3): np.float32, (6, 5): np.uint8, (6, 5, 3): np.float32,
}  # fmt: skip
NETWORKS = {
    "vector": lambda outputs: [FCLayer(outputs)],
    "equal extents": lambda outputs: [ConvLayer(outputs, 3, padding=1)],
    "half the extents": lambda outputs: [ConvLayer(outputs, 2, stride=2)],
    "without padding": lambda outputs: [ConvLayer(outputs, 3)],
}


def user_error_of(call, *args):
    """Return the error that a call raises, or None."""
    try:
        call(*args)
    except (ShapeError, DataError) as error:
        return error
    return None


@pytest.mark.parametrize("shape", TARGETS, ids=str)
def test_validation_accepts_the_targets_that_training_accepts(tmp_path, shape):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"] = np.ones((4, 12, 10, 2), np.float32)
            file[f"{split}/labels"] = np.ones((4, *shape), TARGETS[shape])
    images, targets, accepted = np.ones((4, 12, 10, 2), "f4"), np.ones((4, *shape), TARGETS[shape]), 0
    costs = nd.CrossEntropy, nd.MSE, nd.BCE, nd.DiceCE
    for layers, outputs, cost in itertools.product(NETWORKS.values(), (1, 3), costs):
        model = Convnet(layers(outputs), cost=cost())
        dataset = HDF5Dataset(tmp_path / "data.h5", classes=None if shape else 2)
        experiment = FitExperiment(dataset, model, batch_size=4, dist_flag=False)
        if outputs == 1 and cost in (nd.CrossEntropy, nd.DiceCE):
            with pytest.raises(UserError, match="applies a softmax" if shape else "has 2 classes"):
                experiment.validate(1)
            continue
        rejection = user_error_of(experiment.validate, 1)
        if rejection is None or "but the data set has 2 classes" not in str(rejection):
            model.build((12, 10, 2), 4)
            failure = user_error_of(model.train_batch, images, targets)
            assert isinstance(failure, ShapeError) == (rejection is not None), (rejection, failure)
        assert rejection is None or rejection.subject is model.layers[-1]
        accepted += rejection is None
    assert accepted


def test_missing_data_names_the_data_set(tmp_path):
    missing = MNIST(path=str(tmp_path / "nowhere"))
    error = catch_validation_error(FitExperiment(missing, ConvnetDist([FCLayerDist(10)])))
    assert isinstance(error, DataError)
    assert error.subject is missing


def test_metric_that_needs_more_classes_is_rejected():
    metric = TopK(5)
    error = catch_validation_error(make_small_experiment(metrics=[metric]))
    assert error.subject is metric


def test_unknown_backend_is_rejected():
    assert "backend" in str(catch_validation_error(make_small_experiment(backend="nupmy")))


def test_experiment_overrides_the_model():
    experiment = make_experiment(dtype="float32", seed=5, backend="numpy")
    assert (experiment.model.dtype, experiment.model.seed, experiment.model.backend) == ("float32", 5, "numpy")
    unchanged = make_experiment()
    assert (unchanged.model.dtype, unchanged.model.seed, unchanged.model.backend) == ("float64", 0, "auto")


def test_seed_determines_the_run():
    losses = [make_experiment(1, seed=seed).run(hooks=[]).history[0]["train_loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_serial_model_matches_distributed_model():
    layers = [ConvLayer(2, 3), FCLayer(4)], [ConvLayerDist(2, 3), FCLayerDist(4)]
    models = Convnet(layers[0], dtype="float64"), ConvnetDist(layers[1], dtype="float64")
    experiments = [
        FitExperiment(DATA, model, batch_size=4, dist_flag=dist)
        for model, dist in zip(models, (False, True), strict=True)
    ]
    serial, dist = (
        experiment.run(experiment.open_grid(None) if not experiment.dist_flag else None, hooks=[]).history[0]
        for experiment in experiments
    )
    assert serial["train_loss"] == pytest.approx(dist["train_loss"], rel=1e-12)


def test_network_learns():
    history = make_experiment(6, dtype="float32").run(hooks=[]).history
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    assert history[-1]["test_error"] < 0.2


WRAPPED_CONV_LAYER = ConvLayerDist(4, 3, padding=1, padding_mode="wrap")


@pytest.mark.parametrize(
    ("dataset", "layer", "message"),
    [
        (Synthetic([1 << 20, 1 << 20, 3]), FCLayerDist(4), "needs .* TB; layer 'fc1' needs the most"),
        (Synthetic([1 << 17, 1 << 17, 300]), WRAPPED_CONV_LAYER, "needs .* TB; layer 'conv1' needs the most"),
        (Synthetic([8, 8, 1]), FCLayerDist(10**12), "needs .* TB; layer 'fc1' needs the most"),
        (Synthetic([8, 8, 1], train=10**13), FCLayerDist(4), "bookkeeping for 10000000000064 samples needs 400 TB"),
    ],
)
def test_oversized_experiment_is_rejected_before_allocation(dataset, layer, message):
    with pytest.raises((ConfigError, DataError), match=message):
        FitExperiment(dataset, ConvnetDist([layer], backend="numpy"), batch_size=4).validate()


@pytest.mark.parametrize("field", ["optimizer", "pretrain_optimizer"])
def test_schedule_shorter_than_the_run_is_rejected(tmp_path, field):
    """Epochs after the end of the schedule would have a learning rate of 0."""
    (tmp_path / "x.yaml").write_text(f"""!FitExperiment
dataset: !Synthetic {{shape: [6, 5, 1], classes: 3, train: 4, test: 2}}
model: !GBDist
  layers: [!LocalFilteringLayerDist {{out_channels: 2, kernel_size: 3}}, !FCLayerDist {{out_features: 3}}]
  num_pretrain_epochs: 8
  {field}: !SGD {{learning_rate: 0.1, schedule: !CosineDecay {{epochs: 6}}}}
epochs: 8
""")
    message = rf"x\.yaml:6: model\.{field}\.schedule\.epochs: the schedule ends after 6 epochs, but is used for 8"
    with pytest.raises(ConfigError, match=message):
        _validate_file(tmp_path / "x.yaml")
    _validate_file(tmp_path / "x.yaml", [f"model.{field}.schedule.epochs=8"])


def _validate_file(path, settings=()):
    try:
        load_experiment(path, settings).validate(1)
    except ConfigError as error:
        raise add_location(error) from None
