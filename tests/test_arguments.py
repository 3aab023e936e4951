"""Constructors and calls with invalid arguments: one message that names the field, as for YAML files."""

import inspect
from typing import Annotated

import numpy as np
import pytest

import neondist as nd
import neondist.train
from neondist.errors import ConfigError, UserError
from neondist.registry import Registered, registered_classes
from neondist.registry.arguments import type_checked
from neondist.registry.fields import constructor_fields
from neondist.registry.ranges import Count, Finite, NotNegative, Positive, UnitInterval, between

NAN = float("nan")
CLASSES = sorted(
    (cls for cls in registered_classes().values() if cls.__module__.startswith("neondist.")),
    key=lambda cls: cls.__name__,
)


def make_data(**arguments):
    return nd.Synthetic((8, 8, 2), **arguments)


def make_model(**arguments):
    return nd.Convnet([nd.FCLayer(3)], **{"backend": "numpy"} | arguments)  # avoids the import of PyTorch


def build_model(*layers, shape=(8, 8, 2)):
    nd.Convnet(layers, backend="numpy").build(shape, batch_size=2)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_signatures_name_all_arguments(cls):
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == list(constructor_fields(cls))
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        name: field.default for name, field in constructor_fields(cls).items()
    }


POSITIONAL_ARGUMENTS = {
    nd.Window: "kernel stride padding dilation fill mode",
    nd.GlobalArray: "grid global_shape window dtype backend",
    nd.SerialArray: "global_shape window dtype backend",
    nd.ConvLayerDist: "out_channels kernel_size stride padding dilation groups bias activation padding_mode"
    " scheme name",
    nd.AvgPoolingLayerDist: "kernel_size stride padding count_include_pad",
    nd.FCLayerDist: "out_features bias activation",
    nd.BatchNormLayerDist: "momentum eps",
}


@pytest.mark.parametrize("cls", POSITIONAL_ARGUMENTS, ids=lambda cls: cls.__name__)
def test_positional_arguments(cls):
    parameters = inspect.signature(cls).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL_ARGUMENTS[cls].split()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_surplus_arguments_are_rejected(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__}.*(; expected {cls.__name__}\(| takes no arguments)"):
        cls(*[1] * 20)
    with pytest.raises(TypeError, match=r" takes no arguments|unexpected keyword argument 'no_such_option'"):
        cls(no_such_option=1)


def test_signatures_of_callable_objects():
    class Scaling(Registered):
        def __call__(self, values, factor=2):
            return factor * values

    assert list(inspect.signature(Scaling()).parameters) == ["values", "factor"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_checks_its_type(cls):
    for name in constructor_fields(cls):
        with pytest.raises(UserError, match=rf"{name}: expected .*, got a object"):
            cls(**{name: object()})


WRONG_ARGUMENTS = {
    "activation by name": (
        lambda: nd.ConvLayer(2, 3, activation="relu"),
        r"ConvLayer: activation: .*'relu'; write ReLU\(\)",
    ),
    "optimizer by name": (lambda: make_model(optimizer="adam"), r"Convnet: optimizer: .*'adam'; write Adam\(\)"),
    "a cost's class": (
        lambda: make_model(cost=nd.CrossEntropy),
        r"cost: .*got the class CrossEntropy; write CrossEntropy\(\)",
    ),
    "a layer's class": (lambda: nd.Convnet([nd.FCLayer]), r"layers\.0: .*got the class FCLayer; write FCLayer\(\)"),
    "a NumPy type": (
        lambda: make_model(dtype=np.float64),
        "dtype: expected text, got the dtype float64; write 'float64'",
    ),
    "a NumPy dtype": (
        lambda: nd.SerialArray((1, 2, 2, 1), dtype=np.dtype("f4")),
        "dtype: expected text, got the dtype float32; write 'float32'",
    ),
    "in a branch": (lambda: nd.Sum([[nd.ConvLayer]]), "layers.0: .*got the class ConvLayer"),
    "no layers": (lambda: nd.Convnet(None), "Convnet: layers: expected a list .*, got None"),
    "an empty list": (lambda: nd.Convnet([]), "layers: a model needs at least one layer"),
    "text for a number": (
        lambda: nd.ConvLayer("4", 3),
        "out_channels: expected an integer of at least 1, got the text '4'; remove the quotes",
    ),
    "a fraction": (lambda: nd.ConvLayer(4.0, 3), "out_channels: expected an integer of at least 1, got 4.0; write 4"),
    "an item": (lambda: nd.MaxPoolingLayer((2, "2")), r"kernel_size\.1: expected an integer, got the text '2'"),
    "data by name": (lambda: nd.FitExperiment("mnist", make_model()), r"dataset: .*'mnist'; write MNIST\(\)"),
    "a schedule": (lambda: nd.SGD(schedule=0.1), "schedule: expected an object .*, got 0.1"),
    "grid": (
        lambda: nd.FitExperiment(make_data(), make_model(), grid={"rows": "2"}),
        r"grid\.rows: expected an integer of at least 1 or null, got the text '2'",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name):
    create, message = WRONG_ARGUMENTS[name]
    with pytest.raises(ConfigError, match=message):
        create()


def test_numpy_numbers_and_arrays_are_accepted():
    nd.ConvLayer(np.int64(2), np.array([3, 3]), padding=[np.int32(1), 1], bias=np.True_)
    nd.SGD(np.float32(0.5), momentum=0)
    nd.Convnet((nd.FCLayer(3),), dtype="float64", backend=nd.get_backend("numpy"))


@pytest.mark.parametrize(
    ("hint", "valid", "invalid", "expected"),
    [
        (Count, (1, np.int64(7)), (0, -1, 1.5), "an integer of at least 1"),
        (Positive, (5e-324, 1, np.float32(2)), (0.0, -1, NAN, np.inf), "a number above 0"),
        (UnitInterval, (0, 0.5), (1, -0.1, NAN), "a number of at least 0 and below 1"),
        (Finite, (0, -1e300), (NAN, np.inf, -np.inf), "a number that is finite"),
        (NotNegative | None, (0.0, None), (-1e-9, np.inf), "a number of at least 0 or null"),
        (Annotated[int, between(0, 9)], (0, 9), (10, -1, 10**400), "an integer from 0 to 9"),
        (list[Count], ([], [1, 2]), ([1, 0], 1), r"a list \(each an integer of at least 1\)|an integer of at least 1"),
    ],
)
def test_ranges(hint, valid, invalid, expected):
    @type_checked
    def function(field):
        """Its annotation is set below."""

    function.__wrapped__.__annotations__["field"] = hint
    for value in valid:
        function(value)
    for value in invalid:
        with pytest.raises(ConfigError, match=rf"^function: field(\.1)?: expected ({expected}), got "):
            function(value)


def test_user_subclass_checks_forwarded_arguments():
    class CustomSGD(nd.SGD):
        def __init__(self, rate):
            super().__init__(rate)

    with pytest.raises(ConfigError, match="learning_rate: expected a number of at least 0, got -1"):
        CustomSGD(-1)


OUT_OF_RANGE = {
    "out_channels": (
        lambda: build_model(nd.ConvLayer(0, 3)),
        lambda: build_model(nd.ConvLayer(-1, 3)),
        lambda: build_model(nd.DeconvLayer(0, 3)),
        lambda: build_model(nd.LocalFilteringLayer(-2, 3)),
    ),
    "out_features": (lambda: build_model(nd.FCLayer(0)), lambda: build_model(nd.FCLayer(-3))),
    "kernel": (
        lambda: build_model(nd.ConvLayer(2, 0)),
        lambda: build_model(nd.ConvLayer(2, (3, -1))),
        lambda: build_model(nd.MaxPoolingLayer(0)),
        lambda: build_model(nd.AvgPoolingLayer(-2)),
        lambda: build_model(nd.L2PoolingLayer(0)),
        lambda: build_model(nd.LCNLayer(0)),
        lambda: build_model(nd.DeconvLayer(2, 0)),
        lambda: build_model(nd.LocalFilteringLayer(2, 0)),
        lambda: nd.Window(0, ndim=2),
        lambda: build_model(nd.ConvLayer(2, (3, 3, 3))),
        lambda: build_model(nd.ConvLayer(2, ())),
    ),
    "stride": (
        lambda: build_model(nd.ConvLayer(2, 3, 0)),
        lambda: build_model(nd.MaxPoolingLayer(2, -1)),
        lambda: build_model(nd.DeconvLayer(2, 3, 0)),
    ),
    "dilation": (
        lambda: build_model(nd.ConvLayer(2, 3, dilation=0)),
        lambda: build_model(nd.DeconvLayer(2, 3, dilation=-1)),
    ),
    "padding": (
        lambda: build_model(nd.ConvLayer(2, 3, padding=-1)),
        lambda: build_model(nd.MaxPoolingLayer(2, padding=3)),
        lambda: build_model(nd.ConvLayer(2, 3, padding="sme")),
        lambda: build_model(nd.PadLayer(((1,), (1, 1)))),
    ),
    "output_padding": (lambda: build_model(nd.DeconvLayer(2, 3, output_padding=-1)),),
    "groups": (
        lambda: build_model(nd.ConvLayer(2, 3, groups=0)),
        lambda: build_model(nd.GroupNormLayer(0)),
        lambda: build_model(nd.GroupNormLayer(-2)),
    ),
    "padding_mode|mode": (
        lambda: build_model(nd.ConvLayer(2, 3, padding_mode="mirror")),
        lambda: build_model(nd.PadLayer(1, mode="mirror")),
        lambda: nd.UpsampleLayer(2, "cubic"),
        lambda: nd.Window(3, mode="mirror"),
    ),
    "rate": (lambda: nd.DropoutLayer(NAN), lambda: nd.DropoutLayer(1.0), lambda: nd.DropoutLayer(-0.1)),
    "momentum": (
        lambda: nd.BatchNormLayer(momentum=NAN),
        lambda: nd.BatchNormLayer(momentum=-1),
        lambda: nd.SGD(momentum=1),
    ),
    "eps": (
        lambda: nd.BatchNormLayer(eps=0),
        lambda: nd.BatchNormLayer(eps=NAN),
        lambda: nd.GroupNormLayer(eps=-1),
        lambda: nd.Adam(eps=NAN),
        lambda: nd.InstanceNormLayer(eps=float("inf")),
    ),
    "factor": (lambda: nd.UpsampleLayer(0), lambda: nd.UpsampleLayer((2, -1)), lambda: nd.StepDecay(2, NAN)),
    "cropping|crop": (lambda: nd.CropLayer(-1), lambda: build_model(nd.CropLayer(9))),
    "depth": (lambda: nd.LRNLayer(0),),
    "alpha": (lambda: nd.LRNLayer(alpha=NAN),),
    "sigma": (lambda: nd.LCNLayer(sigma=0.0), lambda: nd.LCNLayer(sigma=NAN)),
    "min_deviation": (lambda: nd.LCNLayer(min_deviation=0.0), lambda: nd.LCNLayer(min_deviation=NAN)),
    "learning_rate": (lambda: nd.SGD(NAN), lambda: nd.SGD(-1), lambda: nd.Adam(float("inf"))),
    "seed": (lambda: make_model(seed=-1), lambda: make_data(seed=-1)),
    "dtype": (lambda: make_model(dtype="float16"),),
    "backend": (
        lambda: nd.get_backend("cuda"),
        lambda: nd.Convnet([nd.FCLayer(3)], backend="numpi").build((8, 8, 1), 2),
    ),
    "scheme": (lambda: make_model(scheme="haloo"), lambda: nd.ConvLayer(2, 3, scheme="towr")),
    "steps": (lambda: nd.schemes.Stale(0),),
    "layers": (lambda: nd.schemes.DeepHalo(0), lambda: nd.Sum([]), lambda: nd.Concat([])),
    "j": (lambda: nd.schemes.Every(0),),
    "bits": (lambda: nd.schemes.Quantised(3),),
    "latency|bandwidth|speed|samples": (
        lambda: nd.schemes.Auto(latency=NAN),
        lambda: nd.schemes.Auto(bandwidth=-1.0),
        lambda: nd.schemes.Auto(samples=0),
        lambda: nd.schemes.Auto(speed=0.0),
    ),
    "k": (lambda: nd.TopK(0),),
    "smooth": (lambda: nd.Dice(NAN), lambda: nd.Dice(-1)),
    "value": (lambda: nd.Constant(NAN),),
    "gain": (lambda: nd.FanInNormal(NAN), lambda: nd.FanInNormal(-1)),
    "scale": (lambda: nd.Gaussian(-1), lambda: nd.Gaussian(NAN), lambda: nd.HDF5Dataset("x.h5", scale=0.0)),
    "low|high": (lambda: nd.Uniform(NAN, 1), lambda: nd.Uniform(1, -1)),
    "crop": (lambda: nd.Photographs(crop=0), lambda: nd.Photographs(crop=(1, 2, 3))),
    "std": (lambda: nd.HDF5Dataset("x.h5", std=0.0), lambda: nd.HDF5Dataset("x.h5", std=NAN)),
    "test_share": (lambda: nd.HDF5Dataset("x.h5", test_share=1.5),),
    "classes": (lambda: make_data(classes=0), lambda: nd.HDF5Dataset("x.h5", classes=-1)),
    "sparsity": (lambda: nd.GB([nd.LocalFilteringLayer(2, 3), nd.FCLayer(3)], sparsity=NAN),),
    "epsilon": (lambda: nd.GB([nd.LocalFilteringLayer(2, 3), nd.FCLayer(3)], epsilon=0),),
    "batch_size": (
        lambda: nd.FitExperiment(make_data(), make_model(), batch_size=0),
        lambda: make_model().build((8, 8, 2), 0),
        lambda: make_model().build((8, 8, 2), "2"),
        lambda: make_model().build((8, 8, 2), 2.5),
    ),
    "epochs": (lambda: nd.FitExperiment(make_data(), make_model(), epochs=-1), lambda: nd.CosineDecay(0)),
    "input_shape": (
        lambda: make_model().build((8, 0, 1), 2),
        lambda: make_model().build(8, 2),
        lambda: make_model().build((8, 8.5, 1), 2),
    ),
    "replicas": (lambda: nd.ProcessGrid(replicas=0), lambda: nd.ProcessGrid(replicas="2")),
    "rows": (lambda: nd.ProcessGrid(rows=-1), lambda: nd.ProcessGrid(rows=1.5)),
    "comm": (lambda: nd.ProcessGrid("world"), lambda: nd.ProcessGrid(2)),
}
CASES = [
    pytest.param(create, name, id=f"{name}-{index}")
    for name, calls in OUT_OF_RANGE.items()
    for index, create in enumerate(calls)
]


@pytest.mark.parametrize(("create", "name"), CASES)
def test_out_of_range_values(create, name):
    with pytest.raises(UserError, match=rf"\b({name})"):
        create()


SERIAL = nd.ProcessGrid.serial()
API_ARGUMENTS = {
    "Window: kernel": (lambda: nd.Window("3"), lambda: nd.Window(2.5), lambda: nd.Window(None)),
    "Window: mode": (lambda: nd.Window(3, mode=3),),
    "Window: ndim": (lambda: nd.Window(3, ndim="2"),),
    "GlobalArray: grid": (lambda: nd.GlobalArray("grid", (2, 8, 8, 1)),),
    "GlobalArray: global_shape": (lambda: nd.GlobalArray(SERIAL, 5), lambda: nd.GlobalArray(SERIAL, (2, 8.5, 8, 1))),
    "GlobalArray: window": (lambda: nd.GlobalArray(SERIAL, (2, 8, 8, 1), 3),),
    "SerialArray: global_shape": (lambda: nd.SerialArray("abc"),),
    "get_backend: name": (lambda: nd.get_backend(3), lambda: nd.get_backend(None)),
    "run: ranks": (lambda: nd.loopback.run("4", print),),
    "run: function": (lambda: nd.loopback.run(2, 3),),
    "DebugHalo: seed": (lambda: nd.DebugHalo("x"),),
    "ProcessGrid: replicas": (lambda: nd.ProcessGrid(replicas="2"),),
    "fit: epochs": (lambda: nd.fit(make_model(), make_data(), epochs="3"),),
    "FitExperiment.run: grid": (lambda: nd.FitExperiment(make_data(), make_model()).run(grid=3),),
    "FitExperiment.run: hooks": (lambda: nd.FitExperiment(make_data(), make_model()).run(hooks=[3]),),
    "FitExperiment.validate: ranks": (lambda: nd.FitExperiment(make_data(), make_model()).validate("2"),),
    "Model.build: grid": (lambda: make_model().build((8, 8, 1), 2, grid=3),),
    "Model.plan: grid": (lambda: make_model().plan((8, 8, 1), 3),),
}


@pytest.mark.parametrize("field", API_ARGUMENTS)
def test_arguments_without_yaml_field(field):
    for create in API_ARGUMENTS[field]:
        with pytest.raises(ConfigError, match=rf"^{field}(\.\d)?: expected .*, got "):
            create()


INVALID_STATES = {
    "an unbuilt model, fprop": (lambda: make_model().fprop(np.zeros((2, 8, 8, 2), "float32")), "build"),
    "an unbuilt model, training": (lambda: make_model().train_batch(np.zeros((2, 8, 8, 2)), np.zeros(2, int)), "build"),
    "an unbuilt model, fit": (lambda: nd.fit(make_model(), open_data()), "build"),
    "an unbuilt model, bprop": (lambda: make_model().bprop(np.zeros((2, 3))), "build"),
    "an unbuilt model, its state": (lambda: make_model().state(), "build"),
    "data that are not open": (lambda: make_data().train, "open"),
    "fit on data that are not open": (lambda: nd.fit(make_built_model(), make_data()), "open"),
    "pretrain on data that are not open": (lambda: nd.pretrain(make_built_model(make_gb), make_data()), "open"),
    "no model to fit": (lambda: nd.fit("model", make_data()), "model"),
    "no data to fit": (lambda: nd.fit(make_built_model(), np.zeros(3)), "dataset"),
    "no model to distribute": (lambda: nd.distribute([nd.FCLayer(3)]), "model"),
}


def make_gb():
    return nd.GB([nd.LocalFilteringLayer(2, 3), nd.FCLayer(3)], backend="numpy")


def open_data():
    dataset = make_data(train=4, test=4)
    dataset.open(nd.ProcessGrid.serial())
    return dataset


def make_built_model(create=make_model):
    model = create()
    model.build((8, 8, 2), 2)
    return model


@pytest.mark.parametrize("name", INVALID_STATES)
def test_calls_before_build_or_open(name):
    call, message = INVALID_STATES[name]
    with pytest.raises(UserError, match=message):
        call()
